"""Kinds of input that are files: saved results, platforms, models."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from benchmarks.fuzz import memory, mutate
from benchmarks.fuzz.run import Case
from benchmarks.fuzz.sense import check_output, check_platform, check_result
from torch import nn

import chipfit
from chipfit.cli.inputs import load_model
from chipfit.engine.opaque import REPLACED, torch_operator
from chipfit.platform import builtin
from chipfit.platform.load import load as load_platform
from chipfit.platform.load import names

torch.manual_seed(0)
IMAGES, ROWS = torch.randn(2, 3, 6, 6), torch.randn(2, 4)


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.AvgPool2d(2)).eval()


def rows() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2), nn.Softmax(-1)).eval()


class Sum(nn.Module):
    """A network with two inputs, a dictionary as output, a constant and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.register_buffer("c", torch.ones(4))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> dict[str, Any]:
        y = self.l(x) + self.e(i).squeeze(1) * self.c
        return {"y": y, "parts": (y.relu(), torch.cat([x, y], 1))}


SUM_INPUT = (ROWS, torch.tensor([[0], [3]]))  # [2, 4] and [2, 1]: a tensor of one axis would count as labels
#: model, an input, platforms
_BASES: tuple[tuple[Callable[[], nn.Module], Any, tuple[str, ...]], ...] = (
    (convolutions, IMAGES, ("ort_cpu", "tflite_int8", "k210", "graphcore_fp8", "hailo")),
    (rows, ROWS, ("ort_cpu", "tflite_int16x8", "imx500")),
    (Sum, SUM_INPUT, ("ort_cpu", "xnnpack")),
)


@functools.cache
def kept() -> Path:
    """Return a folder for files that are made once."""
    return Path(tempfile.mkdtemp(prefix="fuzz.kept."))


@functools.cache
def saved_results() -> list[tuple[Path, Any]]:
    """Return folders of valid results, with an input of each."""
    out = []
    for make, x, platforms in _BASES:
        for platform in platforms:
            result = chipfit.quantize(make(), [x], platform, progress=False)
            out.append((result.save(kept() / f"{make.__name__}.{platform}"), x))
    return out


# ---------------------------------------------------------------------------------------------------------- saved


def saved(case: Case) -> None:
    """Damage a saved result, with or without correct checksums, load it and use it."""
    rng = case.random
    source, x = rng.choice(saved_results())
    folder = case.folder / "saved"
    shutil.copytree(source, folder)
    case.note(source.name)
    target = rng.choice(sorted(folder.iterdir()))
    how = rng.random()
    case.note(f"{target.name}")
    if how < 0.06:
        target.unlink()
        if rng.random() < 0.5:
            target.mkdir()
        case.note("removed, or a folder in its place")
    elif how < 0.2:
        target.write_bytes(mutate.octets(rng, target.read_bytes(), case.note))
    elif target.suffix == ".json":
        data = json.loads(target.read_text())
        if how < 0.85:
            data = _inner(rng, data, case)
            target.write_text(_json(data), encoding="utf-8")
        else:
            target.write_text(mutate.text(rng, target.read_text(), case.note), encoding="utf-8", errors="surrogatepass")
    else:
        target.write_bytes(_tensors(rng, target, case))
    if rng.random() < 0.9 and target.name != "manifest.json":
        _sign(folder)
        case.note("signed again")
    use(chipfit.load(folder), x, rng, case.folder)


def _inner(rng: Random, data: Any, case: Case) -> Any:
    """Damage a document, or the JSON text in one of its fields."""
    specs = [k for k in ("in_spec", "out_spec") if isinstance(data.get(k), str)]
    if specs and rng.random() < 0.3:
        key = rng.choice(specs)
        return {**data, key: _json(mutate.document(rng, json.loads(data[key]), case.note))}
    return mutate.document(rng, data, case.note)


def _json(data: Any) -> str:
    try:
        return json.dumps(data)
    except (RecursionError, ValueError):  # nested deeper than json writes, or an integer longer than Python prints
        return "[" * 100_000 if not isinstance(data, dict) else '{"schema": ' + "9" * 5000 + "}"


