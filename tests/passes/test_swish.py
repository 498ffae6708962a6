"""A value times its sigmoid becomes SiLU where the chip has a kernel for it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.engine.run import run
from tests.build import model_of, randn

GATES = {
    "sigmoid last": (lambda x: x * torch.sigmoid(x), True),
    "sigmoid first": (lambda x: torch.sigmoid(x) * x, True),
    "a layer": (lambda x: nn.Sigmoid()(x) * x, True),
    "another value": (lambda x: (x + 1) * torch.sigmoid(x), False),
    "read twice": (lambda x: x * torch.sigmoid(x) + torch.sigmoid(x), True),
    "one sigmoid, two readers": (lambda x: (lambda s: x * s + s)(torch.sigmoid(x)), False),
    "of a constant": (lambda x: x * torch.sigmoid(torch.tensor(0.3)), False),
}


def linted(gate, platform):
    torch.manual_seed(0)
    net, x = model_of(lambda m, x: m.b(gate(m.a(x))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 2, 1)), randn(4, 3, 6, 6)
    graph = chipfit.lint(net, x, platform).graph
    with torch.no_grad():
        torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], net(x), rtol=1e-5, atol=1e-5)
    return [n.op for n in graph.nodes]


@pytest.mark.parametrize("name", GATES)
def test_a_value_times_its_sigmoid_is_one_operator_on_a_chip_with_silu(name):
    gate, joins = GATES[name]
    assert ("Swish" in linted(gate, "imx500")) == joins


def test_it_stays_two_operators_where_the_chip_has_kernels_for_them_alone():
    ops = linted(GATES["sigmoid last"][0], "tflite_int8")
    assert ops[1:3] == ["Sigmoid", "Mul"] or set(ops) == {"Conv2D", "Sigmoid", "Mul"}


def test_the_result_is_rounded_once_as_that_of_silu():
    torch.manual_seed(0)
    parts = {"a": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(4, 2, 1)}
    x = randn(16, 3, 6, 6)
    made = [
        chipfit.quantize(model_of(f, **parts), [x], platform="imx500", progress=False).model(x)
        for f in (lambda m, x: m.b(F.silu(m.a(x))), lambda m, x: m.b((lambda y: y * torch.sigmoid(y))(m.a(x))))
    ]
    assert torch.equal(*made)
