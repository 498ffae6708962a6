"""Models that take whatever arguments they are given are captured with a free batch, too."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.platform.filters import AttributeFilter
from tests.build import model_of


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, *xs):
        return self.dense(xs[0]) + xs[1]


class Keywords(Positional):
    def forward(self, **named):
        return self.dense(named["x"]) + named["y"]


class Both(Positional):
    def forward(self, x, *, scale=2.0, **named):
        return self.dense(x) * scale + named["y"]


@pytest.mark.parametrize(("model", "named"), [(Positional, False), (Keywords, True), (Both, True)])
def test_open_signatures(model, named):
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    batch = lambda rows: {"x": x[:rows], "y": y[:rows]} if named else (x[:rows], y[:rows])

    network = model().eval()
    result = chipfit.quantize(network, [batch(64)], progress=False)
    assert result.graph.values[result.graph.inputs[0]].shape == (None, 8)
    other = batch(7)
    run = lambda m: m(**other) if named else m(*other)
    assert (run(result.model) - run(network)).abs().max() < 0.2
    assert result.verify([other]).exact


def test_a_tensor_given_twice_is_two_inputs():
    x = torch.randn(3, 4)
    graph = capture(model_of(lambda m, x, y: 2 * x - y), (x, x))
    assert torch.equal(run(graph, [x, 3 * x])[graph.outputs[0]], 2 * x - 3 * x)


SECOND_NAMES = {
    "subtract": "Sub", "multiply": "Mul", "divide": "Div", "true_divide": "Div", "absolute": "Abs", "negative": "Neg",
    "not_equal": "NotEqual", "less": "Less", "less_equal": "LessEqual", "greater": "Greater",
    "greater_equal": "GreaterEqual",
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND_NAMES)
def test_second_names_of_functions_are_the_same_operators(name):
    f, alone = getattr(torch, name), name in ("absolute", "negative")

    class Net(torch.nn.Module):
        def forward(self, x, y):
            y = f(x) if alone else f(x, y)
            return y.to(x.dtype)

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    y[0] = x[0]
    graph = chipfit.capture(Net(), (x, y))
    assert SECOND_NAMES[name] in [n.op for n in graph.nodes]
    assert torch.equal(run(graph, [x, y] if len(graph.inputs) == 2 else [x])[graph.outputs[0]], Net()(x, y))


def test_constants_of_a_chip_are_the_same_under_both_names():
    """imx500 v3_lut quantizes constant operands of arithmetic."""
    chip = chipfit.get_target_platform_capabilities("pytorch", "imx500", "v3_lut")
    c = torch.rand(3, 1, 1) + 0.5

    class Net(torch.nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f, self.c = f, torch.nn.Parameter(c)

        def forward(self, x):
            return self.f(torch.relu(x), self.c)

    x = torch.randn(4, 3, 4, 4)
    for a, b in ((torch.sub, torch.subtract), (torch.mul, torch.multiply), (torch.div, torch.true_divide)):
        one, other = (chipfit.quantize(Net(f).eval(), [x], platform=chip, progress=False).plan for f in (a, b))
        assert [(t.role, t.format) for t in one.tensors.values()] == [
            (t.role, t.format) for t in other.tensors.values()
        ]
        assert one["c"].same_numbers(other["c"])


@pytest.mark.parametrize("names", [("dim", "keepdim"), ("axis", "keepdims")])
def test_filters_find_the_arguments_under_both_names(names):
    class Net(torch.nn.Module):
        def forward(self, x):
            return torch.sum(torch.relu(x), **{names[0]: 1, names[1]: True})

    (n,) = (n for n in chipfit.lint(Net(), torch.randn(2, 3, 4), "ort_cpu").graph.nodes if n.op == "Sum")
    for axis, keep in (("dim", "keepdim"), ("axis", "keepdims")):
        assert AttributeFilter(attr=axis, value=1).match(n.config)
        assert AttributeFilter(attr=keep, value=True).match(n.config)
        assert not AttributeFilter(attr=axis, value=2).match(n.config)
