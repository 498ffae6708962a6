"""Biases of zero where the platform can hold them."""

from __future__ import annotations

import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.give_biases import give_biases
from chipfit.platform.load import load
from tests.steps import captured


def test_every_operator_gets_a_bias_of_its_width_and_nothing_changes():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(216, 5, bias=False),
    )
    x = torch.randn(2, 3, 7, 7)
    graph = captured(net, x)
    new, notes = give_biases(graph, load("imx500"))
    assert {k: v.tolist() for k, v in new.weights.items() if k not in graph.weights} == {
        "0.bias": [0.0] * 4,
        "2.bias": [0.0] * 6,
        "4.bias": [0.0] * 5,
    }
    assert {"0.bias", "2.bias", "4.bias"} <= new.trainable and notes == []
    torch.testing.assert_close(*run(graph, [x]).values(), *run(new, [x]).values())
    assert give_biases(new, load("imx500"))[0].nodes == new.nodes
