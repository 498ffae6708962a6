"""Filters on attributes of layers and calls, and the formats that follow in a plan; Keras: test_keras_layers.py."""

import math

import pytest
import torch
from torch import nn

from chipfit import target_platform as tp
from chipfit.errors import ModelingError
from chipfit.target_platform import Eq, Greater, LayerFilterParams, NotEq, Smaller
from tests.build import model_of, quantized
from tests.mct.target_platform.chips import chip

F = nn.functional


CONV = {"padding_mode": "zeros", "kernel_size": (3, 4)}


@pytest.mark.parametrize(
    ("chosen", "things", "matches"),
    [
        (
            LayerFilterParams(nn.Conv2d, Greater("out_channels", 2), **CONV, out_channels=3),
            [nn.Conv2d(1, 3, (3, 4)), nn.Conv2d(1, 2, (3, 4)), nn.ConvTranspose2d(1, 3, (3, 4))],
            [True, False, False],
        ),
        (
            LayerFilterParams(F.leaky_relu, tp.SmallerEq("negative_slope", 2)),
            [(F.leaky_relu, {"negative_slope": v}) for v in (0.4, 2, 2.1)],
            [True, True, False],
        ),
        (  # defaults of a function count
            LayerFilterParams(F.normalize, Eq("p", 2) | Eq("p", None)),
            [(F.normalize, kw) for kw in ({"p": 2}, {"p": 2.0}, {}, {"p": 3.0})],
            [True, True, True, False],
        ),
        (LayerFilterParams(nn.ReLU, x=None), [nn.ReLU()], [True]),  # a missing attribute is None for a keyword
    ],
    ids=range(4),
)
def test_a_filter_matches_layers_and_calls(chosen, things, matches):
    assert [chosen.match(thing) for thing in things] == matches


def test_filters_are_compared_and_shown_by_their_conditions():
    made = [getattr(tp, name)("n", 2) for name in "Eq NotEq Greater GreaterEq Smaller SmallerEq Contains".split()]
    assert list(map(str, made)) == [f"n {sign} 2" for sign in "= != > >= < <= contains".split()]
    assert LayerFilterParams(nn.ReLU, Eq("a", 1)) != LayerFilterParams(nn.ReLU6, Eq("a", 1))
    assert LayerFilterParams(nn.ReLU) != LayerFilterParams(nn.ReLU, x=1)
    assert repr(Eq("a", 1) & Smaller("b", 2)) == "a = 1 & b < 2"
    assert repr(LayerFilterParams(nn.ReLU, Eq("a", 1), y=3)) == "ReLU(y=3, a = 1)"
    loop: list = [1]
    loop.append(loop)
    text = repr(LayerFilterParams(nn.Conv2d, stride=loop))
    assert "..." in text and text.count("(1,") == 20


@pytest.mark.parametrize("name, value", [("stride", math.nan), ("padding", (1, math.nan)), (3, 1)])
def test_invalid_comparisons_are_refused(name, value):
    with pytest.raises(ModelingError, match="any value except nan"):
        Eq(name, value)
    if isinstance(name, str):
        with pytest.raises(ModelingError, match="any value except nan"):
            LayerFilterParams(nn.Conv2d, **{name: value})
    with pytest.raises(ModelingError, match="filter"):
        LayerFilterParams(nn.ReLU, "inplace")
    with pytest.raises(TypeError):
        Eq("a", 1) | True


# ---------------------------------------------------------------- formats that follow


def bits_of_results(function, *layers):
    """Return the bits of each stored result, in order, where `layers` belong to a set of 4 bits and others have 8."""
    layer = {"layer": function} if isinstance(function, nn.Module) else {}
    net = model_of(lambda m, x: (m.layer if layer else function)(x), **layer)
    result = quantized(net, torch.randn(2, 4, 8, 8), chip(layers))
    results = (o for n in result.graph.nodes for o in n.outputs)
    return [result.plan[o].grid.bits for o in results if result.plan.quantized(o)]


@pytest.mark.parametrize(
    ("function", "filtered", "bits"),
    [
        (nn.Hardtanh(0.0, 3.0), LayerFilterParams(nn.Hardtanh, Greater("max_val", 2) & Smaller("min_val", 1)), 4),
        (nn.Hardtanh(), LayerFilterParams(nn.Hardtanh, Greater("max_val", 2)), 8),
        (nn.AvgPool2d(2), LayerFilterParams(nn.AvgPool2d, NotEq("kernel_size", 2)), 8),
        (nn.Conv2d(4, 4, 1, bias=False), LayerFilterParams(nn.Conv2d, bias=False), 4),
        (nn.Conv2d(4, 4, 1), LayerFilterParams(nn.Conv2d, bias=False), 8),
        (lambda x: F.avg_pool2d(x, 2), LayerFilterParams(F.avg_pool2d, kernel_size=2), 4),  # positional
        (lambda x: F.avg_pool2d(x, kernel_size=4), LayerFilterParams(F.avg_pool2d, kernel_size=2), 8),
        (lambda x: F.leaky_relu(x), LayerFilterParams(F.leaky_relu, Eq("negative_slope", 0.01)), 4),  # default
        (lambda x: x.clamp(min=0.0, max=2.0), LayerFilterParams(torch.Tensor.clamp, max=2.0), 4),  # method
        (lambda x: x.clamp(min=0.0, max=3.0), LayerFilterParams(torch.Tensor.clamp, max=2.0), 8),
        (lambda x: x + x, torch.add, 4),  # operators are the function
        (lambda x: x.mul(x), torch.mul, 4),
        (lambda x: F.gelu(x, approximate="tanh"), LayerFilterParams(F.gelu, approximate="tanh"), 4),
        (lambda x: F.interpolate(x, size=(4, 4)), LayerFilterParams(F.interpolate, Eq("size", 4)), 4),
        (lambda x: F.interpolate(x, 4, mode="bilinear"), LayerFilterParams(F.interpolate, mode="bilinear"), 4),
        (lambda x: F.interpolate(x, scale_factor=3), LayerFilterParams(F.interpolate, scale_factor=2), 8),
        (lambda x: x.view(2, -1, 16), LayerFilterParams(torch.Tensor.view, shape=(2, -1, 16)), 4),
    ],
    ids=range(17),
)
def test_arguments_of_layers_functions_and_methods_decide_the_format(function, filtered, bits):
    assert bits_of_results(function, filtered)[-1] == bits


def test_an_argument_has_the_name_of_the_function():
    filtered = LayerFilterParams(torch.split, split_size_or_sections=2)
    assert bits_of_results(lambda x: torch.split(x, 2, 1)[0] + 1, filtered)[0] == 4


@pytest.mark.parametrize(("p", "bits"), [({}, 4), ({"p": 2.0}, 4), ({"p": 3.0}, 8)])
def test_every_operator_of_a_composite_function_has_its_arguments(p, bits):
    found = bits_of_results(lambda x: F.normalize(x, dim=1, **p), LayerFilterParams(F.normalize, Eq("p", 2)))
    assert found[-1] == bits
