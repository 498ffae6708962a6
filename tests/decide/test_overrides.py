"""Overrides: which layers a user means, and what may be said about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chipfit.decide.overrides import match_layers, resolve_overrides
from chipfit.errors import PlanError, UnknownNameError
from chipfit.graph.ir import Graph, Node


def _node(name, op, layer, kind):
    return Node(name, op, (), (name,), {}, layer, kind)


GRAPH = Graph(
    [
        _node("conv2d", "Conv2D", "stem.conv", "Conv2d"),
        _node("conv2d_1", "Conv2D", "blocks.0.conv", "Conv2d"),
        _node("relu", "Relu", "blocks.0.act", "ReLU"),
        _node("conv2d_2", "Conv2D", "blocks.10.conv", "Conv2d"),
        _node("linear", "Linear", "head", "Linear"),
    ],
    [],
    [],
    {},
    {},
)


@pytest.mark.parametrize(
    ("pattern", "nodes"),
    [
        ("head", ["linear"]),
        ("conv2d_1", ["conv2d_1"]),
        ("blocks.0", ["conv2d_1", "relu"]),
        ("blocks.1", None),  # not blocks.10
        ("blocks.*.conv", ["conv2d_1", "conv2d_2"]),
        ("Conv2D", ["conv2d", "conv2d_1", "conv2d_2"]),
        ("ReLU", ["relu"]),
    ],
)
def test_a_pattern_means_a_layer_a_path_a_glob_an_operator_or_a_type(pattern, nodes):
    if nodes is None:
        with pytest.raises(UnknownNameError):
            match_layers(GRAPH, pattern)
    else:
        assert [n.name for n in match_layers(GRAPH, pattern)] == nodes


def test_an_unknown_layer_lists_near_names():
    with pytest.raises(UnknownNameError, match=r"named 'stem\.cnv'.*did you mean 'stem\.conv'"):
        match_layers(GRAPH, "stem.cnv")


def test_a_later_override_wins_and_bits_add_up():
    said = resolve_overrides(GRAPH, {"Conv2D": {"bits": 4, "activation_bits": 16}, "stem": {"bits": 8}})
    assert said["conv2d"] == {"bits": 8, "activation_bits": 16}
    assert said["conv2d_1"] == {"bits": 4, "activation_bits": 16}


def test_float_carries_its_reason():
    assert "'head'" in resolve_overrides(GRAPH, {"head": "float"})["linear"]["float"]


@pytest.mark.parametrize("wrong", ["int8", 4, {}, {"bit": 4}, {"bits": "4"}, None])
def test_anything_else_is_refused_with_what_is_allowed(wrong):
    with pytest.raises(PlanError, match=r"not understood.*Allowed"):
        resolve_overrides(GRAPH, {"head": wrong})


@pytest.mark.parametrize("overrides", [[("head", "float", "besides")], [("head",)], ["ab"], "ab", 3, {"head", "relu"}])
def test_what_is_neither_a_table_nor_pairs_is_refused(overrides):
    with pytest.raises(PlanError, match="The overrides are not understood"):
        resolve_overrides(GRAPH, overrides)


def test_pairs_may_be_lists():
    assert resolve_overrides(GRAPH, [["head", {"bits": 4}]]) == {"linear": {"bits": 4}}


@pytest.mark.parametrize("key", [Path("x"), re.compile("conv")])
def test_a_key_whose_match_is_about_something_else_is_refused(key):
    with pytest.raises(PlanError, match="key of an override"):
        resolve_overrides(GRAPH, {key: "float"})
