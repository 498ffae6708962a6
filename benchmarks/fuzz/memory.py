"""Probe the operators that a file may name: a call with wrong operands must raise, or stay inside its own tensors.

    python -m benchmarks.fuzz.memory --seed 1 --cases 200          # that many calls of every operator
    python -m benchmarks.fuzz.memory --only aten.gather.default --cases 5000

Valid calls come from PyTorch's own samples and from `calls.yaml`. A case changes up to three operands of one: shapes,
types, layouts, huge and negative numbers, indices, NaN. It runs in a child process whose tensors stand between unmapped
pages (`guard.c`), twice, with two fillings of free memory. An operator is unsafe if a child ends by a signal (it read
or wrote outside, or broke the heap), or if a result differs between the fillings (it holds uninitialised or foreign
memory).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch._refs  # takes seconds, which would count as those of a call
import torch.ao.quantization.fx._decomposed  # registers operators
import yaml
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from chipfit.engine.opaque import OPERATORS, REPLACED, listed, torch_operator
from chipfit.engine.operand_checks import checked

_HERE = Path(__file__).parent
#: the byte that fills free memory, in each of the two runs: as numbers, zeros and huge values
_FILLINGS = 0, 127
#: letters of types in `calls.yaml`
_LETTERS = {
    "f": torch.float32,
    "d": torch.float64,
    "h": torch.float16,
    "w": torch.bfloat16,
    "z": torch.complex64,
    "l": torch.int64,
    "i": torch.int32,
    "s": torch.int16,
    "c": torch.int8,
    "u": torch.uint8,
    "b": torch.bool,
}
_INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    5,
    7,
    64,
    1000,
    -2,
    -7,
    1 << 16,
    2**31 - 1,
    2**31,
    -(2**31),
    1 << 40,
    1 << 62,
    -(1 << 62),
    -(1 << 63),
)
_REALS = 0.0, -1.0, 0.5, 2.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")
_WORDS = "sum", "mean", "prod", "amax", "reflect", "constant", "circular", "replicate", "tanh", "floor", "none"


# ---------------------------------------------------------------------------------------------------- calls as data


@dataclass(frozen=True)
class Operand:
    """A tensor of a call: its type, shape, values (else drawn at random) and layout."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: tuple[Any, ...] | None = None
    layout: str = "plain"

    def make(self, random: Random) -> torch.Tensor:
        count, low = torch.Size(self.shape).numel(), 0 if self.dtype in (torch.uint8, torch.bool) else -1
        if self.values is None:
            exact = not (self.dtype.is_floating_point or self.dtype.is_complex)
            drawn = [float(random.randint(low, 1)) if exact else random.gauss(0, 1) for _ in range(count)]
        else:
            drawn = [self.values[k % len(self.values)] for k in range(count)] if self.values else [0] * count
        x = torch.tensor(drawn)
        x = x.real if x.is_complex() and not self.dtype.is_complex else x
        return _LAYOUTS[self.layout](x.to(self.dtype).reshape(self.shape))


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "expanded": lambda x: x[:1].contiguous().expand(x.shape) if x.dim() and x.shape[0] else x,
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]] if x.dim() else x,
}


def described(x: Any) -> Any:
    """Return an argument as data; a small tensor of integers keeps its values.

    Raises:
        ValueError: it is large, or of another kind.
    """
    if isinstance(x, torch.Tensor):
        if x.numel() > 400 or x.layout is not torch.strided:
            raise ValueError("a large or sparse tensor")
        exact = not (x.is_floating_point() or x.is_complex())
        return Operand(x.dtype, tuple(x.shape), tuple(x.flatten().tolist()) if exact else None)
    if isinstance(x, (list, tuple)):
        return [described(i) for i in x]
    if x is None or isinstance(x, (torch.dtype, torch.layout, torch.memory_format, int, float, str, complex)):
        return x
    if isinstance(x, torch.device):
        return x
    raise ValueError(type(x).__name__)


