"""Linear operators under one view, and how many multiplications operators need, worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Node, Value
from chipfit.graph.linear import (
    bias_or_zero,
    channel_axis,
    from_groups,
    in_groups,
    is_depthwise,
    is_linear,
    multiplications,
    on_axis_1,
    out_channels,
    places,
    scale_inputs,
    scale_outputs,
    with_bias,
)
from tests.build import model_of

#: attention of two heads, five queries and six keys of four numbers
HEADS = [(2, 5, 4), (2, 6, 4)]
CASES = {
    "grouped": (nn.Conv2d(4, 6, 3, 2, 1, groups=2), [(4, 8, 8)], {"Conv2D": 4 * 6 / 2 * 9 * 16}),
    "transposed": (nn.ConvTranspose2d(4, 6, 2, 2), [(4, 3, 3)], {"TransposeConv2D": 4 * 6 * 4 * 9}),
    "linear": (nn.Linear(7, 5), [(6, 7)], {"Linear": 7 * 5 * 6}),
    "recurrent": (model_of(lambda m, x: m.l(x)[0], l=nn.LSTM(3, 4, batch_first=True)), [(5, 3)], {"LSTM": 5 * 16 * 7}),
    "products": (model_of(lambda m, q, k: (q @ k.mT).softmax(-1) @ k), HEADS, {"MatMul": 240 + 240}),
    "attention": (model_of(lambda m, q, k: F.scaled_dot_product_attention(q, k, k)), HEADS, {"SDPA": 480}),
    "others": (nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)), [(4, 8, 8)], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_multiplications_of_one_sample(name):
    model, shapes, expected = CASES[name]
    graph = capture(model.eval(), tuple(torch.randn(3, *s) for s in shapes))
    found: dict[str, float] = {}
    for n in graph.nodes:
        if multiplications(graph, n):
            found[n.op] = found.get(n.op, 0) + multiplications(graph, n)
    assert found == expected


#: operator, groups, shape of the weight -> outputs, and the channels that each reads, in order
GROUPED = [
    ("Linear", None, (5, 3), (1, 5, 3)),
    ("Conv2D", 1, (5, 3, 2, 4), (1, 5, 3, 2, 4)),
    ("Conv2D", 2, (6, 3, 2, 4), (2, 3, 3, 2, 4)),
    ("DepthwiseConv2D", 3, (6, 1, 2, 4), (3, 2, 1, 2, 4)),
    ("TransposeConv2D", 2, (6, 3, 2, 4), (2, 3, 3, 2, 4)),
    ("TransposeConv2D", 2, (4, 5, 2, 3), (2, 5, 2, 2, 3)),
    ("TransposeConv2D", 1, (3, 5, 2, 4), (1, 5, 3, 2, 4)),
]
X, Y, W = Value("x", (None, 6, 4)), Value("y", (None, 6, 4)), "layer.weight"


def one(op, groups, shape, *, bias=None, outputs=("y",)):
    """A graph of one linear operator, and the node."""
    weights = {W: torch.arange(1.0, math.prod(shape) + 1).reshape(shape)}
    if bias is not None:
        weights["b"] = bias
    node = Node("n", op, ("x", W, *(["b"] if bias is not None else [])), ("y",), {"groups": groups} if groups else {})
    return Graph([node], ["x"], list(outputs), {"x": X, "y": Y}, weights), node


@pytest.mark.parametrize("op, groups, shape, seen", GROUPED)
def test_weights_in_groups(op, groups, shape, seen):
    graph, node = one(op, groups, shape)
    w = graph.weights[W]
    assert tuple(in_groups(node, w).shape) == seen and torch.equal(from_groups(node, in_groups(node, w)), w)
    assert out_channels(node, w) == seen[0] * seen[1]
    assert is_depthwise(graph, node) == (seen[0] > 1 and seen[2] == 1)
    zero = bias_or_zero(graph, node)
    assert zero.tolist() == [0.0] * (seen[0] * seen[1]) and zero.dtype == torch.float64


@pytest.mark.parametrize("op, groups, shape, seen", GROUPED)
def test_scaled_weights_scale_what_torch_computes(op, groups, shape, seen):
    graph, node = one(op, groups, shape)
    w, g = graph.weights[W].double(), groups or 1
    conv = {"Linear": lambda x, w: F.linear(x, w), "TransposeConv2D": lambda x, w: F.conv_transpose2d(x, w, groups=g)}
    compute = conv.get(op, lambda x, w: F.conv2d(x, w, groups=g))
    o, i = seen[0] * seen[1], seen[0] * seen[2]
    x = torch.randn(2, i, *([5, 7] if len(seen) > 3 else []), dtype=torch.float64)
    k_out, k_in = torch.arange(2.0, 2 + o).double(), torch.arange(3.0, 3 + i).double()

    def by(k, x):
        return x * k.view(1, -1, *[1] * (x.dim() - 2))

    torch.testing.assert_close(compute(x, scale_outputs(node, w, k_out)), by(k_out, compute(x, w)))
    torch.testing.assert_close(compute(x, scale_inputs(node, w, k_in)), compute(by(k_in, x), w))


def test_depthwise_is_of_several_groups_and_a_constant_weight():
    graph, node = one("Conv2D", 1, (4, 1, 3, 3))
    assert not is_depthwise(graph, node)
    graph, node = one("Conv2D", 2, (4, 1, 3, 3))
    assert is_depthwise(graph, node)
    del graph.weights[W]
    assert not is_depthwise(graph, node) and not is_linear(graph, node)


def test_a_bias_that_is_computed_makes_no_linear_operator():
    graph, node = one("Linear", None, (5, 3))
    assert is_linear(graph, node.with_(inputs=("x", W, None)))
    assert not is_linear(graph, node.with_(inputs=("x", W, "x")))
    assert not is_linear(graph, node.with_(op="MatMul"))


def test_where_channels_are():
    (_, linear), (graph, conv) = one("Linear", None, (5, 4)), one("Conv1D", 1, (5, 6, 1))
    assert (channel_axis(linear), channel_axis(conv)) == (-1, 1)
    assert not on_axis_1(graph, linear) and on_axis_1(graph, conv)
    graph.values["x"] = Value("x", (None, 4))
    assert on_axis_1(graph, linear) and on_axis_1(graph, conv)


@pytest.mark.parametrize(
    "weight, name",
    [
        ("layer.weight", "layer.bias"),
        ("kernel", "bias"),
        ("layer.weight_1", "layer.bias_1"),
        ("layer.w", "layer.w_bias"),
    ],
)
def test_a_new_bias_has_the_name_of_its_layer_and_the_type_of_its_weight(weight, name):
    graph, node = one("Linear", None, (2, 3))
    graph.weights[weight] = graph.weights.pop(W)
    new = with_bias(graph, node.with_(inputs=("x", weight)), torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert new.inputs == ("x", weight, name) and graph.weights[name].dtype == torch.float32
    assert graph.weights[name].tolist() == [1.0, 2.0] and graph.trainable == set()
    graph.trainable.add(weight)
    again = with_bias(graph, new, torch.tensor([3.0, 4.0], requires_grad=True))
    assert again.inputs == new.inputs and graph.weights[name].tolist() == [3.0, 4.0]
    assert graph.trainable == {weight, name} and not graph.weights[name].requires_grad
    assert bias_or_zero(graph, again).tolist() == [3.0, 4.0] and bias_or_zero(graph, again).dtype == torch.float64


@pytest.mark.parametrize(
    "op, shape, count",
    [
        ("Conv2D", (None, 5, 3, 4), 12),
        ("Conv2D", (2, 5, None, 4), 4),
        ("Linear", (None, 5), 1),
        ("Linear", (7, 2, 3, 5), 6),
        ("Linear", (7, None, 3, 5), 3),
    ],
)
def test_positions_of_one_sample(op, shape, count):
    assert places(Node("n", op, ("x", "w"), ("y",)), shape) == count


@pytest.mark.parametrize(
    "op, shapes, count",
    [  # [.., 3, 4] x [.., 4, 5]: each of 2 x 3 x 5 sums has 4 products
        ("MatMul", {"x": (None, 2, 3, 4), "z": (None, 2, 4, 5), "y": (None, 2, 3, 5)}, 2 * 3 * 5 * 4),
        ("MatMul", {"x": (None, 2, 3, None), "z": (None, 2, None, 5), "y": (None, 2, 3, 5)}, 2 * 3 * 5),
        # three queries and seven keys of 4, values of 5: scores, and what they weigh
        ("SDPA", {"x": (None, 2, 3, 4), "z": (None, 2, 7, 4), "y": (None, 2, 3, 5)}, 2 * 3 * 7 * 4 + 2 * 3 * 7 * 5),
        ("SDPA", {"x": (None, 2, 3, 4), "z": (None, 2, None, 4), "y": (None, 2, 3, 5)}, 2 * 3 * 4 + 2 * 3 * 5),
        ("Relu", {"x": (None, 4), "z": (), "y": (None, 4)}, 0),
    ],
)
def test_multiplications_of_two_values(op, shapes, count):
    node = Node("n", op, ("x", "z"), ("y",))
    graph = Graph([node], ["x", "z"], ["y"], {k: Value(k, s) for k, s in shapes.items()}, {})
    assert multiplications(graph, node) == count


def test_multiplications_of_features_and_of_their_last_steps():
    """8 filters of 3 numbers, each over 4 steps, whether the state is a constant or an input."""
    weights = {"w": torch.ones(8, 3), "w_time": torch.ones(8, 4)}
    node = Node("n", "SVDF", ("x", "w", "w_time", None, "state"), ("y",), {"rank": 2})
    values = {k: Value(k, (None, 3)) for k in ("x", "state", "y")}
    for more in ({}, {"state": torch.zeros(1, 32)}):
        graph = Graph([node], ["x"], ["y"], values, weights | more)
        assert multiplications(graph, node) == 8 * 3 + 8 * 4


class ConstantInput(nn.Module):
    """A transposed convolution of a constant, added to the input."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 1)
        self.constant = torch.arange(64.0).reshape(1, 4, 4, 4)

    def forward(self, x):
        return x + self.up(self.constant)


def test_an_operator_on_a_constant_has_its_products():
    """16 weights at each of 16 positions."""
    captured = capture(ConstantInput().eval(), torch.randn(1, 4, 4, 4))
    (up,) = (n for n in captured.nodes if is_linear(captured, n))
    assert captured.is_weight(up.data) and multiplications(captured, up) == 256
