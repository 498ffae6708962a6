"""The list of defects written by hand follows the code, and drawing finds what it should."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

pytest.importorskip("cosmic_ray")

from benchmarks.mutants.draw import (
    EFFORT,
    ROOT,
    SOURCE,
    Mutant,
    OutOfDate,
    _around,
    _by_hand,
    _excluded,
    _meaning,
    _same_comparison,
    by_hand,
    files,
)
from benchmarks.mutants.tests import Table, _branches, _Notes


def test_every_defect_by_hand_fits_the_code_once_and_changes_it():
    """Where this fails, the code has moved on: bring `benchmarks/mutants/by_hand.yaml` along."""
    mutants = by_hand()
    assert len(mutants) >= 60
    assert len({m.text for m in mutants}) == len(mutants)
    for m in mutants:
        assert m.text != (SOURCE / m.file).read_text() and m.what


@pytest.mark.parametrize("old, why", [("no such text", "0 times"), ("import", "times in the code, must be once")])
def test_a_defect_that_no_longer_fits_is_an_error(old, why):
    with pytest.raises(OutOfDate, match=why):
        _by_hand({"file": "chipfit/pipeline.py", "old": old, "new": "", "user": "x"})


def test_a_defect_that_does_not_compile_is_an_error():
    with pytest.raises(OutOfDate, match="does not compile"):
        _by_hand({"file": "chipfit/errors.py", "old": "class ChipfitError(Exception)", "new": "class", "user": "x"})


def test_the_function_around_a_place_is_found():
    source = """
A = 1
class B:
    def f(self):
        def g():
            return 2
        return g
T = {1: lambda x: x + 3}
"""
    assert [_around(source, line, col) for line, col in ((2, 4), (4, 8), (6, 19), (8, 18))] == [
        "",
        "B.f",
        "B.f.<locals>.g",
        "<lambda>",
    ]


def test_what_cannot_change_a_result_is_left_out_by_rule():
    source = """
def f(x: int | None) -> int | None:
    if x is None:
        raise ValueError(f'{x + 1}')
    return x + 1
"""
    reasons = [why for *_, why in _excluded(source)]
    assert sorted(set(reasons)) == ["a text", "a type annotation", "the text of an error"]
    line = source.splitlines().index("    return x + 1") + 1
    assert not any(a <= (line, 11) <= b for a, b, _ in _excluded(source))


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
    assert {found for *_, found in _excluded(source)} == ({why} if why else set())


def test_where_a_text_is_cut_off_belongs_to_the_text():
    assert max(end for _, end, _ in _excluded("f'{x}'[:80]")) == (1, 11)


def test_amounts_of_work_are_left_out_and_no_other_numbers():
    reasons = {a[0]: why for a, _, why in _excluded("MANY, FEW = 3, 4\nMOST = 5\n", "MANY FEW LEAST")}
    assert reasons == {1: "an amount of effort"}
    source = "class A:\n    a: int = 1\n    b: int = 2\n\n\ndef f(x, c=3, a=4): ...\ndef g(x, a, b=6): ..."
    assert {a for a, *_ in _excluded(source, "a") if _[1] == "an amount of effort"} == {(2, 13), (6, 16)}
    for file, names in EFFORT.items():
        found = {
            getattr(n, "id", getattr(n, "arg", ""))
            for n in ast.walk(ast.parse((SOURCE / "chipfit" / file).read_text()))
        }
        assert set(names.split()) <= found, file


@pytest.mark.parametrize(
    "before, after, same",
    [
        ("x == 'a'", "x is 'a'", True),
        ("x == 'a'", "x <= 'a'", True),
        ("x == 'a'", "x != 'a'", False),
        ("x == 3", "x is 3", True),
        ("x == 'a'", "x < 'a'", False),
        ("x != y", "x is not y", True),
        ("x is None", "x == None", True),
        ("x is None", "x != None", False),
        ("x == 3", "x <= 3", False),
        ("x == y", "x <= y", False),
    ],
)
def test_which_comparisons_say_the_same(before, after, same):
    assert _same_comparison(before, after) is same


@pytest.mark.parametrize(
    "after, same",
    [
        ("def f(a, /, b=1): pass", True),
        ("def f(a, *, b=2): pass", False),
        ("def f(a, *, c=1): pass", False),
        ("def f(a, *b): pass", False),
    ],
)
def test_a_star_in_a_signature_is_no_defect(after, same):
    assert (_meaning("def f(a, *, b=1): pass") == _meaning(after)) is same


def test_the_named_modules_carry_meaning():
    found = files()
    assert {"chipfit/verify.py", "chipfit/pipeline.py", "chipfit/decide/legality.py"} <= set(found)
    assert not any(f.startswith(("chipfit/facade", "chipfit/cli", "chipfit/report")) for f in found)


@pytest.mark.slow
def test_the_tool_draws_the_same_for_the_same_seed():
    def shown(seed):
        command = [sys.executable, "-m", "benchmarks.mutants", "--list", "--seed", str(seed), "--count", "80"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert shown(1) == shown(1) != shown(2)


def test_those_are_asked_that_take_the_branch_first_of_all_the_modules_own():
    file = "chipfit/calibration/collect.py"
    line = 2 + (SOURCE / file).read_text().splitlines().index("            if o in stats and x.numel():")
    [branch] = [
        key for first, last, key in _branches(file) if first <= line <= last and "hook" in key and first == line
    ]
    see = f"{file}:{branch.partition('@')[0].removesuffix('.<locals>.')}"
    runs = {"tests/test_a.py::f": [see], "tests/test_b.py::g": [see, f"{file}:{branch}"]}
    runs |= {"tests/calibration/test_collect.py::h": [see, f"{file}:{branch}"]}
    table = Table(dict.fromkeys(runs, 1.0), runs, set())

    def chosen(at, most=25.0):
        return table.choose(Mutant(file, "", at, see.partition(":")[2], "", "-a\n+b"), most)

    assert chosen(line) == ["tests/calibration/test_collect.py::h", "tests/test_b.py::g"]
    assert chosen(line, 1.5) == ["tests/calibration/test_collect.py::h"]
    assert len(chosen(line - 1)) == 3
    around = Mutant(file, "", line - 1, see.partition(":")[2], "", "-if a:\n-    b\n+c")
    assert len(table.choose(around, 25)) == 2  # what is taken away


def test_what_changes_above_a_branch_does_not_move_it():
    """The table of what tests take is kept while modules change."""
    text = "def f(x):\n    if x:\n        return 1\n    for k in x:\n        while k:\n            k -= 1\n"
    other = "import os\n\n\ndef g():\n    if os:\n        pass\n\n\n" + text.replace(
        "return 1", "x = 2\n        return x"
    )

    def keys(source):
        notes = _Notes("m.py")
        notes.visit(ast.parse(source))
        return sorted((first, key) for first, _, key in notes.branches if key.startswith("f."))

    assert len(keys(text)) == len({k for _, k in keys(text)}) == 3
    assert [k for _, k in keys(text)] == [k for _, k in keys(other)]
