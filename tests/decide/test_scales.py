"""Scales of biases: the product where the chip adds in its accumulator, and room for every bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.decide.scales import needs
from chipfit.pipeline import quantize
from tests.steps import begin


class _Tied(nn.Module):
    """Two layers share a weight; the second one's bias is far too large for the first guess of its scale."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        with torch.no_grad():
            self.a.weight.mul_(1e-6)
            self.b.bias.fill_(3e4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@pytest.fixture(scope="module")
def tied():
    torch.manual_seed(0)
    return quantize(_Tied(), [torch.randn(16, 4)], progress=False)


def test_a_weight_scale_grows_until_the_bias_fits_its_codes(tied):
    t = tied.plan.tensors["b.bias"]
    assert tied.plan.tensors["a.weight"].origin.endswith("enlarged to store the bias")
    assert (tied.graph.weights["b.bias"] / t.scale).abs().max() <= t.grid.qmax


def test_every_reader_of_a_tied_weight_has_its_bias_at_the_final_product(tied):
    plan, readers = tied.plan, [n for n in tied.graph if n.op == "Linear"]
    assert len(readers) == 2
    for n in readers:
        x, w, b = (plan.tensors[i] for i in n.inputs)
        assert torch.equal(b.scale, x.scale * w.scale)


@pytest.mark.parametrize("platform", ["vitis_dpu", "qualcomm_aic100"])
def test_an_eight_bit_bias_has_a_range_of_its_own(platform):
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), torch.randn(4, 2, 6, 6)
    plan = quantize(model, [x], platform, progress=False).plan
    b, w = plan.tensors["0.bias"], plan.tensors["0.weight"]
    assert b.grid.bits == 8
    assert b.scale * b.grid.qmax <= 4 * model[0].bias.detach().abs().max()
    assert "enlarged" not in w.origin


def test_a_histogram_is_collected_only_where_a_range_is_searched():
    steps = begin(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4), "tflite_int8")
    a, dictated = steps.assignment, "tanh"  # 1/128 on this chip
    assert a.slots[dictated].rule is None

    def searched(rule, z=None, slots=a.slots):
        return {t for t, need in needs(replace(a, slots=slots), rule, z).items() if need.histogram}

    others = {t for t, s in a.slots.items() if s.role == "activation"} - {dictated}
    assert searched("mse") == others and len(others) == 3
    assert searched("no_clipping") == set() and searched("no_clipping", 3.0) == others
    own = {**a.slots, "linear": replace(a.slots["linear"], rule="kl")}
    assert searched("no_clipping", slots=own) == {"linear"}
    own["linear"] = replace(a.slots["linear"], rule="no_clipping")
    assert searched("mse", slots=own) == others - {"linear"}
