"""Filters on arguments of layers, functions and tensor methods, and the formats that follow in a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chipfit.target_platform import Eq, Greater, LayerFilterParams, NotEq, Smaller
from tests.build import model_of, quantized
from tests.mct.target_platform.chips import chip

F = nn.functional


def bits_of_results(function, *layers):
    """Return the bits of each stored result, in order, where `layers` belong to a set of 4 bits and others have 8."""
    layer = {"layer": function} if isinstance(function, nn.Module) else {}
    net = model_of(lambda m, x: (m.layer if layer else function)(x), **layer)
    result = quantized(net, torch.randn(2, 4, 8, 8), chip(layers))
    results = (o for n in result.graph.nodes for o in n.outputs)
    return [result.plan[o].grid.bits for o in results if result.plan.quantized(o)]


@pytest.mark.parametrize(
    ("layer", "filtered", "bits"),
    [
        (nn.Hardtanh(0.0, 3.0), LayerFilterParams(nn.Hardtanh, Greater("max_val", 2) & Smaller("min_val", 1)), 4),
        (nn.Hardtanh(), LayerFilterParams(nn.Hardtanh, Greater("max_val", 2)), 8),
        (nn.AvgPool2d(2), LayerFilterParams(nn.AvgPool2d, kernel_size=2), 4),
        (nn.AvgPool2d(2), LayerFilterParams(nn.AvgPool2d, NotEq("kernel_size", 2)), 8),
        (nn.Conv2d(4, 4, 1, bias=False), LayerFilterParams(nn.Conv2d, bias=False), 4),
        (nn.Conv2d(4, 4, 1), LayerFilterParams(nn.Conv2d, bias=False), 8),
    ],
    ids=range(6),
)
def test_attributes_of_layers(layer, filtered, bits):
    assert bits_of_results(layer, filtered)[-1] == bits


@pytest.mark.parametrize(
    ("function", "filtered", "bits"),
    [
        (lambda x: F.avg_pool2d(x, 2), LayerFilterParams(F.avg_pool2d, kernel_size=2), 4),  # positional
        (lambda x: F.avg_pool2d(x, kernel_size=4), LayerFilterParams(F.avg_pool2d, kernel_size=2), 8),
        (lambda x: F.leaky_relu(x), LayerFilterParams(F.leaky_relu, Eq("negative_slope", 0.01)), 4),  # default
        (lambda x: F.hardtanh(x, 0.0, 3.0), LayerFilterParams(F.hardtanh, min_val=0), 4),
        (lambda x: torch.softmax(x, 1), LayerFilterParams(torch.softmax, dim=1), 4),
        (lambda x: F.softmax(x, dim=1), LayerFilterParams(F.softmax, dim=2), 8),
        (lambda x: x.clamp(min=0.0, max=2.0), LayerFilterParams(torch.Tensor.clamp, max=2.0), 4),  # method
        (lambda x: x.clamp(min=0.0, max=3.0), LayerFilterParams(torch.Tensor.clamp, max=2.0), 8),
        (lambda x: torch.add(x, x), torch.add, 4),
        (lambda x: x + x, torch.add, 4),  # operators are the function
        (lambda x: x.mul(x), torch.mul, 4),
        (lambda x: F.gelu(x, approximate="tanh"), LayerFilterParams(F.gelu, approximate="tanh"), 4),
    ],
    ids=range(12),
)
def test_arguments_of_functions_and_methods(function, filtered, bits):
    assert bits_of_results(function, filtered)[-1] == bits


@pytest.mark.parametrize(
    ("function", "filtered", "bits"),
    [
        (lambda x: F.interpolate(x, scale_factor=2), LayerFilterParams(F.interpolate, scale_factor=2), 4),
        (lambda x: F.interpolate(x, scale_factor=3), LayerFilterParams(F.interpolate, scale_factor=2), 8),
        (lambda x: F.interpolate(x, size=(4, 4)), LayerFilterParams(F.interpolate, Eq("size", 4)), 4),
        (lambda x: F.interpolate(x, 4, mode="bilinear"), LayerFilterParams(F.interpolate, mode="bilinear"), 4),
        (lambda x: torch.split(x, 2, 1)[0] + 1, LayerFilterParams(torch.split, split_size_or_sections=2), 4),
        (lambda x: x.view(2, -1, 16), LayerFilterParams(torch.Tensor.view, shape=(2, -1, 16)), 4),
    ],
    ids=range(6),
)
def test_arguments_have_the_names_of_the_function(function, filtered, bits):
    assert bits_of_results(function, filtered)[0] == bits


@pytest.mark.parametrize(("p", "bits"), [({}, 4), ({"p": 2.0}, 4), ({"p": 3.0}, 8)])
def test_every_operator_of_a_composite_function_has_its_arguments(p, bits):
    found = bits_of_results(lambda x: F.normalize(x, dim=1, **p), LayerFilterParams(F.normalize, Eq("p", 2)))
    assert found[-1] == bits
