"""What `quantize`, its result, `lint` and `load` promise around the steps themselves."""

from __future__ import annotations

import torch
from torch import nn

import chipfit

DATA = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).split(8))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


def fit(model=None, data=DATA, platform="ort_cpu", progress=False, **options):
    return chipfit.quantize(model or network(), data, platform, progress=progress, **options)


def scales(plan):
    return {t.name: t.scale.tolist() for t in plan.tensors.values() if t.quantized}


def test_a_result_with_a_threshold_for_outliers_is_loaded_and_edited_with_it(tmp_path):
    first = fit(z_threshold=1.0)
    loaded = chipfit.load(first.save(tmp_path / "saved"))
    assert loaded.plan.provenance["settings"]["z_threshold"] == 1.0
    finer = {"1": {"rule": "no_clipping"}}
    assert scales(first.edit(finer).plan) == scales(fit(z_threshold=1.0, overrides=finer).plan)
    assert scales(first.edit(finer).plan) != scales(fit(overrides=finer).plan)