def _written(x: Any) -> Any:
    """Return an argument of `calls.yaml`: "f 2 3" is float32[2, 3], "l 2 = 0 4" is int64[2] with these values."""
    if isinstance(x, list):
        return [_written(i) for i in x]
    if isinstance(x, dict):
        return {k: _written(v) for k, v in x.items()}
    if isinstance(x, str) and x.startswith("@"):
        return torch.device(x[1:]) if x == "@cpu" else getattr(torch, x[1:])
    if not isinstance(x, str) or x[1:2] not in (" ", "") or x[:1] not in _LETTERS:
        return x
    shape, _, values = x[1:].partition("=")
    given = tuple(float(v) if "." in v else int(v) for v in values.split()) or None
    return Operand(_LETTERS[x[0]], tuple(map(int, shape.split())), given)


Call = tuple[list[Any], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Records the calls of reachable operators."""

    def __init__(self, calls: dict[str, dict[str, Call]]) -> None:
        super().__init__()
        self.calls, self.names = calls, set(reachable())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.calls[str(func)] if str(func) in self.names else None
        with contextlib.suppress(ValueError):
            if found is not None and len(found) < 40:
                call = described(args), {k: described(v) for k, v in (kwargs or {}).items()}
                out = func(*args, **(kwargs or {}))
                found[repr(call)] = call
                return out
        return func(*args, **(kwargs or {}))


@functools.cache
def reachable() -> list[str]:
    """Return the operators that a `.pt2` file may call, each with its overload."""
    out = []
    for namespace, names in OPERATORS.items():
        for name in (n + end for n in sorted(names) for end in ("", "_")):
            packet = getattr(getattr(torch.ops, namespace), name, None)
            full = [f"{namespace}.{name}.{o}" for o in packet.overloads()] if packet is not None else []
            found = {f: torch_operator(f, in_place=True) for f in full}
            out += [f for f, op in found.items() if op is not None and "Tensor" in str(op._schema)]
    return [*out, *(f"{name}.default" for name in REPLACED)]


def written_calls() -> dict[str, list[Call]]:
    """Return the calls of `calls.yaml`."""
    given = yaml.safe_load((_HERE / "calls.yaml").read_text(encoding="utf-8"))
    return {name: [_written_call(row) for row in rows] for name, rows in given.items()}


def valid_calls() -> dict[str, list[Call]]:
    """Return calls by operator: PyTorch's samples, recorded, and those of `calls.yaml`."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:  # only torch's tests need it
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = object, None
        sys.modules["expecttest"] = stub
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    calls: dict[str, dict[str, Call]] = defaultdict(dict)
    signal.signal(signal.SIGALRM, _too_slow)
    for op in op_db:
        signal.alarm(10)
        with contextlib.suppress(Exception):  # samples that need a library which is not installed
            _record(op, _Recorder(calls))
        signal.alarm(0)
    out = {name: list(found.values()) for name, found in calls.items()}
    return out | {name: [*found, *out.get(name, [])] for name, found in written_calls().items()}


def _record(op: Any, recorder: _Recorder) -> None:
    """Run samples of an operator, whole and in its parts."""
    kind = next((d for d in (torch.float32, torch.int64, torch.complex64) if d in op.dtypes), torch.bool)
    for _, s in zip(range(25), op.sample_inputs("cpu", kind, requires_grad=False), strict=False):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode(), recorder, contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                op.op(s.input, *s.args, **s.kwargs)


def _written_call(row: list[Any]) -> Call:
    keywords = row[-1] if isinstance(row[-1], dict) else {}
    return _written(row[: len(row) - bool(keywords)]), _written(keywords)


def _too_slow(*_: Any) -> None:
    raise TimeoutError


# ---------------------------------------------------------------------------------------------------- wrong operands


def changed(random: Random, call: Call) -> Call:
    """Return a call with up to three of its arguments changed."""
    args, kwargs = list(call[0]), dict(call[1])
    places: list[tuple[Any, Any]] = [*((args, k) for k in range(len(args))), *((kwargs, k) for k in kwargs)]
    for _ in range(random.choice((1, 1, 2, 3)) if places else 0):
        table, k = random.choice(places)
        table[k] = _other(random, table[k])
    return args, kwargs


def _other(random: Random, x: Any) -> Any:
    if isinstance(x, Operand):
        return _other_tensor(random, x)
    if isinstance(x, list):
        how, at = random.randrange(5), random.randrange(len(x)) if x else 0
        if how == 0 or not x:
            return x[:-1]
        if how == 1:
            return [*x, random.choice(x)]
        return [*x[:at], _other(random, x[at]), *x[at + 1 :]]
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return random.choice((*_INTEGERS, x + (1 << random.randrange(30, 63))))
    if isinstance(x, float):
        return random.choice(_REALS)
    if isinstance(x, str):
        return random.choice(_WORDS)
    if isinstance(x, torch.dtype):
        return random.choice((*_LETTERS.values(), *_INTEGERS))
    return random.choice((None, random.choice(_INTEGERS), True)) if x is None else x


def _other_tensor(random: Random, x: Operand) -> Operand:
    how, shape = random.randrange(8), list(x.shape)
    exact = not (x.dtype.is_floating_point or x.dtype.is_complex)
    if how < 3 and shape:  # shorter or longer
        k = random.randrange(len(shape))
        shape[k] = random.choice((0, 1, 2, max(shape[k] - 1, 0), shape[k] + 1, 2 * shape[k], 17))
        return replace(x, shape=tuple(shape)) if torch.Size(shape).numel() < 1 << 16 else x
    if how == 3:
        wrong = [shape[1:], [1, *shape], [], [0], shape[::-1], [*shape, 2], [torch.Size(shape).numel()]]
        return replace(x, shape=tuple(random.choice(wrong)))
    if how == 4:
        return replace(x, dtype=random.choice([*_LETTERS.values()]))
    if how == 5:
        return replace(x, layout=random.choice([*_LAYOUTS]))
    if x.dtype in (torch.bool, torch.complex64):
        return replace(x, values=(True, False, True))
    values = list(x.values or [1 if exact else 0.5])
    if x.dtype is torch.int64 and how == 6:  # four such numbers add up to what they did, in 64 bits
        return replace(x, values=tuple(v + (1 << 62) if abs(v) < 1 << 62 else v for v in values))
    values[random.randrange(len(values))] = random.choice(_INTEGERS if exact else _REALS)
    bits = 8 * x.dtype.itemsize - 1
    least, most = (0, (2 << bits) - 1) if x.dtype is torch.uint8 else (-(1 << bits), (1 << bits) - 1)
    return replace(x, values=tuple(min(max(v, least), most) for v in values) if exact else tuple(values))


# ---------------------------------------------------------------------------------------------------- in the child


def fitting(name: str, calls: Mapping[str, Sequence[Call]]) -> list[Call]:
    """Return valid calls of an operator: recorded ones, or those of other operators that it accepts."""
    if name.startswith("unchecked:"):
        return [c for c in calls[name] if _result(name, c, 0)[0] == "ok"]
    f = listed(name, in_place=True)
    namespace, base, overload = name.split(".")
    outs = [a.name for a in f._schema.arguments if a.is_out]
    siblings = [k for k in calls if k.split(".")[:2] in ([namespace, base], [namespace, base.rstrip("_")])]
    found = list(calls.get(name, ()))
    empty = {a.name: None for a in f._schema.arguments if a.kwarg_only and not a.has_default_value() and not a.is_out}
    if outs:
        found = [c for k in siblings for c in calls[k]][:60]
        found = [(a, kw | dict(zip(outs, _results_of(namespace, base, a, kw), strict=False))) for a, kw in found]
    elif not found:
        found = [*calls.get(f"{namespace}.{base.rstrip('_')}.{overload}", ()), *(c for k in siblings for c in calls[k])]
    found = [(a, empty | kw) for a, kw in found[:40]]
    found = [c for c in found if _result(name, c, 0)[0] == "ok"]
    others = [c[0] for k, c in sorted(calls.items()) if c and k not in siblings] if not found and not outs else []
    others = [c for c in others if len(c[0]) <= len(f._schema.arguments)]
    return [*found, *[c for c in others[:400] if _result(name, c, 0)[0] == "ok"][:8]]


def function_of(name: str) -> Any:
    """Return what a file calls by a name; with "unchecked:" before it, torch's operator itself."""
    namespace, base, overload = name.removeprefix("unchecked:").split(".")
    if name.startswith("unchecked:"):
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return checked(listed(name, in_place=True))


def _results_of(namespace: str, base: str, args: Any, kwargs: Any) -> list[Any]:
    """Return descriptions of the results of a call, [] if it raises."""
    args, kwargs = pytree.tree_map_only(Operand, lambda x: x.make(Random(0)), (args, kwargs))
    try:
        return pytree.tree_leaves(described(getattr(getattr(torch.ops, namespace), base)(*args, **kwargs)))
    except Exception:  # of any kind
        return []


def _result(name: str, call: Call, seed: int) -> tuple[str, str]:
    """Run a call and return ("ok", digest of results and operands) or ("raised", type of the error)."""
    f, random = function_of(name), Random(seed)
    torch.manual_seed(seed)
    args, kwargs = pytree.tree_map_only(Operand, lambda x: x.make(random), call)
    try:
        with torch.no_grad():
            out = f(*args, **kwargs)
        digest = hashlib.sha1()
        for t in pytree.tree_leaves((out, args, kwargs)):
            if isinstance(t, torch.Tensor) and t.numel() < 1 << 22:
                whole = t.detach().resolve_conj().resolve_neg().contiguous()
                whole = whole.masked_fill(whole.isnan(), float("nan")) if t.is_floating_point() else whole
                digest.update(str((t.dtype, t.shape)).encode() + whole.reshape(-1).view(torch.uint8).numpy().tobytes())
            elif not isinstance(t, torch.Tensor):
                digest.update(repr(t).encode())
        return "ok", digest.hexdigest()
    except Exception as e:  # of any kind
        return "raised", type(e).__name__


def _work(name: str, calls: Mapping[str, Sequence[Call]], seed: int, cases: int, first: int, write: int) -> None:
    """Run the cases of an operator from `first` on, and write a line before and after each."""

    def tell(*line: Any) -> None:
        os.write(write, (json.dumps(line) + "\n").encode())

    low = ctypes.c_int.in_dll(ctypes.CDLL(None), "guard_low") if os.environ.get("GUARD_FILL") else ctypes.c_int()
    valid = fitting(name, calls)
    tell("valid", len(valid))
    for k in range(first, min(cases, cases if valid else 0)):
        random = Random(f"{seed}:{name}:{k}")
        low.value = k % 2
        call = random.choice(valid)
        if k >= len(valid):
            call = changed(random, call)
        else:
            call = valid[k]
        tell("start", k, repr(call)[:600])
        tell("end", k, *_result(name, call, k))
    os._exit(0)


def work(file: str, seed: int, cases: int) -> None:
    """Run all operators of a file of calls, each in a forked child, and print a line of JSON for each case."""
    names, calls = pickle.loads(Path(file).read_bytes())  # of the parent
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        first = failures = 0
        while first < cases and failures < 4:
            first, failed = _operator(name, calls, seed, cases, first)
            failures += failed


def _operator(name: str, calls: Mapping[str, Sequence[Call]], seed: int, cases: int, first: int) -> tuple[int, bool]:
    """Run a child; return the case to go on with, and whether the child failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for stream in (1, 2):  # where operators print
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        _work(name, calls, seed, cases, first, writing)
    os.close(writing)
    at, shown, buffer, end = first, "", b"", "done"
    while True:
        ready, _, _ = select.select([reading], [], [], 6)
        got = os.read(reading, 1 << 16) if ready else b""
        if not got:
            break
        *lines, buffer = (buffer + got).split(b"\n")
        for line in map(json.loads, lines):
            if line[0] == "start":
                at, shown = line[1], line[2]
            else:
                print(json.dumps([name, *line, shown if line[0] == "end" else ""]), flush=True)
    os.close(reading)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not status:
        return cases, False
    end = "hang" if not ready else signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exit"
    print(json.dumps([name, "end", at, "died", end, shown]), flush=True)
    return at + 1, True


# ---------------------------------------------------------------------------------------------------- the parent


@functools.cache
def guard() -> str:
    """Compile `guard.c` and return the library's path; "" without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ""
    out = str(Path(tempfile.mkdtemp(prefix="guard.")) / "guard.so")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", out, str(_HERE / "guard.c")], check=True)
    return out


def probe(names: Iterable[str], calls: Mapping[str, Sequence[Call]], seed: int, cases: int) -> Iterator[list[Any]]:
    """Yield [operator, what, detail, call] of every unsafe case, and [operator, "valid", number, ""]."""
    results: dict[tuple[str, int], list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz.") as folder:
        file = Path(folder) / "calls"
        file.write_bytes(pickle.dumps((list(names), dict(calls))))
        for filling in _FILLINGS:
            env = {**os.environ, "LD_PRELOAD": guard(), "GUARD_FILL": str(filling), "OMP_NUM_THREADS": "1"}
            env["GLIBC_TUNABLES"] = f"glibc.malloc.perturb={filling}"
            env["PYTHONHASHSEED"] = "0"
            command = [sys.executable, "-m", "benchmarks.fuzz.memory", "--work", str(file)]
            command += ["--seed", str(seed), "--cases", str(cases)]
            with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for line in map(json.loads, child.stdout):
                    if line[1] == "valid":
                        if filling == _FILLINGS[0]:
                            yield [line[0], "valid", line[2], ""]
                        continue
                    name, _, k, what, detail, shown = line
                    if what == "died":
                        yield [name, "died", detail, shown]
                    elif results.setdefault((name, k), [what, detail]) != [what, detail]:
                        yield [name, "reads foreign memory", f"{results[name, k]} {[what, detail]}", shown]


def main() -> int:
    """Run the probe and return the exit status: 1 if an operator is unsafe."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz.memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100, help="of each operator")
    parser.add_argument("--only", default="", help="beginning of names of operators")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.seed, given.cases)
        return 0
    start = time.monotonic()
    names = [n for n in reachable() if n.startswith(given.only)]
    unsafe, unproven, slow = Counter[str](), set(names), set[str]()
    for name, what, detail, shown in probe(names, valid_calls(), given.seed, given.cases):
        if what == "valid":
            unproven -= {name} if detail else set()
        elif detail == "hang":
            slow.add(name)
        else:
            unsafe[name] += 1
            if unsafe[name] <= 2:
                print(f"{name}: {what}: {detail}\n    {shown}", flush=True)
    print(f"{len(names)} operators, {len(unsafe)} unsafe: {', '.join(sorted(unsafe))}")
    print(f"{len(slow)} that a case kept busy for long: {', '.join(sorted(slow))}")
    print(f"{len(unproven)} without a valid call: {', '.join(sorted(unproven))}")
    print(f"{time.monotonic() - start:.0f} s")
    return int(bool(unsafe))


if __name__ == "__main__":
    from benchmarks.fuzz import memory  # so that classes have the same names in all processes

    sys.exit(memory.main())
