"""Which tests should notice a defect: those that execute the branch it is in, of its own room and cheap ones first.

The table of what each test executes is made by running the tests once, with a note in each function and each branch. It
is kept below `.mutants` and made again for test files that have changed.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import json
import re
import sys
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
    tests/test_data_are_data.py
"""


def test_files() -> list[str]:
    """Every file whose tests may notice something; modules with doctests among them."""
    left_out = tuple(NOT.split())
    tests = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    from benchmarks.mutants.draw import files

    doctests = [f"src/{f}" for f in files() if ">>>" in (SOURCE / f).read_text()]
    return [t for t in tests if not t.startswith(left_out)] + doctests


#: "file:function" of what was called since it was last emptied, and "file:function@number" of the branches that were
#: taken, counted in each function: what changes above it does not move them. The name under which code finds it
SEEN: set[str] = set()
_NAME = "__functions_seen__"


class Instrumented(importlib.abc.MetaPathFinder):
    """Imports chipfit with a first statement in each function and branch that notes it: far cheaper than tracing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "chipfit":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path or [str(SOURCE)])
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = Path(self.path)
        tree = _Notes(str(path.relative_to(SOURCE))).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class _Notes(ast.NodeTransformer):
    """Puts the notes into a module, and finds its branches: first line, last line, and what is noted there."""

    def __init__(self, file: str) -> None:
        self.file, self.path = file, ""
        self.branches: list[tuple[int, int, str]] = []
        self.count: Counter[str] = Counter()  #: branches of each function so far

    def _note(self, name: str) -> ast.Call:
        add = ast.Attribute(ast.Name(_NAME, ast.Load()), "add", ast.Load())
        return ast.Call(add, [ast.Constant(f"{self.file}:{name}")], [])

    def generic_visit(self, node: Any) -> Any:
        super().generic_visit(node)
        if isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.match_case):
            for body in (node.body, getattr(node, "orelse", [])):
                if body:
                    self.count[self.path] += 1
                    key = f"{self.path}@{self.count[self.path]}"
                    self.branches.append((body[0].lineno, body[-1].end_lineno, key))
                    body.insert(0, ast.copy_location(ast.Expr(self._note(key)), body[0]))
        return node

    def _within(self, node: Any, name: str, inner: str) -> Any:
        before, self.path = self.path, f"{name}{inner}"
        self.generic_visit(node)
        self.path = before
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._within(node, f"{self.path}{node.name}", ".")

    def visit_FunctionDef(self, node: Any) -> Any:
        name = f"{self.path}{node.name}"
        self._within(node, name, ".<locals>.")
        documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        node.body.insert(int(documented), ast.copy_location(ast.Expr(self._note(name)), node.body[0]))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        name = f"{self.path}<lambda>"
        self._within(node, name, ".<locals>.")
        both = ast.Tuple([self._note(name), node.body], ast.Load())
        node.body = ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), node.body)
        return node


@cache
def _branches(file: str) -> list[tuple[int, int, str]]:
    """Of a module below `src`, as it is."""
    notes = _Notes(file)
    notes.visit(ast.parse((SOURCE / file).read_text()))
    return notes.branches


class Tracer:
    """A pytest plugin: the functions and branches of chipfit that each test executes, and how long it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.fixtures: dict[str, set[str]] = defaultdict(set)
        self.failed: set[str] = set()
        self.imported: list[str] = []

    def pytest_collection_finish(self) -> None:
        self.imported = sorted(SEEN)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        before = set(SEEN)
        SEEN.clear()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.fixtures[fixturedef.argname] |= SEEN
            SEEN.update(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        SEEN.clear()
        begun = time.process_time()
        try:
            return (yield)
        finally:
            runs = SEEN.union(*(self.fixtures[f] for f in getattr(item, "fixturenames", ())))
            self.tests[item.nodeid] = {"seconds": time.process_time() - begun, "runs": sorted(runs)}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)


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

        Those that execute the branch that it is in or takes away, or else the function; of a defect at the level of a
        module, or in a function that runs when it is imported, those that execute anything of the module, and its own
        and its room's, which may read what stands there. First the tests of the module itself and those whose names
        share a rare word with the changed lines, then those of its room, which together get two thirds of the time at
        most; of one parametrized test a few before the others' rest, the module's own soon; cheap ones before dear
        ones; no more than `most` seconds of them.
        """
        changed = [x for x in m.diff.splitlines() if x[:1] in ("-", "+") and x[:3] not in ("---", "+++")]
        end = m.line + sum(x.startswith("-") for x in changed) - 1
        around = [(last - first, key) for first, last, key in _branches(m.file) if first <= m.line <= last]
        taken_out = [key for first, last, key in _branches(m.file) if m.line < first <= last <= end]
        key = f"{m.file}:{m.within}"
        found = {t for b in taken_out or [k for _, k in sorted(around)[:1]] for t in self.by_function[f"{m.file}:{b}"]}
        if not found:
            called = (ts for f, ts in self.by_function.items() if f == key or f.startswith(f"{key}.<locals>"))
            found = {t for ts in called for t in ts}
        room, own = _mirrors(m.file)
        if not m.within or key in self.imported or not found:
            found = self.by_file[m.file] | found | {t for t in self.seconds if t.startswith((*own, *room))}
        if not found:
            found = set(self.seconds)
        words = _words(f"{m.within} {' '.join(changed)}")
        told = {t: words & _words(t.rpartition("/")[2]) for t in found}  # file and test
        often = Counter(w for shared in told.values() for w in shared)
        seen: Counter[str] = Counter()
        ranked = []
        for t in sorted(found, key=lambda t: (self.seconds[t], t)):
            stem = t.partition("[")[0]
            seen[stem] += 1
            rare = any(often[w] <= max(5, len(found) // 20) for w in told[t])
            tier = 0 if t.startswith(own) or rare else 1 if t.startswith(room) else 2
            ranked.append((tier, self.seconds[t] + (0.002 if t.startswith(own) else 0.1) * seen[stem], t))
        out, spent = [], 0.0
        for tier, _, t in sorted(ranked):
            if spent + self.seconds[t] <= (most if tier == 2 else most * 2 / 3) or not out:
                out.append(t)
                spent += self.seconds[t]
        return out


def _mirrors(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Beginnings of the names of the tests that belong to a module's room, and to itself."""
    inner = Path(file).relative_to("chipfit")
    room = f"tests/{inner.parent}/" if inner.parent != Path(".") else "tests/test_"
    return (room, f"src/{file}"), (f"{room.removesuffix('test_')}test_{inner.stem}", f"src/{file}")


