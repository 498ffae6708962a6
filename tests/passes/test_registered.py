"""The order of rewrites; one with a setting is off unless it is requested."""

from __future__ import annotations

import pytest

from chipfit.registry import STAGES, ordered

STEPS = {s.name: (stage, s.declares) for stage in STAGES for s in ordered(stage)}
PASSES = {name: declares for name, (stage, declares) in STEPS.items() if stage != "correct"}


@pytest.mark.parametrize("name", [n for n, declares in PASSES.items() if declares.setting])
def test_a_rewrite_with_a_setting_of_its_name_is_off_unless_it_is_requested(name):
    setting = PASSES[name].setting
    assert setting.name == name and not setting.default


def test_rewrites_run_one_behind_the_other():
    """A network is folded, then merged, then scaled; biases are given last."""
    order = "fold_constants fold_batch_norm unshare_biases collapse_linear collapse_residual relu_bound equalize "
    order += "give_biases channels_last shift_negative softmax_shift centre equalize_groups"
    names = list(STEPS)
    assert sorted(order.split(), key=names.index) == order.split()
    assert names.index("fold_constants") < names.index("attention")
