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


def test_a_format_without_groups_keeps_it_in_float_where_it_has_no_other_operators_for_it():
    rows = chipfit.lint(net(), X, "tflite_int16x8").rows
    assert [n.exec for n in rows if n.op == "TransposeConv2D"] == ["float"]


@pytest.mark.parametrize("platform", ["tflite_int8", "ethos_u", "litert_ai_edge", "nxp_neutron", "st_edge_ai"])
def test_formats_without_groups_compute_it_by_a_convolution_of_every_phase(platform):
    rows = chipfit.lint(net(), X, platform).rows
    assert {n.op for n in rows} >= {"Conv2D", "DepthToSpace"} and "TransposeConv2D" not in {n.op for n in rows}
    assert "float" not in {n.exec for n in rows}


#: platform -> results of the layer's operator: channels, or those of all four phases
OUTPUTS = {"hailo": 6, "rknn": 6, "qnn_htp": 6, "edgetpu": 24, "tvm_qnn": 6}


@pytest.mark.parametrize("platform", OUTPUTS)
def test_the_simulation_runs_and_trains_on_platforms_without_a_runtime(platform):
    result = quantized(net(), X, platform, training="lsq")
    result.model.train()(X).sum().backward()
    assert result.trained().plan["0.bias"].scale.shape == (OUTPUTS[platform],)
