"""Which tests should notice a defect: those that execute the function it is in, cheap ones first.

The table of what each test executes is made by running the tests once, function calls traced. It is kept below
`.mutants` and made again for test files that have changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutants.draw import ROOT, SOURCE, Mutant

KEPT = ROOT / ".mutants"

#: test files that run other processes, other packages' code, or everything there is
NOT = """
    tests/slow tests/docs tests/examples tests/cli tests/test_project.py tests/test_import.py tests/test_mutants.py
    tests/frameworks/keras/test_backends.py tests/exactness/test_litert_converter.py tests/fuzz
    tests/exactness/test_random_networks.py tests/exactness/test_litert_random_networks.py tests/test_data_are_data.py
"""


def test_files() -> list[str]:
    """Every file whose tests may notice something; modules with doctests among them."""
    left_out = tuple(NOT.split())
    tests = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    from benchmarks.mutants.draw import files

    doctests = [f"src/{f}" for f in files() if ">>>" in (SOURCE / f).read_text()]
    return [t for t in tests if not t.startswith(left_out)] + doctests


class Tracer:
    """A pytest plugin: the functions of chipfit that each test executes, and how long it takes."""

    def __init__(self) -> None:
        self.now: set[Any] = set()
        self.tests: dict[str, dict[str, Any]] = {}
        self.fixtures: dict[str, set[Any]] = defaultdict(set)
        self.prefix = str(SOURCE)

    def _event(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if code not in self.now and code.co_filename.startswith(self.prefix):
            self.now.add(code)

    def _names(self, codes: set[Any]) -> list[str]:
        return sorted({f"{c.co_filename[len(self.prefix) + 1 :]}:{c.co_qualname}" for c in codes})

    def __enter__(self) -> Tracer:
        threading.settrace(self._event)
        sys.settrace(self._event)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        before, self.now = self.now, set()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.fixtures[fixturedef.argname] |= self.now
            self.now |= before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.now, begun = set(), time.perf_counter()
        sys.settrace(self._event)  # what a test has switched off
        try:
            return (yield)
        finally:
            codes = self.now.union(*(self.fixtures[f] for f in getattr(item, "fixturenames", ())))
            self.tests[item.nodeid] = {"seconds": time.perf_counter() - begun, "runs": self._names(codes)}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.skipped:
            self.failed = getattr(self, "failed", set()) | {report.nodeid}


@dataclass
class Table:
    """What each test executes."""

    seconds: dict[str, float]
    runs: dict[str, list[str]]  #: test -> "file:function"
    imported: set[str]  #: executed while the tests were collected

    def __post_init__(self) -> None:
        self.by_function: dict[str, list[str]] = defaultdict(list)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        for test, functions in self.runs.items():
            for f in functions:
                self.by_function[f].append(test)
                self.by_file[f.partition(":")[0]].add(test)

    def choose(self, m: Mutant, most: float) -> list[str]:
        """The tests that should notice, in the order in which they run.

        Those that execute the function; of a defect at the level of a module, or in a function that runs when it is
        imported, those that execute anything of the module. Cheap ones first; of one parametrized test a few before
        the others' rest; no more than `most` seconds of them.
        """
        key = f"{m.file}:{m.within}"
        found = {t for f, ts in self.by_function.items() if f == key or f.startswith(f"{key}.<locals>") for t in ts}
        if not m.within or key in self.imported or not found:
            found = self.by_file[m.file] | found
        if not found:
            found = set(self.seconds)
        near = _mirrors(m.file)
        seen: Counter[str] = Counter()
        ranked = []
        for t in sorted(found, key=lambda t: (self.seconds[t], t)):
            stem = t.partition("[")[0]
            seen[stem] += 1
            own = t.startswith(near)
            ranked.append((self.seconds[t] * (1 if own else 2) + 0.02 * seen[stem] + 0.05 * (not own), t))
        out, spent = [], 0.0
        for _, t in sorted(ranked):
            if spent + self.seconds[t] <= most or not out:
                out.append(t)
                spent += self.seconds[t]
        return out


def _mirrors(file: str) -> tuple[str, ...]:
    """Beginnings of the names of the tests that belong to a module."""
    inner = Path(file).relative_to("chipfit")
    room = inner.parent if inner.parent != Path(".") else Path(inner.stem)
    return f"tests/{room}/", f"tests/test_{inner.stem}", f"src/{file}"


def kept(test_file: str) -> Path:
    digest = hashlib.sha256((ROOT / test_file).read_bytes()).hexdigest()[:12]
    return KEPT / "table" / f"{test_file.replace('/', '.')}.{digest}.json"


@cache
def load(names: tuple[str, ...]) -> Table:
    """The table of these test files, whose parts have been made."""
    seconds: dict[str, float] = {}
    runs: dict[str, list[str]] = {}
    imported: set[str] = set()
    for name in names:
        data = json.loads(kept(name).read_text())
        imported |= set(data["imported"])
        for test, entry in data["tests"].items():
            seconds[test], runs[test] = entry["seconds"], entry["runs"]
    return Table(seconds, runs, imported)


def trace(test_file: str) -> int:
    """Run one file's tests and keep what they execute; returns pytest's exit status. For a process of its own."""
    tracer = Tracer()
    with tracer:
        status = pytest.main([*OPTIONS, test_file], plugins=[tracer, _AfterCollection(tracer)])
    failed = getattr(tracer, "failed", set())
    data = {"imported": tracer.imported, "tests": {t: e for t, e in tracer.tests.items() if t not in failed}}
    kept(test_file).parent.mkdir(parents=True, exist_ok=True)
    kept(test_file).write_text(json.dumps(data))
    return int(status)


class _AfterCollection:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def pytest_collection_finish(self) -> None:
        self.tracer.imported = self.tracer._names(self.tracer.now)  # type: ignore[attr-defined]


OPTIONS = "-q --no-header --tb=line -rN -p no:cacheprovider".split() + ["-m", "not slow and not chromium"]
