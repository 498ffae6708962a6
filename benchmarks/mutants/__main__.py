"""`python -m benchmarks.mutants --seed 1 --count 300`: apply small defects one at a time, and see whether tests notice.

The defects of `by_hand.yaml`, and beside them as many drawn ones as `--count` asks for. This process loads PyTorch,
Keras and the runtimes once; each defect is a fork of it, in which the changed module is what `import` finds and pytest
runs the tests that should notice, until one does. Controls: every test that noticed something passes without a defect,
and a change of nothing is not noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KERAS_BACKEND", "torch")

import pytest
from benchmarks.mutants import tests
from benchmarks.mutants.draw import ROOT, SOURCE, Mutant, by_hand, draw

TARGET = 0.95  #: share that must be noticed
CHUNKS = (2.0, 8.0, 1e9)  #: seconds of tests in one run of pytest, the first, the second, ...
COLLECT = 0.2  #: what pytest takes to read one more file of tests [s]


# ---------------------------------------------------------------- one defect, in a process of its own


class Replaced(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from another text."""

    def __init__(self, m: Mutant) -> None:
        super().__init__(m.module, str(SOURCE / m.file))
        self.text = m.text

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        with warnings.catch_warnings():  # such as `x is "text"`: tests are to say what it does
            warnings.simplefilter("ignore", SyntaxWarning)
            return compile(self.text, self.path, "exec")


class Failures:
    """A pytest plugin: the first test that failed."""

    first = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.first:
            self.first = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.first:
            self.first = f"{report.nodeid} (import)"


def attempt(m: Mutant | None, chosen: Sequence[str], seconds: dict[str, float]) -> dict[str, Any]:
    """Run the tests in chunks until one fails."""
    if m is not None:
        sys.meta_path.insert(0, Replaced(m))
        with contextlib.suppress(Exception):  # first, for pytest reads a file of doctests without asking us
            importlib.import_module(m.module)
    ran = 0
    for chunk in _chunks(chosen, seconds):
        failures = Failures()
        status = pytest.main([*tests.OPTIONS, "-x", *chunk], plugins=[failures])
        if status == pytest.ExitCode.USAGE_ERROR:  # the defect has changed what parameters a test is named after
            stems = dict.fromkeys(t.partition("[")[0] for t in chunk)
            status = pytest.main([*tests.OPTIONS, "-x", *stems], plugins=[failures])
        ran += len(chunk)
        if failures.first:
            return {"noticed": True, "by": failures.first, "ran": ran}
        if status != 0:
            return {"noticed": False, "by": "", "ran": ran, "error": f"pytest's exit status {int(status)}"}
    return {"noticed": False, "by": "", "ran": ran}


def _chunks(chosen: Sequence[str], seconds: dict[str, float]) -> list[list[str]]:
    out: list[list[str]] = [[]]
    spent, files = 0.0, set[str]()
    for t in chosen:
        if spent > CHUNKS[len(out) - 1]:
            out.append([])
            spent, files = 0.0, set()
        file = t.partition("::")[0]
        spent += seconds.get(t, 1.0) + COLLECT * (file not in files)
        files.add(file)
        out[-1].append(t)
    return out


# ---------------------------------------------------------------- processes


class Pool:
    """Forks of this process, a few at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.running: dict[int, tuple[float, float, Path, Callable[[dict[str, Any]], None]]] = {}
        self.scratch = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.number = 0

    def start(self, work: Callable[[], dict[str, Any]], limit: float, done: Callable[[dict[str, Any]], None]) -> None:
        """Begin when there is room; `limit` is of the processor's time [s], and of ten times as much on the clock."""
        while len(self.running) >= self.workers:
            self._wait()
        self.number += 1
        answer = self.scratch / f"{self.number}.json"
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _in_child(work, answer, self.scratch / f"{self.number}")
        self.running[pid] = limit, time.monotonic() + 10 * limit, answer, done

    def finish(self) -> None:
        while self.running:
            self._wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _wait(self) -> None:
        time.sleep(0.02)
        for pid, (limit, end, answer, done) in list(self.running.items()):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() < end and _computed(pid) < limit:
                continue
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del self.running[pid]
            lost = {"noticed": True, "by": "a crash of the process" if ended else "", "hang": not ended, "ran": 0}
            done(json.loads(answer.read_text()) if answer.exists() else lost)
            shutil.rmtree(answer.with_suffix(""), ignore_errors=True)