def _words(text: str) -> set[str]:
    """Words of four letters or more, small; of names like `conv_bias` and `HardTanh` each part, and the whole."""
    parts = re.findall(r"[A-Z]?[a-z]{3,}|[A-Za-z]{4,}", text)
    return {w.lower() for w in parts if len(w) > 3}


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
        names_of = [sys.intern(n) for n in data["names"]]
        for test, entry in data["tests"].items():
            seconds[test], runs[test] = entry["seconds"], [names_of[k] for k in entry["runs"]]
    return Table(seconds, runs, imported)


def trace(test_file: str) -> int:
    """Run one file's tests and keep what they execute; returns pytest's exit status. For a process of its own."""
    setattr(builtins, _NAME, SEEN)
    sys.meta_path.insert(0, Instrumented())
    tracer = Tracer()
    status = pytest.main([*OPTIONS, test_file], plugins=[tracer])
    found = {t: e for t, e in tracer.tests.items() if t not in tracer.failed}
    number = {n: k for k, n in enumerate(sorted({n for e in found.values() for n in e["runs"]}))}
    numbered = {t: {**e, "runs": [number[n] for n in e["runs"]]} for t, e in found.items()}
    data = {"imported": tracer.imported, "names": list(number), "tests": numbered}
    kept(test_file).parent.mkdir(parents=True, exist_ok=True)
    kept(test_file).write_text(json.dumps(data))
    return int(status)


OPTIONS = "-q --no-header --tb=line -rN -p no:cacheprovider".split() + ["-m", "not slow and not chromium"]
