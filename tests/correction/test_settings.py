"""Settings of the corrections: all are off until they are asked for, with the defaults that the pages tell."""

import re
from pathlib import Path

import pytest

from chipfit.registry import entries, options_of, ordered

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / f"{name}.md").read_text() for name in ("few-bits", "activation-bits", "learned-rounding"))
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", PAGE, re.MULTILINE))
OPTIONS = {o.name: o.default for e in entries("rounding").values() for o in options_of(e).values()}
STEPS = {s.name: s.declares for s in ordered("correct")}


def told(row: str) -> object:
    """The default with which a row of the page begins, as in `8192: positions ...`; None where it names none."""
    if name := re.match(r'`"(\w+)"`: ', row):
        return name[1]
    first = re.match(r"(on|[\d.]+): ", row)
    return None if first is None else True if first[1] == "on" else float(first[1])


@pytest.mark.parametrize("name, default", OPTIONS.items())
def test_the_default_of_an_option_is_the_one_that_the_page_tells(name, default):
    assert told(ROWS[name]) == (None if default is False else default)


def test_a_page_that_tells_another_default_is_noticed():
    assert [told(r) for r in ("8192: positions", "on: learned", "0: of it", "that falls")] == [8192, True, 0, None]


def test_corrections_are_off_until_they_are_asked_for_and_run_one_behind_the_other():
    """Spreads before means, means of weights before those of inputs, and learning on top of all."""
    assert {name: (d.setting.name, d.setting.default) for name, d in STEPS.items()} == {
        "second_moment": ("correct_second_moment", False),
        "bias": ("correct_bias", None),
        "activation_bias": ("correct_activation_bias", None),
        "rounding": ("rounding", None),
        "reconstruct": ("reconstruct", None),
    }
    names = list(STEPS)
    order = ["second_moment", "bias", "activation_bias", "reconstruct"]
    assert sorted(order, key=names.index) == order and names.index("rounding") < names.index("reconstruct")
    assert {n for n, d in STEPS.items() if d.chooses_scales} == {"rounding", "reconstruct"}
    assert set(STEPS["rounding"].excludes) == {"bias", "activation_bias", "second_moment"}
