"""Settings: what they accept, how plans record them, and what needs the data again."""

import math
from pathlib import Path

import pytest
import torch

import chipfit
from chipfit.core import QuantizationConfig
from chipfit.decide.overrides import CHOICES
from chipfit.errors import PlanError
from chipfit.registry import STAGES, ordered
from chipfit.settings import Settings, known_settings
from tests.build import quantized, randn, small_cnn

NET, DATA = small_cnn(), [randn(8, 3, 8, 8), randn(8, 3, 8, 8, seed=1)]
BIAS = Settings(correct_bias=True, rounding="off")


@pytest.mark.parametrize(
    "wrong",
    [{"correct_bias": 1}, {"shift_negative": -1.0}, {"shift_negative": True}, {"correct_activation_bias": math.nan}],
)
def test_values_of_another_kind_or_below_zero_are_refused(wrong):
    with pytest.raises(PlanError, match=next(iter(wrong))):
        Settings(**wrong)


def test_every_setting_is_off_by_default_and_an_equal_one_is_not_recorded():
    steps = [step.declares for stage in STAGES for step in ordered(stage)]
    assert {s.setting.default for s in steps if s.setting is not None} <= {False, None}
    assert Settings() == Settings(collapse_linear=False) and Settings().to_record() == {}


def test_the_plan_records_the_settings():
    chosen = Settings(correct_bias=True, shift_negative=0.05, rounding="off")
    steps = quantized(NET, DATA, settings=chosen).plan.provenance["settings"]["steps"]
    assert steps == {"correct_bias": True, "shift_negative": 0.05, "rounding": "off"}
    assert Settings.from_record(steps) == chosen


def test_the_pages_about_settings_name_every_one_of_them():
    docs = Path(__file__).parents[1] / "docs"
    pages = "settings", "few-bits", "activation-bits", "learned-rounding"
    page = "".join((docs / f"{name}.md").read_text() for name in pages)
    named = [*known_settings(), *CHOICES, *vars(QuantizationConfig())]
    assert [n for n in named if f"`{n}`" not in page] == []


def test_an_edited_result_is_corrected_anew():
    edited = quantized(NET, DATA, settings=BIAS).edit({"2": "float"})
    again = quantized(NET, DATA, overrides={"2": "float"}, settings=BIAS)
    assert torch.equal(edited.graph.weights["2.bias"], NET[2].bias)  # what stays in float needs no correction
    for name, w in again.graph.weights.items():
        assert torch.equal(w, edited.graph.weights[name])
    assert edited.verify(DATA).exact


def test_a_saved_correction_is_not_taken_for_one_of_another_rounding(tmp_path):
    saved = quantized(NET, DATA, settings=BIAS).save(tmp_path / "saved")
    with pytest.raises(PlanError, match="quantize again"):
        chipfit.load(saved).edit({"2": "float"})


def test_data_that_can_be_read_once_serve_what_reads_them_twice():
    once, again = (quantized(NET, data, settings=Settings(correct_second_moment=True)) for data in (iter(DATA), DATA))
    assert str(once.plan) == str(again.plan) and "second_moment" in once.plan.provenance["corrected"]