def _computed(pid: int) -> float:
    """Seconds that a process and its ended children computed: a busy machine makes no hang. 0 where nobody says."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(sum(map(int, words[11:15]))) / os.sysconf("SC_CLK_TCK")


def _in_child(work: Callable[[], dict[str, Any]], answer: Path, scratch: Path) -> None:
    os.setsid()
    scratch.mkdir()
    log = os.open(scratch.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(scratch)
    try:
        result = work()
    except BaseException:
        result = {"noticed": False, "by": "", "ran": 0, "error": traceback.format_exc()[-300:]}
    answer.with_suffix(".part").write_text(json.dumps(result))
    answer.with_suffix(".part").rename(answer)
    os._exit(0)


def preload() -> None:
    """What tests and pytest import from others, once; no fork walks over it again when it collects garbage."""
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch
    import torch.export

    torch.set_num_threads(1)
    for name in (
        "keras",
        "onnx",
        "onnxruntime",
        "ai_edge_litert.interpreter",
        "typer.testing",
        "rich.console",
        "jinja2",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "--collect-only", empty])  # loads its plugins
    assert not any(m.partition(".")[0] in ("chipfit", "tests") for m in sys.modules)
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------- the whole


def table(pool: Pool, until: float) -> tests.Table | None:
    """What each test executes, made where it is missing; None where time runs out."""
    names = tuple(tests.test_files())
    missing = [n for n in names if not tests.kept(n).exists()]
    for k, name in enumerate(missing):
        if time.monotonic() > until:
            pool.finish()
            print(f"{len(missing) - k} test files are still to be traced: run it again")
            return None
        print(f"tracing {k + 1} of {len(missing)}: {name}", flush=True)

        def done(r: dict[str, Any], name: str = name) -> None:
            if not tests.kept(name).exists():
                raise SystemExit(f"{name} cannot be traced: {r}")
            if r.get("status"):
                print(f"  {name}: some of its tests fail, and are left out")

        pool.start(lambda name=name: {"status": tests.trace(name)}, 600, done)  # type: ignore[misc]
    while pool.running:
        pool._wait()
    return tests.load(tuple(n for n in names if tests.kept(n).exists()))


def nothing(file: str) -> Mutant:
    """A change that changes nothing."""
    text = (SOURCE / file).read_text()
    return Mutant(file, text + "\n# the same\n", text.count("\n"), "", "nothing", "")


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.partition("\n")[0])
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--count", type=int, default=300, help="defects in all, those by hand among them")
    p.add_argument("--minutes", type=float, default=60, help="stop after this time; a second call goes on")
    p.add_argument("--part", default="1/1", help="k/n: every n-th defect, from the k-th")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, default=25, help="of tests for one defect, at most, as they were traced")
    p.add_argument("--then", type=float, default=150, help="of other tests, for a defect that those do not notice")
    p.add_argument("--only", default="", help="defects whose file contains this")
    p.add_argument("--again", action="store_true", help="do not go on with an earlier call of the same seed")
    p.add_argument("--survivors", action="store_true", help="try again those that an earlier call did not see noticed")
    p.add_argument("--list", action="store_true", help="show the defects and end")
    a = p.parse_args()
    until = time.monotonic() + 60 * a.minutes
    begun = time.monotonic()

    hand = by_hand()
    drawn = draw(a.seed, max(a.count - len(hand), 0))
    mutants = [*hand[: a.count], *drawn.mutants]
    k, n = map(int, a.part.split("/"))
    mutants = [m for m in mutants[k - 1 :: n] if a.only in m.file]
    by = sum(m.by_hand for m in mutants)
    print(f"{len(mutants)} defects, seed {a.seed}: {by} by hand, {len(mutants) - by} of {drawn.sites:,} sites drawn")
    print("left out:", "; ".join(f"{c:,} {why}" for why, c in drawn.excluded.most_common()))
    if a.list:
        print("\n\n".join(f"{m.what}\n{m.diff}" for m in mutants))
        return 0

    preload()
    pool = Pool(a.workers)
    known = table(pool, until)
    if known is None:
        return 3
    tests.KEPT.mkdir(exist_ok=True)
    store = tests.KEPT / f"seed-{a.seed}.jsonl"
    if a.again:
        store.unlink(missing_ok=True)
    results = _earlier(store)
    if a.survivors:
        results = {key: r for key, r in results.items() if r["noticed"]}

    def control(chosen: Sequence[str], m: Mutant | None = None) -> dict[str, Any]:
        out: dict[str, Any] = {}
        pool.start(lambda: attempt(m, chosen, known.seconds), 900, out.update)
        while pool.running:
            pool._wait()
        return out

    def whatever(m: Mutant, key: str, chosen: list[str], most: float) -> Callable[[dict[str, Any]], None]:
        started = time.monotonic()

        def done(r: dict[str, Any]) -> None:
            if r.get("error"):
                raise SystemExit(f"{m.file}:{m.line}: the tests could not be run: {r['error']}")
            took, before = round(time.monotonic() - started, 2), results.get(key, {"of": 0})["of"]
            results[key] = {**r, "file": m.file, "seconds": took, "of": before + len(chosen), "most": most}
            with store.open("a") as f:
                f.write(json.dumps({"key": key, **results[key]}) + "\n")
            how = "hang" if r.get("hang") else f"noticed by {r['by']}" if r["noticed"] else "NOT NOTICED"
            print(f"{len(results):4d}  {m.file}:{m.line}  {how}  {results[key]['seconds']} s", flush=True)
            if not r["noticed"]:
                print(f"      {m.what}\n{m.diff}", flush=True)

        return done

    for most in (a.seconds, a.then):
        for m in mutants:
            key = hashlib.sha256(m.diff.encode()).hexdigest()[:16]
            if key in results and (results[key]["noticed"] or results[key].get("most", a.seconds) >= most):
                continue
            if time.monotonic() > until:
                break
            before = set(known.choose(m, a.seconds)) if most > a.seconds else set()
            chosen = [t for t in known.choose(m, most) if t not in before]
            if not chosen:
                continue
            limit = 60 + 6 * sum(known.seconds[t] for t in chosen)
            done = whatever(m, key, chosen, most)
            pool.start(lambda m=m, chosen=chosen: attempt(m, chosen, known.seconds), limit, done)  # type: ignore[misc]
        while pool.running:
            pool._wait()

    tried = [(m, results[key]) for m in mutants if (key := hashlib.sha256(m.diff.encode()).hexdigest()[:16]) in results]
    noticing = sorted({r["by"] for _, r in tried if r["noticed"] and r["by"] in known.seconds})
    print(f"\ncontrol: {len(noticing)} tests that noticed something, without a defect:", end=" ", flush=True)
    alone = control(noticing) if noticing else {"noticed": False}
    print("they pass" if not alone["noticed"] else f"FAILS: {alone['by']}")
    same = [nothing(f) for f in sorted({m.file for m, _ in tried})[:: max(len(tried) // 3, 1)]]
    for m in same:
        r = control(known.choose(m, 5), m)
        print(f"control: a change of nothing in {m.file}: {'NOTICED by ' + r['by'] if r['noticed'] else 'not noticed'}")
        alone["noticed"] |= r["noticed"]
    pool.finish()
    return _report(tried, len(mutants), time.monotonic() - begun) or int(alone["noticed"])


def _earlier(store: Path) -> dict[str, dict[str, Any]]:
    if not store.exists():
        return {}
    return {r.pop("key"): r for r in map(json.loads, store.read_text().splitlines())}


def _report(tried: list[tuple[Mutant, dict[str, Any]]], wanted: int, seconds: float) -> int:
    rooms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for m, r in tried:
        rooms["/".join(m.file.split("/")[1:-1][:2]) or m.file.split("/")[-1]].append(r)
    print(f"\n{'':24}{'noticed':>9}{'hang':>6}{'not':>6}{'share':>8}")
    for room, rs in sorted(rooms.items()):
        print(_row(room, rs))
    print(_row("all", [r for _, r in tried]))
    for which in (True, False):
        print(_row("by hand" if which else "drawn", [r for m, r in tried if m.by_hand is which]))
    noticed = sum(r["noticed"] for _, r in tried)
    took = sum(r["seconds"] for _, r in tried)
    print(f"\n{seconds:.0f} s; {took / max(len(tried), 1):.1f} s for one defect on one worker")
    for m, r in tried:
        if not r["noticed"]:
            print(f"\nnot noticed by {r['of']} tests: {m.what}\n{m.diff}")
    if len(tried) < wanted:
        print(f"\n{wanted - len(tried)} defects are still to be tried: run it again")
        return 3
    return int(noticed < TARGET * len(tried))


def _row(name: str, rs: list[dict[str, Any]]) -> str:
    noticed, hang = sum(r["noticed"] for r in rs), sum(bool(r.get("hang")) for r in rs)
    return f"{name:24}{noticed:9}{hang:6}{len(rs) - noticed:6}{100 * noticed / max(len(rs), 1):7.1f}%"


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
