"""Transposed convolutions run as convolutions and DepthToSpace where only these have integer kernels."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.graph.folds import unfold_batch_norms
from tests.build import quantized, sequential

#: kernel, stride, padding, output padding
GEOMETRIES = [
    (2, 2, 0, 0),
    (4, 2, 1, 0),
    (3, 2, 1, 1),
    (3, 3, 0, 0),
    (5, 2, 2, 1),
    (3, 2, 0, 0),
    (2, 3, 0, 0),
    (5, 3, 2, 2),
]
#: transposed convolutions that stay
STAY = {
    "dilation": {"kernel_size": 2, "stride": 2, "dilation": 2},
    "cut borders": {"kernel_size": 3, "padding": 3},
    "two strides": {"kernel_size": 2, "stride": (2, 1)},
    "beyond the windows": {"kernel_size": 2, "stride": 3, "output_padding": 2},
}


def images(n: int = 4, height: int = 6, width: int = 7) -> torch.Tensor:
    return torch.randn(n, 4, height, width)


def operators(result) -> list[str]:
    return [n.op for n in result.graph.nodes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_convolution_computes_what_torchs_transposed_one_does(geometry, bias):
    model, x = sequential(nn.ConvTranspose2d(4, 6, *geometry, bias=bias), nn.ReLU(), nn.Conv2d(6, 2, 1)), images()
    graph = chipfit.lint(model, x).graph
    assert [n.op for n in graph.nodes][:3] == ["Conv2D", "Relu", "DepthToSpace"]
    with torch.no_grad():
        torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], model(x), rtol=1e-5, atol=1e-5)
    assert quantized(model, x).verify([images()]).exact


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_of_stride_1_is_a_convolution_with_groups_and_dilation(groups, platform):
    layer = nn.ConvTranspose2d(4, 8, (3, 2), padding=(1, 0), dilation=(2, 1), groups=groups)
    model, x = sequential(layer, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval(), images()
    graph = chipfit.lint(model, x, platform=platform).graph
    assert graph.nodes[0].op == ("DepthwiseConv2D" if groups == 4 else "Conv2D")
    torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], model(x), rtol=1e-5, atol=1e-5)
    assert [*unfold_batch_norms(graph).folds] == ["0.weight"]
    assert quantized(model, x, platform).verify([images()]).exact


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "tflm_cmsis_nn", "ethos_u"])
@pytest.mark.parametrize(("groups", "channels"), [(2, 6), (4, 4), (4, 8)])
def test_groups_stay_groups_of_a_convolution(groups, channels, platform):
    up = nn.ConvTranspose2d(4, channels, 4, 2, 1, groups=groups)
    model, x = sequential(nn.Conv2d(4, 4, 1), up, nn.ReLU(), nn.Conv2d(channels, 2, 1)), images()
    result = quantized(model, x, platform)
    assert {n.exec for n in result.plan.nodes.values()} <= {"int", "follow"}
    assert operators(result)[1] == ("DepthwiseConv2D" if groups == 4 else "Conv2D")
    graph = chipfit.lint(model, x, platform=platform).graph
    torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], model(x), rtol=1e-5, atol=1e-5)
    assert platform == "ethos_u" or result.verify([images()]).exact


def test_sizes_of_images_stay_open():
    model = sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), nn.Conv2d(6, 2, 1))
    result = quantized(model, [images(), images(height=9)])
    assert "DepthToSpace" in operators(result)
    x = images(2, 11)
    assert result.model(x).shape == model(x).shape and result.verify([x]).exact


@pytest.mark.parametrize("how", STAY)
def test_others_stay_and_are_computed_in_float(how):
    model = sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 6, **STAY[how]), nn.Conv2d(6, 2, 1))
    assert operators(quantized(model, images())) == ["Conv2D", "TransposeConv2D", "Conv2D"]
    runs = [chipfit.lint(model, images(), p).rows[1] for p in ("tflite_int8", "tflite_int16x8")]
    assert {n.exec for n in runs} == {"float" if how == "dilation" else "int"}


def test_a_chip_with_an_integer_kernel_keeps_it():
    model = sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.Conv2d(6, 2, 1))
    assert operators(quantized(model, images(), "tflite_int8")) == ["TransposeConv2D", "Conv2D"]


def test_one_with_a_folded_batch_norm_stays_for_training_to_fold_it_anew():
    model = sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1))
    result = quantized(model, images())
    assert "TransposeConv2D" in operators(result) and [*result.graph.folds] == ["0.weight"]