def _tensors(rng: Random, file: Path, case: Case) -> bytes:
    """Change numbers, types, shapes or names of tensors."""
    from safetensors.torch import load, save

    tensors = load(file.read_bytes())
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(tensors))
        t, how = tensors[name], rng.randrange(9)
        if how < 4 and t.numel():
            flat = t.reshape(-1).clone()
            k = rng.randrange(len(flat))
            wild = (float("nan"), float("inf"), -1.0, 0.0, 1e38, 1e-45, -3.0, 300.0, 2**31 - 1)
            v = rng.choice(wild)
            flat[k] = v if t.is_floating_point() else 0 if v != v or abs(v) > 2**31 else int(v)
            tensors[name] = flat.reshape(t.shape)
        elif how == 4:
            tensors[name] = t.to(
                rng.choice((torch.float64, torch.float16, torch.int8, torch.int64, torch.bool, torch.bfloat16))
            )
        elif how == 5:
            tensors[name] = t.reshape(-1)[: rng.randrange(3)].clone()
        elif how == 6:
            tensors[name] = t.unsqueeze(0)
        elif how == 7:
            del tensors[name]
        else:
            tensors[rng.choice((name + "x", "scale:x", "zero_point:input"))] = t.clone()
            if rng.random() < 0.5:
                del tensors[name]
        case.note(f"{name}, change {how}")
        if not tensors:
            break
    return save(tensors)


def _sign(folder: Path) -> None:
    """Write the manifest for the damaged files."""
    file = folder / "manifest.json"
    if not file.is_file():
        return
    manifest = json.loads(file.read_text())
    for name in manifest["files"]:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    file.write_text(json.dumps(manifest))


def use(result: Any, x: Any, rng: Random, folder: Path) -> None:
    """Use a result as a person does: run it, export it, read the report, save it again."""
    check_result(result)
    args = x if isinstance(x, tuple) else (x,)
    result.model(*args)
    how = rng.randrange(6)
    if how == 0:
        result.export(folder / "m.onnx")
    elif how == 1:
        result.export(folder / "m.tflite")
    elif how == 2:
        result.report.save(folder / "report.html")
    elif how == 3:
        check_result(chipfit.load(result.save(folder / "again")))
    elif how == 4:
        result.verify([x], runtime="onnxruntime")
    else:
        result.export(folder / "m.json")


# ---------------------------------------------------------------------------------------------------------- platforms

_BUILTIN = Path(builtin.__file__).parent


def platforms(case: Case) -> None:
    """Damage a built-in platform's file as data or as text, read it and use it."""
    rng = case.random
    name = rng.choice(names())
    case.note(name)
    text = (_BUILTIN / f"{name}.yaml").read_text(encoding="utf-8")
    file = case.folder / f"{rng.choice(('chip', name))}.yaml"
    if rng.random() < 0.6:
        data = mutate.document(rng, _table(text), case.note)
        try:
            out = yaml.safe_dump(data, allow_unicode=True)
        except (RecursionError, ValueError):
            out = "a: " + "[" * 5000
    else:
        out = mutate.text(rng, text, case.note)
    if rng.random() < 0.05:
        file.write_bytes(mutate.octets(rng, out.encode("utf-8", "surrogatepass"), case.note))
    else:
        file.write_text(out, encoding="utf-8", errors="surrogatepass")
    platform = load_platform(file)
    check_platform(platform)
    use_platform(platform, rng, case)


@functools.lru_cache(maxsize=64)
def _table(text: str) -> Any:
    return yaml.safe_load(text)


@functools.cache
def captured(make: Callable[[], nn.Module]) -> Any:
    """Return a program, so that a model is traced once."""
    return make()


def use_platform(platform: Any, rng: Random, case: Case) -> None:
    """Show a platform, decide a network on it and, now and then, quantize one."""
    from rich.console import Console

    from chipfit.platform.show import show

    how = rng.randrange(4)
    if how == 0:
        Console(file=io.StringIO()).print(show(platform))
    make, x = rng.choice(((convolutions, IMAGES), (rows, ROWS), (Sum, SUM_INPUT)))
    case.note(make.__name__)
    result = chipfit.quantize(captured(make), [x], platform, progress=False)
    use(result, x, rng, case.folder)


# ---------------------------------------------------------------------------------------------------------- models


@functools.cache
def model_files() -> dict[str, tuple[Path, Any]]:
    """Return valid files of every format, with an input."""
    out: dict[str, tuple[Path, Any]] = {}
    for make, x in ((convolutions, IMAGES), (rows, ROWS)):
        file = kept() / f"{make.__name__}.pt2"
        with torch.no_grad():
            torch.export.save(torch.export.export(make(), (x,)), file)
        out[file.name] = (file, x)
        result = chipfit.quantize(make(), [x], "ort_cpu", progress=False)
        out[f"{make.__name__}.onnx"] = (result.export(kept() / f"{make.__name__}.onnx"), (result, x))
        result = chipfit.quantize(make(), [x], "tflite_int8", progress=False)
        out[f"{make.__name__}.tflite"] = (result.export(kept() / f"{make.__name__}.tflite"), (result, x))
    file = kept() / "rows.keras"
    _keras_model().save(file)
    out[file.name] = (file, ROWS)
    return out


