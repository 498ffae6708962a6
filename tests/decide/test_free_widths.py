"""Where a platform leaves widths to the user, any from 1 to 16 may be asked for; elsewhere only those of the chip."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Platform


def fit(platform, overrides):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    data = [torch.randn(32, 6)]
    return net, data[0], chipfit.quantize(net, data, platform=platform, overrides=overrides, progress=False)


@pytest.mark.parametrize("bits", range(1, 17))
def test_any_width_may_be_asked_of_weights(bits):
    net, x, result = fit("mqbench_academic", {"2": {"bits": bits}})
    grid = result.plan["2.weight"].grid
    assert (grid.bits, len(set(result.plan["2.weight"].round(net[2].weight.detach())[0].tolist())) <= 2**bits) == (
        bits,
        True,
    )
    assert result.plan["0.weight"].grid.bits == 8  # the first and last layer, as this platform has it
    with torch.no_grad():
        assert torch.isfinite(result.model(x)).all()


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_any_width_may_be_asked_of_activations(bits):
    _, _, result = fit("mqbench_academic", {"Linear": {"activation_bits": bits}})
    read = [t.stored.grid for t in result.plan.tensors.values() if t.role == "activation" and t.quantized]
    assert read and {g.bits for g in read} == {bits}
    assert all(g.qmax - g.qmin == 2**bits - 1 for g in read)


def test_one_bit_of_weights_are_the_two_signs():
    net, _, result = fit("mqbench_academic", {"2": {"bits": 1}})
    w = net[2].weight.detach()
    stored = result.plan["2.weight"]
    assert stored.grid.table == (-1.0, 1.0)
    assert torch.equal(torch.sign(stored.round(w)), torch.where(w > 0, 1.0, -1.0))
    assert torch.equal(stored.dequantize(stored.quantize(w)), stored.round(w))


@pytest.mark.parametrize(
    "platform, bits, allowed", [("mqbench_academic", 17, "Allowed: 1, 2, 3"), ("ort_cpu", 5, "8 bits")]
)
def test_a_width_that_the_chip_lacks_is_refused(platform, bits, allowed):
    with pytest.raises(UnsupportedError, match=f"{bits}-bit weights.*{allowed}"):
        fit(platform, {"2": {"bits": bits}})


def test_widths_are_free_only_of_integers_between_ends_that_follow_from_them():
    for fmt in ({"bits": 4, "range": [-4, 3]}, {"bits": 8, "kind": "lut"}, {"bits": 32}):
        with pytest.raises(ValueError, match="free width"):
            Platform.model_validate({"name": "npu", "formats": {"w": {**fmt, "free": True}}})
