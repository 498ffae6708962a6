"""Which rewrites there are, in which order they run, and that none changes a network unless it is asked to."""

from __future__ import annotations

import pytest

from chipfit.registry import STAGES, ordered

STEPS = {s.name: (stage, s.declares) for stage in STAGES for s in ordered(stage)}
#: rewrite -> its stage; those that run whenever the network has what they are about, and those that are asked for
ALWAYS = {
    "fold_constants": "rewrite", "fold_batch_norm": "rewrite", "unshare_biases": "rewrite", "give_biases": "rewrite",
    "channels_last": "rewrite", "attention": "rewrite", "islands": "results",
}  # fmt: skip
ASKED = {
    "collapse_linear": ("rewrite", False), "collapse_residual": ("rewrite", False), "equalize": ("rewrite", False),
    "relu_bound": ("rewrite", False), "smooth": ("adapt", None), "concat_ranges": ("formats", False),
    "shift_negative": ("adapt", None), "softmax_shift": ("adapt", False), "centre": ("adapt", None),
    "equalize_groups": ("adapt", None),
}  # fmt: skip


def test_every_rewrite_is_registered_at_its_stage():
    rewrites = {name: stage for name, (stage, _) in STEPS.items() if stage != "correct"}
    assert rewrites == ALWAYS | {name: stage for name, (stage, _) in ASKED.items()}


@pytest.mark.parametrize("name", ASKED)
def test_a_rewrite_that_changes_numbers_waits_until_it_is_asked_for(name):
    setting = STEPS[name][1].setting
    assert setting.default is ASKED[name][1] and setting.name == name


@pytest.mark.parametrize("name", ALWAYS)
def test_a_rewrite_that_is_always_right_has_no_switch(name):
    assert STEPS[name][1].setting is None


def test_rewrites_run_one_behind_the_other():
    """A network is folded, then merged, then scaled; biases are given last."""
    order = (
        "fold_constants fold_batch_norm unshare_biases collapse_linear collapse_residual relu_bound equalize".split()
    )
    order += "give_biases channels_last shift_negative softmax_shift centre equalize_groups".split()
    names = list(STEPS)
    assert sorted(order, key=names.index) == order
    assert names.index("fold_constants") < names.index("attention")


def test_what_moves_ranges_has_calibration_run_again():
    assert {n for n, (_, d) in STEPS.items() if d.recalibrates} == {"smooth", "centre", "equalize_groups"}