def _keras_model() -> Any:
    import os

    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    keras.utils.set_random_seed(0)
    x = keras.Input((4,), name="x")
    return keras.Model(x, keras.layers.Dense(2, activation="relu")(keras.layers.Dense(3)(x)))


def models(case: Case) -> None:
    """Damage a model file in its bytes, in a member of its archive or in JSON there; load it and use it."""
    rng = case.random
    name = rng.choice(sorted(model_files()))
    source, x = model_files()[name]
    case.note(name)
    file = case.folder / name
    content = source.read_bytes()
    if rng.random() < 0.7 and zipfile.is_zipfile(source):
        content = _archive(rng, content, case)
    else:
        content = mutate.octets(rng, content, case.note)
    file.write_bytes(content)
    if file.suffix in (".onnx", ".tflite"):
        result, x = x
        result.verify([x], path=file)
        return
    model = load_model(str(file))
    if file.suffix == ".pt2" and rng.random() < 0.7:
        chipfit.lint(model, x)
    else:
        check_result(chipfit.quantize(model, [x], progress=False))


def _archive(rng: Random, content: bytes, case: Case) -> bytes:
    """Change, remove or rename a member of an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as z:
        members = {i.filename: z.read(i) for i in z.infolist()}
    name = rng.choice(sorted(members))
    case.note(name)
    how = rng.random()
    if how < 0.1:
        del members[name]
    elif how < 0.15:
        members[rng.choice(("x", "../x", name + "x"))] = members.pop(name)
    elif how < 0.8 and members[name][:1] in (b"{", b"["):
        members[name] = _json(mutate.document(rng, json.loads(members[name]), case.note)).encode()
    else:
        members[name] = mutate.octets(rng, members[name], case.note)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for n, c in members.items():
            z.writestr(n, c)
    return out.getvalue()


def check(y: Any) -> None:
    check_output(y, "the output")


# ---------------------------------------------------------------------------------------------------------- operators

#: what a call with operands that do not fit may raise when the network runs
_RAISED = RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError


def operators(case: Case) -> None:
    """Add a call with wrong operands to a saved result, of an operator that torch may not check; load it and run it."""
    rng = case.random
    source, x = saved_results()[5]  # of a small network with one input
    folder = case.folder / "saved"
    shutil.copytree(source, folder)
    calls = {n: c for n, c in memory.written_calls().items() if torch_operator(REPLACED.get(n[: -len(".default")], n))}
    name = rng.choice(sorted(calls))
    args, kwargs = memory.changed(rng, rng.choice(calls[name]))
    graph, plan = (json.loads((folder / f"{n}.json").read_text()) for n in ("graph", "plan"))
    made: list[str] = []

    def add(target: str, args: Any, kwargs: Any, inputs: list[str], shape: list[int]) -> str:
        made.append(f"h{len(made)}")
        attrs = {"target": target, "args": args, "kwargs": kwargs}
        node = {"name": made[-1], "op": "Opaque", "inputs": {"$tuple": inputs}, "outputs": {"$tuple": [made[-1]]}}
        graph["nodes"].insert(len(made) - 1, {**node, "attrs": attrs})
        graph["values"][made[-1]] = {"shape": {"$tuple": shape}, "dtype": "float32"}
        plan["nodes"][made[-1]] = {**next(iter(plan["nodes"].values()))}
        return made[-1]

    def written(value: Any) -> Any:
        if isinstance(value, memory.Operand):
            number = value.values[0] if value.values else 1
            dtype = {"dtype": {"torch": str(value.dtype).removeprefix("torch.")}}
            add("aten.full.default", [list(value.shape), number], dtype, [], list(value.shape))
            return {"$ref": len(made) - 1}
        if isinstance(value, (list, tuple)):
            return [written(v) for v in value]
        if isinstance(value, (torch.dtype, torch.device)):
            kind = "device:" if isinstance(value, torch.device) else ""
            return {"torch": kind + str(value).removeprefix("torch.")}
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    filled = [written(a) for a in args], {k: written(v) for k, v in kwargs.items()}
    graph["outputs"] = [add(name, *filled, list(made), [2])]
    case.note(f"{name} {args} {kwargs}")
    for n, data in (("graph", graph), ("plan", plan)):
        (folder / f"{n}.json").write_text(_json(data), encoding="utf-8")
    _sign(folder)
    result = chipfit.load(folder)
    with contextlib.suppress(*_RAISED):
        result.model(x)
