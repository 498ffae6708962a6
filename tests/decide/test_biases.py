"""Scales of biases: of the products where the chip adds them there, and room for large ones."""

import torch
from torch import nn

import chipfit


def test_a_bias_behind_weights_in_blocks_has_a_range_of_its_own():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(16, 256)
    result = chipfit.quantize(model, [x], "hailo", overrides={"0": {"bits": 4, "per": "block"}}, progress=False)
    weight, bias = (t for t in result.plan.tensors.values() if t.name in ("0.weight", "0.bias"))
    assert weight.scale.shape == (8, 2) and "no_clipping" in bias.origin
    b = model[0].bias.detach()
    assert float((bias.stored.round(b) - b).abs().max()) <= float(bias.scale.max())
    assert "input scale x weight scale" in result.plan.tensors["2.bias"].origin
    alone = chipfit.quantize(model, [x], "hailo", overrides={"0": {"bits": 4}}, progress=False)

    def error(r):
        return float((r.model(x) - model(x)).square().mean().detach())

    assert error(result) < 2 * error(alone)


def test_weight_scales_grow_where_a_bias_would_not_fit_its_codes():
    model = nn.Linear(4, 2).eval()
    with torch.no_grad():
        model.weight[:] = torch.tensor([[1e-7, 2e-7, -1e-7, 0], [0.5, 0.1, -0.2, 0.3]])
        model.bias[:] = torch.tensor([3e3, 0.1])
    x = torch.rand(16, 4) * 2e-3
    plan = chipfit.quantize(model, [x], "ort_cpu", overrides={"*": {"inputs": "codes"}}, progress=False).plan
    weight, bias = plan.tensors["weight"], plan.tensors["bias"]
    product = plan.tensors["input"].scale * weight.scale
    # the first: 3000 / (s_in s_w) <= (2^31 - 1) / 2; the second has room already
    torch.testing.assert_close(float(3e3 / product[0]), (2**31 - 1) / 2, rtol=1e-5, atol=0)
    assert "enlarged" in weight.origin and float(weight.scale[1]) < 0.5 / 120
    assert float((bias.stored.round(model.bias.detach()) - model.bias.detach()).abs()[0]) <= 3e3 * 1e-6
