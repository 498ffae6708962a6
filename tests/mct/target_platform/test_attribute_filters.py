"""Filters on attributes of layers and calls; the same filters on Keras layers: test_keras_layers.py."""

from __future__ import annotations

import math

import pytest
from torch import nn

from chipfit import target_platform as tp
from chipfit.errors import ModelingError
from chipfit.target_platform import Eq, LayerFilterParams

F = nn.functional


CONV = {"padding_mode": "zeros", "kernel_size": (3, 4)}


@pytest.mark.parametrize(
    ("chosen", "things", "matches"),
    [
        (
            LayerFilterParams(nn.Conv2d, tp.Greater("out_channels", 2), **CONV, out_channels=3),
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
    assert repr(Eq("a", 1) & tp.Smaller("b", 2)) == "a = 1 & b < 2"
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
