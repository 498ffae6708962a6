"""Losses of widths where blocks of weights share a scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit

DATA = [torch.randn(64, 64, generator=torch.Generator().manual_seed(k)) for k in range(4)]


@pytest.mark.parametrize("rounding", ["off", "gptq"])
def test_four_bits_more_cost_two_hundred_and_fifty_times_less(rounding):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    settings = chipfit.Settings(rounding=rounding)
    result = chipfit.quantize(
        model, DATA, "ort_dynamic", overrides={"Linear": {"bits": 4}}, settings=settings, progress=False
    )
    rows = {r["tensor"]: r for r in result.sensitivity(DATA).rows()}
    for name in ("0.weight", "2.weight"):
        assert 100 < rows[name]["loss"] / rows[name]["others"][8] < 800  # 16 squared is 256


def test_widths_are_searched_under_a_limit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    limits = chipfit.Limits(weights="70%")
    result = chipfit.quantize(model, DATA, "ort_dynamic", limits=limits, progress=False)
    widths = {t.grid.bits for t in result.plan.tensors.values() if t.role == "weight" and t.quantized}
    assert widths == {4, 8} and result.verify([DATA[0]]).sound
