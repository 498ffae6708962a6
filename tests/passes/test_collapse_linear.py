"""Linear operators in a row become one, where that costs no parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.graph.ir import Node
from chipfit.passes.collapse_linear import collapse_linear
from tests.build import graph_of, model_of, set_layer
from tests.steps import assert_same, captured


def collapsed(model, x):
    """Return the collapsed graph and its notes; it computes what it did."""
    graph = captured(model, x)
    new, notes = collapse_linear(graph)
    assert_same(graph, new, x)
    return new, notes


@pytest.mark.parametrize(
    "row, shape, weight",
    [
        ([nn.Conv2d(4, 16, 3, 2, 1), nn.Conv2d(16, 6, 1)], (4, 9, 9), (6, 4, 3, 3)),  # 216 parameters, not 576 + 96
        ([nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)], (8,), (4, 8)),
    ],
)
def test_a_layer_takes_in_the_linear_ones_behind_it(row, shape, weight):
    new, notes = collapsed(nn.Sequential(*row), torch.randn(2, *shape))
    (node,) = new.nodes
    assert new.shape(node.inputs[1]) == weight
    assert len(notes) == len(row) - 1 and notes[0] == "collapsed '1' into '0'"


def test_the_product_of_two_weights_on_paper():
    first, second = set_layer(nn.Linear(1, 2), [2.0, 3.0], [1.0, -1.0]), set_layer(nn.Linear(2, 1), [10.0, 100.0], 7.0)
    new, _ = collapse_linear(captured(nn.Sequential(first, second), torch.randn(2, 1)))
    (node,) = new.nodes
    assert new.weights[node.inputs[1]].tolist() == [[320.0]]  # 10 * 2 + 100 * 3
    assert new.weights[node.inputs[2]].tolist() == [-83.0]  # 10 - 100 + 7


def test_two_layers_without_a_bias_become_one_without():
    new, _ = collapsed(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)), torch.randn(2, 8))
    assert [len(n.inputs) for n in new.nodes] == [2]


@pytest.mark.parametrize("second", [nn.Conv2d(8, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 1))])
def test_larger_kernels_and_activations_between_make_no_pair(second):
    new, notes = collapsed(nn.Sequential(nn.Conv2d(4, 8, 3), second), torch.randn(2, 4, 5, 5))
    assert len(new.nodes) > 1 and notes == []


def test_what_else_is_read_is_not_collapsed():
    net = model_of(lambda m, x: (y := m.a(x), m.b(y)), a=nn.Conv2d(4, 8, 3), b=nn.Conv2d(8, 4, 1))
    assert len(collapsed(net, torch.randn(2, 4, 5, 5))[0].nodes) == 2


# ---------------------------------------------------------------- pairs of a few nodes

ONE = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}


def pair_of(first, second, shapes, *, weights, outputs="z"):
    """Return x -> first -> y -> second -> z; each is (operator, inputs, attributes)."""
    nodes = [Node(n, op, tuple(ins), (v,), attrs) for n, v, (op, ins, attrs) in (("a", "y", first), ("b", "z", second))]
    return graph_of(*nodes, inputs=["x"], outputs=list(outputs), shapes=dict(zip("xyz", shapes)), weights=weights)


IMAGES = (None, 3, 6, 7), (None, 4, 6, 7), (None, 4, 6, 7)


@pytest.mark.parametrize(
    "ins, constant, bias, taken",
    [
        ("yc", torch.randn(4, 1, 1), True, True),
        ("cy", torch.randn(1, 4, 1, 1), False, True),
        ("yc", torch.randn(1, 1), False, True),
        ("yc", torch.randn(7), True, False),  # along the last axis
        ("yc", torch.randn(2, 4, 1, 1), True, False),
        ("yc", torch.randn(1, 1, 4, 1, 1), True, False),  # of more axes than the images
        ("yc", torch.ones(4, 1, 1, dtype=torch.int64), True, False),
        ("yy", torch.randn(4, 1, 1), True, False),
        ("yx", torch.randn(4, 1, 1), True, False),
    ],
)
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
def test_a_constant_for_each_channel_of_images_joins_the_bias(op, ins, constant, bias, taken):
    weights = {"a.weight": torch.randn(4, 3, 1, 1), "c": constant} | ({"a.bias": torch.randn(4)} if bias else {})
    conv = ("Conv2D", ["x", "a.weight", *(["a.bias"] if bias else [])], ONE)
    shapes = IMAGES if ins != "yx" else ((None, 4, 6, 7), *IMAGES[1:])
    weights["a.weight"] = torch.randn(4, 4, 1, 1) if ins == "yx" else weights["a.weight"]
    graph = pair_of(conv, (op, ins, {}), shapes, weights=weights)
    new, _ = collapse_linear(graph)
    taken = taken and op != "Mul" and (op, ins[0]) != ("Sub", "c")
    assert len(new.nodes) == (1 if taken else 2)
    if taken:
        assert new.nodes[0].inputs[2] == "a.bias" and new.nodes[0].output == "z" and "y" not in new.values
        assert_same(graph, new, torch.randn(2, *shapes[0][1:]))


@pytest.mark.parametrize("shape, taken", [((4,), True), ((1, 1, 4), True), ((5, 1), False), ((1,), True)])
def test_a_constant_for_each_number_of_a_linear_layer_joins_the_bias(shape, taken):
    weights = {"a.weight": torch.randn(4, 3), "c": torch.randn(shape)}
    shapes = (None, 5, 3), (None, 5, 4), (None, 5, 4)
    graph = pair_of(("Linear", ["x", "a.weight"], {}), ("Add", "cy", {}), shapes, weights=weights)
    new, _ = collapse_linear(graph)
    assert len(new.nodes) == (1 if taken else 2)
    assert_same(graph, new, torch.randn(2, 5, 3))


def test_a_constant_of_an_operator_whose_weight_is_shared_or_whose_result_is_returned_stays():
    weights = {"a.weight": torch.randn(4, 3, 1, 1), "c": torch.randn(4, 1, 1)}
    args = (("Conv2D", ["x", "a.weight"], ONE), ("Add", "yc", {}), IMAGES)
    assert len(collapse_linear(pair_of(*args, weights=weights, outputs="yz"))[0].nodes) == 2
    assert len(collapse_linear(pair_of(*args, weights=weights, outputs=["z", "a.weight"]))[0].nodes) == 2
    assert len(collapse_linear(pair_of(*args, weights=weights))[0].nodes) == 1


@pytest.mark.parametrize(
    "first, second, change, why",
    [
        ((4, 3, 2, 3), (4, 4, 1, 1), {"stride": (1, 2)}, "the second has stride or padding"),
        ((4, 3, 2, 3), (4, 4, 1, 1), {"padding": ((0, 0), (0, 1))}, "the second has stride or padding"),
        ((4, 3, 2, 3), (4, 2, 1, 1), {"groups": 2}, "one of them has groups"),
        ((4, 3, 2, 3), (4, 4, 1, 1), {"dilation": (2, 2)}, None),  # of one position
        ((4, 3, 2, 3), (4, 4, 1, 2), {}, ""),
        ((2, 3, 1, 1), (7, 2, 1, 1), {}, "21 parameters instead of 20"),
        ((2, 3, 1, 1), (6, 2, 1, 1), {}, None),  # as many as before
    ],
)
def test_which_pairs_of_convolutions_are_one(first, second, change, why):
    weights = {"v": torch.randn(first), "w": torch.randn(second)}
    images = torch.randn(2, 3, 6, 7)
    middle = F.conv2d(images, weights["v"])
    last = F.conv2d(middle, weights["w"], None, 1, 0, 1, change.get("groups", 1))
    shapes = [(None, *v.shape[1:]) for v in (images, middle, last)]
    graph = pair_of(("Conv2D", "xv", ONE), ("Conv2D", "yw", {**ONE, **change}), shapes, weights=weights)
    new, notes = collapse_linear(graph)
    assert len(new.nodes) == (1 if why is None else 2)
    if why is None:
        assert_same(graph, new, images)
    else:
        assert notes == ([f"'a' and 'b' do not collapse: {why}"] if why else [])


def test_a_first_convolution_of_groups_stays_and_other_kinds_are_no_pair():
    weights = {"v": torch.randn(4, 2, 1, 1), "w": torch.randn(4, 4, 1, 1)}
    shapes = [(None, 4, 6, 7)] * 3
    grouped = ("Conv2D", "xv", {**ONE, "groups": 2})
    new, notes = collapse_linear(pair_of(grouped, ("Conv2D", "yw", ONE), shapes, weights=weights))
    assert len(new.nodes) == 2 and notes == ["'a' and 'b' do not collapse: one of them has groups"]
    for kind in ("TransposeConv2D", "DepthwiseConv2D"):
        weights = {"v": torch.randn(4, 4, 1, 1), "w": torch.randn(4, 1 if kind[0] == "D" else 4, 1, 1)}
        how = {**ONE, "groups": 4 if kind[0] == "D" else 1}
        how |= {"output_padding": (0, 0)} if kind[0] == "T" else {}
        new, notes = collapse_linear(pair_of(("Conv2D", "xv", ONE), (kind, "yw", how), shapes, weights=weights))
        assert len(new.nodes) == 2 and notes == []
    weights = {"v": torch.randn(4, 4), "w": torch.randn(4, 4)}
    two = [(None, 4)] * 3
    for second in (("MatMul", "yw", {}), ("Linear", "wy", {}), ("Linear", ["x", "w", "y"], {})):
        assert collapse_linear(pair_of(("Linear", "xv", {}), second, two, weights=weights))[1] == []
    new, _ = collapse_linear(pair_of(("Linear", "xv", {}), ("Linear", "yw", {}), two, weights=weights))
    torch.testing.assert_close(new.weights["v"], weights["w"] @ weights["v"])


def test_what_is_no_pair_or_refused_keeps_no_other_from_it():
    rows = nn.Linear(3, 1), nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1)
    _, notes = collapsed(nn.Sequential(nn.ReLU(), *rows), torch.randn(2, 3))
    assert notes == ["'1' and '2' do not collapse: 9 parameters instead of 6", "collapsed '5' into '4'"]
