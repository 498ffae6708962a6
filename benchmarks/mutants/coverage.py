"""Find out which tests execute which part of the source, and choose those that should notice a defect.

The tests run once, with a note at the begin of each function, lambda and branch. Their table is kept below `.mutants`,
by the content of the test file; parts of the source are named by their functions and numbered there, so that a change
elsewhere in a module leaves the table valid.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutants.draw import ROOT, SOURCE, Mutant, files

KEPT = ROOT / ".mutants"
OPTIONS = "-q --no-header --tb=line -rN -p no:cacheprovider".split() + ["-m", "not slow and not chromium"]
#: tests that run other processes, other packages' code, or everything there is
LEFT_OUT = """
    tests/slow tests/docs tests/examples tests/cli tests/test_fuzz.py tests/test_project.py tests/test_import.py
    tests/test_mutants.py tests/frameworks/keras/test_backends.py tests/exactness/test_litert_converter.py
"""


def test_files() -> list[str]:
    """Return every file whose tests may notice a defect, modules with doctests among them."""
    tests = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    doctests = [f"src/{f}" for f in files() if ">>>" in (SOURCE / f).read_text()]
    return [t for t in tests if not t.startswith(tuple(LEFT_OUT.split()))] + doctests


# ------------------------------------------------------------------------------------------------ parts of the source

EXECUTED: set[str] = set()  #: keys of the parts that were executed since it was last emptied
_NAME = "__parts_executed__"  #: under which the instrumented source finds it among the builtins


@dataclass(frozen=True)
class Part:
    """The body of a function, lambda or branch."""

    first: int  #: line
    last: int  #: line
    key: str  #: "file:function", or "file:function@number" for a branch or lambda of it


class Instrument(ast.NodeTransformer):
    """Put a note into each part of a module, and list the parts."""

    def __init__(self, file: str) -> None:
        self.file, self.path = file, ""
        self.parts: list[Part] = []
        self.count: Counter[str] = Counter()  #: branches of each function so far

    def _note(self, first: int, last: int | None, name: str) -> ast.Call:
        key = f"{self.file}:{name}"
        self.parts.append(Part(first, last or first, key))
        add = ast.Attribute(ast.Name(_NAME, ast.Load()), "add", ast.Load())
        return ast.Call(add, [ast.Constant(key)], [])

    def _numbered(self) -> str:
        self.count[self.path] += 1
        return f"{self.path}@{self.count[self.path]}"

    def generic_visit(self, node: Any) -> Any:
        super().generic_visit(node)
        if isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.match_case):
            for body in (node.body, getattr(node, "orelse", [])):
                if body:
                    note = ast.Expr(self._note(body[0].lineno, body[-1].end_lineno, self._numbered()))
                    body.insert(0, ast.copy_location(note, body[0]))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._within(node, f"{self.path}{node.name}.")

    def visit_FunctionDef(self, node: Any) -> Any:
        name = f"{self.path}{node.name}"
        self._within(node, f"{name}.<locals>.")
        documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        note = ast.Expr(self._note(node.lineno, node.end_lineno, name))
        node.body.insert(int(documented), ast.copy_location(note, node.body[0]))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        name = self._numbered()
        super().generic_visit(node)
        both = ast.Tuple([self._note(node.lineno, node.end_lineno, name), node.body], ast.Load())
        node.body = ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), node.body)
        return node

    def _within(self, node: Any, path: str) -> Any:
        before, self.path = self.path, path
        self.generic_visit(node)
        self.path = before
        return node


@cache
def parts_of(file: str) -> list[Part]:
    """List the parts of a module below `src`."""
    instrument = Instrument(file)
    instrument.visit(ast.parse((SOURCE / file).read_text()))
    return instrument.parts


class Instrumented(importlib.abc.MetaPathFinder):
    """An importer of chipfit that instruments each module."""

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
        tree = Instrument(str(path.relative_to(SOURCE))).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


# ------------------------------------------------------------------------------------------- the table of what tests do


class Tracer:
    """A pytest plugin that records what each test executes and how long it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.fixtures: dict[str, set[str]] = defaultdict(set)
        self.failed: set[str] = set()
        self.imported: list[str] = []

    def pytest_collection_finish(self) -> None:
        self.imported = sorted(EXECUTED)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        before = set(EXECUTED)
        EXECUTED.clear()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.fixtures[fixturedef.argname] |= EXECUTED
            EXECUTED.update(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        EXECUTED.clear()
        begun = time.process_time()
        try:
            return (yield)
        finally:
            runs = EXECUTED.union(*(self.fixtures[f] for f in getattr(item, "fixturenames", ())))
            self.tests[item.nodeid] = {"seconds": time.process_time() - begun, "runs": sorted(runs)}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)


