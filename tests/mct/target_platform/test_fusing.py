"""Fusing patterns on networks: which operators run as one kernel."""

import pytest
import torch
from torch import nn

from chipfit.linting import lint
from tests.build import model_of, sequential
from tests.mct.target_platform.chips import fusing_chip as chip

F = nn.functional
LAYERS = {"conv": [nn.Conv2d], "relu": [nn.ReLU, torch.relu], "add": [torch.add], "tanh": [nn.Tanh], "fc": [nn.Linear]}


def conv():
    return nn.Conv2d(3, 3, 3, padding=1)


def fused(net, tpc, shape=(2, 3, 8, 8)):
    """Return the operators of every group that the platform fuses."""
    found = lint(net, torch.randn(shape), tpc)
    return [tuple(found.graph.node(n).op for n in g) for g in found.assignment.groups]


def test_a_concatenation_fuses_any_of_its_sets_with_the_nearest_convolution():
    activations = {"tanh": [nn.Tanh], "relu": [nn.ReLU], "sigmoid": [nn.Sigmoid], "swish": [nn.SiLU]}
    net = sequential(conv(), conv(), nn.Tanh(), conv(), nn.ReLU(), conv(), nn.Sigmoid(), conv(), nn.SiLU())
    every = chip(["conv", tuple(activations)], conv=[nn.Conv2d], **activations)
    assert fused(net, every) == [("Conv2D", a) for a in ("Tanh", "Relu", "Sigmoid", "Swish")]
    assert fused(net, chip(["conv", "relu"], conv=[nn.Conv2d], **activations)) == [("Conv2D", "Relu")]


def branches(m, x):
    x = F.silu(m.a(x)) + x
    x = F.silu(m.b(x)) + x
    y = torch.relu(m.c(x))
    z = torch.relu(m.d(y)) + y
    return F.silu(m.fc2(F.silu(m.fc1(torch.sin(m.e(z))))))


def test_fusions_of_a_residual_network():
    layers = {**LAYERS, "swish": [nn.SiLU, F.silu]}
    either = ("relu", "swish")
    tpc = chip(["conv", either], ["conv", "add", either], ["conv", either, "add"], ["fc", either], **layers)
    net = model_of(branches, **{n: conv() for n in "abcde"}, fc1=nn.Linear(8, 8), fc2=nn.Linear(8, 8))
    swish, relu = ("Conv2D", "Swish", "Add"), ("Conv2D", "Relu", "Add")
    assert fused(net, tpc) == [swish, swish, relu[:2], relu, ("Linear", "Swish"), ("Linear", "Swish")]


@pytest.mark.parametrize(
    ("net", "patterns", "groups"),
    [
        (sequential(conv(), nn.ReLU(), nn.ReLU()), [["conv", "relu"], ["relu", "relu"]], [("Conv2D", "Relu")]),
        (model_of(lambda m, x: m.a(x) + m.b(x), a=conv(), b=conv()), [["conv", "add"]], [("Conv2D", "Add")]),
        (
            sequential(conv(), nn.ReLU(), nn.Tanh(), nn.Sigmoid()),
            [["conv", "relu"], ["conv", "relu", "tanh", "add"]],
            [("Conv2D", "Relu")],
        ),
    ],
)
def test_groups_never_overlap(net, patterns, groups):
    assert fused(net, chip(*patterns, **LAYERS)) == groups
