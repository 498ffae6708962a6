"""Grouped transposed convolutions: groups share the scales of channels, as the weight counts outputs of one group."""

import pytest
import torch
from torch import nn

import chipfit
from tests.build import quantized, randn, sequential


def net() -> nn.Module:
    torch.manual_seed(0)
    return sequential(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), nn.ReLU())


X = randn(4, 4, 5, 5, seed=1)


@pytest.mark.filterwarnings("ignore:No runtime proves")
def test_every_output_channel_has_a_bias_at_its_scale_and_the_integers_agree():
    result = quantized(net(), X, "ppl_cuda")
    weight, bias, x = (result.plan[name] for name in ("0.weight", "0.bias", "input"))
    assert weight.scale.shape == (3,) and bias.scale.shape == (6,)
    torch.testing.assert_close(bias.scale, torch.cat([x.scale * weight.scale] * 2))
    with torch.inference_mode():
        simulated, device, real = result.model(X), result.device_model(X), net()(X)
    step = float(result.plan["relu"].scale)
    assert (simulated - device).abs().max() <= 1.01 * step and (simulated - real).abs().max() < 0.1 * real.max()


@pytest.mark.parametrize("platform", ["tflite_int8", "tflite_int16x8", "ethos_u", "litert_ai_edge"])
def test_formats_whose_operator_has_no_groups_keep_it_in_float(platform):
    lint = chipfit.lint(net(), X, platform)
    assert [n.exec for n in lint.rows if n.op == "TransposeConv2D"] == ["float"]


@pytest.mark.parametrize("platform", ["hailo", "rknn", "qnn_htp", "edgetpu", "tvm_qnn"])
def test_the_simulation_runs_and_trains_on_platforms_without_a_runtime(platform):
    result = quantized(net(), X, platform, training="lsq")
    result.model.train()(X).sum().backward()
    assert result.trained().plan["0.bias"].scale.shape == (6,)