def trace(test_file: str) -> int:
    """Run one file's tests and keep what they execute; return pytest's exit status. Needs a process of its own."""
    setattr(builtins, _NAME, EXECUTED)
    sys.meta_path.insert(0, Instrumented())
    tracer = Tracer()
    status = pytest.main([*OPTIONS, test_file], plugins=[tracer])
    passed = {t: e for t, e in tracer.tests.items() if t not in tracer.failed}
    number = {n: k for k, n in enumerate(sorted({n for e in passed.values() for n in e["runs"]}))}
    numbered = {t: {**e, "runs": [number[n] for n in e["runs"]]} for t, e in passed.items()}
    kept(test_file).parent.mkdir(parents=True, exist_ok=True)
    kept(test_file).write_text(json.dumps({"imported": tracer.imported, "names": list(number), "tests": numbered}))
    return int(status)


def kept(test_file: str) -> Path:
    """Return the file that holds the part of the table that `test_file` makes."""
    digest = hashlib.sha256((ROOT / test_file).read_bytes()).hexdigest()[:12]
    return KEPT / "table" / f"{test_file.replace('/', '.')}.{digest}.json"


@dataclass
class Table:
    """What each test executes."""

    seconds: dict[str, float]  #: test -> processor time
    runs: dict[str, list[str]]  #: test -> keys of parts
    imported: set[str]  #: keys of the parts that run when modules are imported

    def __post_init__(self) -> None:
        self.by_part: dict[str, set[str]] = defaultdict(set)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        for test, keys in self.runs.items():
            for key in keys:
                self.by_part[key].add(test)
                self.by_file[key.partition(":")[0]].add(test)

    @classmethod
    def load(cls, test_files: Iterable[str]) -> Table:
        """Read the parts of the table that these files made."""
        table: tuple[dict[str, float], dict[str, list[str]], set[str]] = {}, {}, set()
        for file in test_files:
            data = json.loads(kept(file).read_text())
            table[2].update(data["imported"])
            keys = [sys.intern(n) for n in data["names"]]
            for test, entry in data["tests"].items():
                table[0][test], table[1][test] = entry["seconds"], [keys[k] for k in entry["runs"]]
        return cls(*table)

    def choose(self, m: Mutant, most: float) -> list[list[str]]:
        """Choose the tests that should notice a defect: first those of its room, then others; cheap ones first.

        They execute the innermost part around the defect, or a part that it removes. A defect outside all functions,
        or in one that runs when modules are imported, is a matter of all tests that execute anything of the module,
        and of those of its room.

        Args:
            most: processor time of the room's tests, and of the others [s].
        """
        found = {t for key in self._parts(m) for t in self.by_part[key]}
        own, room = mirrors(m.file)
        if not found or self.imported & set(self._parts(m)):
            found |= self.by_file[m.file] | {t for t in self.seconds if t.startswith(room)} or set(self.seconds)
        ranked = sorted(found, key=lambda t: (not t.startswith(own), self.seconds[t], t))
        near = [t for t in ranked if t.startswith(room)]
        return [self._at_most(most, part) for part in (near, [t for t in ranked if not t.startswith(room)]) if part]

    def _parts(self, m: Mutant) -> list[str]:
        parts = parts_of(m.file)
        if removed := [p.key for p in parts if m.line < p.first <= p.last <= m.last]:
            return removed
        around = [p for p in parts if p.first <= m.line <= p.last]
        least = min((p.last - p.first for p in around), default=0)
        return [p.key for p in around if p.last - p.first == least]

    def _at_most(self, most: float, tests: list[str]) -> list[str]:
        out, spent = [], 0.0
        for t in tests:
            if spent + self.seconds[t] <= most or not out:
                out.append(t)
                spent += self.seconds[t]
        return out


def mirrors(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return how the names of a module's own tests begin, and those of its room's."""
    inner = Path(file).relative_to("chipfit")
    room = f"tests/{inner.parent}/" if inner.parent != Path(".") else "tests/test_"
    return (f"{room.removesuffix('test_')}test_{inner.stem}", f"src/{file}"), (room, f"src/{file}")
