"""Defects for mutation testing are drawn where they can change a result, and the tests that run there are chosen."""

import ast

import pytest

pytest.importorskip("cosmic_ray")

from benchmarks.mutants import coverage
from benchmarks.mutants.coverage import Instrument, Part
from benchmarks.mutants.draw import Mutant, excluded_ranges, files, same_program


def reasons(source):
    return {why for *_, why in excluded_ranges(source)}


def test_no_defect_is_drawn_where_it_cannot_change_a_result():
    source = """
def f(x: int | None) -> int | None:
    if x is None:
        raise ValueError(f'{x + 1}')
    return x + 1
"""
    assert reasons(source) == {"a text", "a type annotation", "the text of an error"}
    line = source.splitlines().index("    return x + 1") + 1
    assert not any(a <= (line, 11) <= b for a, b, _ in excluded_ranges(source))


@pytest.mark.parametrize(
    "source, why",
    [
        ("class A:\n    @staticmethod\n    def f(): ...", "how a function is called"),
        ("class A:\n    @cached_property\n    def f(self): ...", "a cache"),
        ("class A:\n    @abstractmethod\n    def f(self): ...", "a type annotation"),
        ("class A:\n    @property\n    def f(self): ...", None),
        ("json.dumps(x, indent=1)", "spaces in JSON"),
        ("json.dumps(x, sort_keys=1)", None),
        ("f'{x}'[:80]", "a text"),
        ("x[:80]", None),
    ],
)
def test_each_rule_leaves_out_what_it_is_for(source, why):
    assert reasons(source) == ({why} if why else set())


@pytest.mark.parametrize(
    "before, after, same",
    [
        ("x == 'a'", "x is 'a'", True),
        ("x == 'a'", "x <= 'a'", True),
        ("x == 'a'", "x != 'a'", False),
        ("x == 3", "x is 3", True),
        ("x == 'a'", "x < 'a'", False),
        ("x != y", "x is not y", True),
        ("x is None", "x != None", False),
        ("x == 3", "x <= 3", False),
        ("def f(a, *, b=1): pass", "def f(a, /, b=1): pass", True),
        ("def f(a, *, b=1): pass", "def f(a, *, b=2): pass", False),
        ("def f(a, *, b=1): pass", "def f(a, *b): pass", False),
    ],
)
def test_changes_that_change_no_result_are_recognized(before, after, same):
    assert bool(same_program(before, after)) is same


def test_defects_are_drawn_from_every_module_that_computes():
    found = files()
    assert {"chipfit/verify/run.py", "chipfit/pipeline.py", "chipfit/decide/legality.py"} <= set(found)
    assert not any(f.startswith(("chipfit/mct", "chipfit/mqbench", "chipfit/cli", "chipfit/report")) for f in found)


def test_tests_of_the_room_that_execute_the_changed_branch_come_first(monkeypatch):
    function, branch = "chipfit/calibration/collect.py:f", "chipfit/calibration/collect.py:f.<locals>.@1"
    monkeypatch.setattr(coverage, "parts_of", lambda file: [Part(3, 9, function), Part(5, 6, branch)])
    runs = {
        "tests/test_a.py::other": [function],
        "tests/test_b.py::cheap": [function, branch],
        "tests/calibration/test_data.py::near": [function, branch],
        "tests/calibration/test_collect.py::own": [function, branch],
    }
    other, cheap, near, own = runs
    table = coverage.Table({**dict.fromkeys(runs, 1.0), cheap: 0.1}, runs, set())

    def chosen(line, diff="-a\n+b", most=60.0):
        mutant = Mutant("chipfit/calibration/collect.py", "", line, "", f"---\n+++\n{diff}")
        return table.choose(mutant, most)

    assert chosen(5) == [[own, near], [cheap]]
    assert chosen(5, most=1.5) == [[own], [cheap]]
    assert chosen(4, "-if x:\n-    y\n-    z\n+z") == [[own, near], [cheap]]  # the branch is taken away
    assert chosen(1) == chosen(9) == [[own, near], [cheap, other]]  # outside all functions: what uses the module


def test_a_change_elsewhere_in_a_module_does_not_rename_its_parts():
    text = "def f(x):\n    if x:\n        return 1\n    for k in x:\n        while k:\n            k -= 1\n"
    other = "import os\n\n\ndef g():\n    if os:\n        pass\n\n\n" + text.replace("return 1", "x = 2; return x")

    def keys(source):
        instrument = Instrument("m.py")
        instrument.visit(ast.parse(source))
        return [p.key for p in instrument.parts if p.key.startswith("m.py:f")]

    assert keys(text) == keys(other) and len(set(keys(text))) == 4
