"""Settings of the corrections: the defaults that the pages tell are those of the steps, and of what the steps call."""

import inspect
import re
from pathlib import Path

import pytest

from chipfit.registry import ordered
from chipfit.rounding import learned_rounding, sequential_reconstruction

PAGE = (Path(__file__).parents[2] / "docs/few-bits.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", PAGE, re.MULTILINE))
OPTIONS = [pytest.param(s, o, id=o.name) for s in ordered("correct") for o in s.declares.options]
HOWS = {"rounding": sequential_reconstruction.GptqSettings(), "reconstruct": learned_rounding.ReconstructionSettings()}


def told(row: str) -> object:
    """The default with which a row of the page begins, as in `8192: positions ...`; None where it names none."""
    first = re.match(r"(on|[\d.]+): ", row)
    return None if first is None else True if first[1] == "on" else float(first[1])


@pytest.mark.parametrize("step, option", OPTIONS)
def test_the_default_of_an_option_is_the_one_that_the_page_tells(step, option):
    assert told(ROWS[option.name]) == (None if option.default is False else option.default)


def test_a_page_that_tells_another_default_is_noticed():
    assert [told(r) for r in ("8192: positions", "on: learned", "0: of it", "that falls")] == [8192, True, 0, None]


@pytest.mark.parametrize("step, option", OPTIONS)
def test_what_a_step_takes_and_what_it_calls_have_the_same_default(step, option):
    word = option.argument or option.name
    taken = inspect.signature(step.thing).parameters.get(word)
    called = getattr(HOWS[step.name], word, option.default)
    assert [p.default for p in [taken] if p and p.default is not p.empty] in ([], [option.default])
    assert called == option.default


def test_streams_are_kept_in_memory_up_to_three_quarters_of_a_gibibyte():
    assert {how.memory for how in HOWS.values()} == {3 * 2**30 // 4}


STEPS = {s.name: s for s in ordered("correct")}


def test_corrections_are_off_until_they_are_asked_for_and_run_one_behind_the_other():
    """Spreads before means, means of weights before those of inputs, and learning on top of all."""
    asked = {name: (s.declares.setting.name, s.declares.setting.default) for name, s in STEPS.items()}
    assert asked == {
        "second_moment": ("correct_second_moment", False),
        "bias": ("correct_bias", False),
        "activation_bias": ("correct_activation_bias", None),
        "rounding": ("rounding", None),
        "reconstruct": ("reconstruct", None),
    }
    names = list(STEPS)
    order = ["second_moment", "bias", "activation_bias", "reconstruct"]
    assert sorted(order, key=names.index) == order and names.index("rounding") < names.index("reconstruct")
    assert {n for n, s in STEPS.items() if s.declares.decides} == {"rounding", "reconstruct"}
    assert set(STEPS["rounding"].declares.excludes) == {"bias", "activation_bias", "second_moment"}


@pytest.mark.parametrize(
    "bits, rule, asked",
    [
        ([8, 5], "mse", "gptq"),
        ([2], "mse", "gptq"),
        ([6], "mse", None),
        ([8, 6], "mse", None),
        ([], "mse", None),
        ([4], "kl", None),  # the user's choice
        ([8], "kl", None),
    ],
)
def test_weights_of_fewer_than_6_bits_are_fitted_unless_another_rule_was_chosen(bits, rule, asked):
    assert STEPS["rounding"].declares.asks(bits, rule) == asked
