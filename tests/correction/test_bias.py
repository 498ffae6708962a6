"""Bias correction: the mean that rounding weights takes away comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import Need, collect
from chipfit.correction.bias import correct_bias, move_bias, quantized_linear, with_means
from chipfit.engine.run import run
from chipfit.frameworks.torch.lower import lower
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from tests.steps import begin, captured


def weights_only(graph, scale: float, bits: int = 4) -> Plan:
    """Every weight on a symmetric grid of this step; nothing else is rounded."""
    zero, grid = torch.tensor(0, dtype=torch.int32), Grid(bits=bits, qmin=1 - 2 ** (bits - 1), qmax=2 ** (bits - 1) - 1)
    names = {n.inputs[1] for n in graph.nodes if len(n.inputs) > 1}
    stored = Stored(format="", grid=grid, scale=torch.tensor(scale), zero_point=zero)
    return Plan(tensors={w: TensorPlan(name=w, role="weight", stored=stored) for w in names})


def means(graph, x):
    return collect(graph, [[x]], tensors=with_means(graph, {}))


def per_channel_error(graph, reference, plan, x) -> torch.Tensor:
    """Mean difference of the output channels between `graph` with rounded weights and `reference` in float."""
    with torch.no_grad():
        got, want = lower(graph, plan).run_flat([x])[0], run(reference, [x])[reference.outputs[0]]
    return (got - want).mean([k for k in range(want.dim()) if k != 1])


def test_the_correction_on_paper():
    """Q(0.3) = 0.5, Q(1.1) = 1.0 at step 0.5: the error 0.2 * 4 - 0.1 * 2 = 0.6 leaves the bias."""
    linear = nn.Linear(2, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.3, 1.1]]))
        linear.bias.copy_(torch.tensor([1.0]))
    graph = captured(linear, torch.randn(2, 2))
    x = torch.tensor([[3.0, 1.0], [5.0, 3.0]])  # means 4 and 2
    new, notes = correct_bias(graph, weights_only(graph, 0.5), means(graph, x))
    assert float(new.weights["bias"]) == pytest.approx(0.4)
    assert float(graph.weights["bias"]) == 1.0
    assert len(notes) == 1 and "by at most 0.6" in notes[0]


LAYERS = {
    "conv": lambda: nn.Conv2d(6, 8, 3),
    "grouped": lambda: nn.Conv2d(6, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "strided, dilated": lambda: nn.Conv2d(6, 4, 3, 2, dilation=2),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 2, 2),
    "transposed in groups": lambda: nn.ConvTranspose2d(6, 4, 3, 2, groups=2),
    "conv1d": lambda: nn.Conv1d(6, 8, 3),
    "linear": lambda: nn.Linear(6, 5),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bits", [3, 4])
def test_the_mean_error_of_every_channel_vanishes(name, bits):
    layer = LAYERS[name]()
    size = {nn.Linear: (), nn.Conv1d: (9,)}.get(type(layer), (9, 9))
    x = torch.randn(64, 6, *size) + torch.arange(6.0).view(1, 6, *[1] * len(size))
    graph = captured(layer, x)
    plan = weights_only(graph, float(graph.weights["weight"].abs().max()) / (2 ** (bits - 1) - 1), bits)
    new, _ = correct_bias(graph, plan, means(graph, x))
    before, after = (per_channel_error(g, graph, plan, x).abs().max() for g in (graph, new))
    assert before > 0.03
    assert after < before * 0.1  # an image's border has other means than its middle; everything else is exact


def test_zero_padding_counts():
    """Two thirds of a 3-tap kernel on 1 pixel are padding: only the middle tap's error reaches the output."""
    conv = nn.Conv1d(1, 1, 3, padding=1, bias=True)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[0.3, 0.3, 0.3]]]))
        conv.bias.zero_()
    x = torch.full((2, 1, 1), 10.0)
    graph = captured(conv, x)
    new, _ = correct_bias(graph, weights_only(graph, 0.5), means(graph, x))
    assert float(new.weights["bias"]) == pytest.approx(-2.0)  # -(0.5 - 0.3) * 10, not three times that


def test_images_of_several_batches_give_one_mean():
    graph = captured(nn.Conv2d(3, 2, 1), torch.randn(2, 3, 4, 4))
    a, b = torch.randn(2, 3, 4, 4), torch.randn(6, 3, 4, 4) + 3
    stats = collect(graph, [[a], [b]], tensors=with_means(graph, {}))
    torch.testing.assert_close(stats[graph.inputs[0]].mean.float(), torch.cat([a, b]).mean((0, 2, 3)))


def test_a_whole_network_gets_closer_to_float():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(), nn.Conv2d(16, 8, 1))
    steps = begin(net, torch.randn(32, 3, 10, 10) + 0.5, "imx500", bits=2)
    plan = steps.plan()
    new, notes = correct_bias(steps.graph, plan, steps.stats)
    assert len(notes) == 3
    want = steps.float()[0]
    errors = [
        (replace(steps, graph=g).quantized(plan)[0] - want).mean((0, 2, 3)).abs().mean() for g in (steps.graph, new)
    ]
    assert errors[1] < 0.35 * errors[0]


def test_what_cannot_be_corrected_says_why():
    graph = captured(nn.Conv2d(3, 2, 1, bias=False), torch.randn(2, 3, 4, 4))
    new, notes = correct_bias(graph, weights_only(graph, 0.5), means(graph, torch.randn(2, 3, 4, 4)))
    assert new.nodes == graph.nodes and "it has none" in notes[0]
    graph = captured(nn.Conv2d(3, 2, 1), torch.randn(2, 3, 4, 4))
    assert "was not collected" in correct_bias(graph, weights_only(graph, 0.5), {})[1][0]


def test_a_bias_that_its_grid_would_clip_stays():
    graph = captured(nn.Linear(2, 1), torch.randn(2, 2))
    plan = weights_only(graph, 100.0)  # every weight becomes 0
    narrow = TensorPlan(
        name="bias",
        role="bias",
        stored=Stored(
            format="",
            grid=Grid(bits=8, qmin=-128, qmax=127),
            scale=torch.tensor(0.01),
            zero_point=torch.tensor(0, dtype=torch.int32),
        ),
    )
    plan = replace(plan, tensors={**plan.tensors, "bias": narrow})
    x = torch.tensor([[100.0, 100.0]]) * graph.weights["weight"].sign()
    new, notes = correct_bias(graph, plan, means(graph, x))
    assert "exceeds its 8-bit grid" in notes[0] and torch.equal(new.weights["bias"], graph.weights["bias"])


#: layer, its weights, the bias that undoes the shift of the output's mean. Step 0.5: 0.3 gains 0.2, 1.1 loses 0.1,
#: 0.5 stays; the inputs' means are 4 and 2
KEPT_BY_USER = {
    "matrix": (lambda: nn.Linear(2, 2), [0.3, 1.1, 0.5, 0.3], [-(0.8 - 0.2), -0.4]),
    "conv": (lambda: nn.Conv2d(2, 2, 1), [0.3, 1.1, 0.5, 0.3], [-(0.8 - 0.2), -0.4]),
    "groups": (lambda: nn.Conv2d(2, 2, 1, groups=2), [0.3, 1.1], [-0.8, 0.2]),
    "transposed": (lambda: nn.ConvTranspose2d(2, 2, 1), [0.3, 1.1, 0.5, 0.3], [-0.8, 0.4 - 0.4]),
    # every output sees one tap of each input: the mean over the taps counts
    "upsampling": (
        lambda: nn.ConvTranspose2d(2, 1, 2, 2),
        [0.3, 0.3, 1.1, 1.1, 0.5, 0.5, 0.5, 0.3],
        [-(0.05 * 4 + 0.05 * 2)],
    ),
}


@pytest.mark.parametrize("name", KEPT_BY_USER)
def test_the_shift_of_the_outputs_mean_by_hand(name):
    make, weight, bias = KEPT_BY_USER[name]
    layer = make()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight).view_as(layer.weight))
        layer.bias.zero_()
    x = torch.tensor([[3.0, 1.0], [5.0, 3.0]])
    x = x if name == "matrix" else x[:, :, None, None].expand(2, 2, 3, 3).contiguous()
    graph = captured(layer, x)
    plan = weights_only(graph, 0.5)
    torch.testing.assert_close(per_channel_error(graph, graph, plan, x), -torch.tensor(bias))
    new, _ = correct_bias(graph, plan, means(graph, x))
    torch.testing.assert_close(new.weights["bias"], torch.tensor(bias))
    assert float(per_channel_error(new, graph, plan, x).abs().max()) < 1e-5


# ---------------------------------------------------------------- which biases, and how far


def linear(name: str, data: str, bias: str | None = "b", weight: str = "w") -> Node:
    return Node(name, "Linear", (data, weight, bias), (f"{name}'",))


def several(*nodes: Node, shape: tuple[int | None, ...] = (None, 2)) -> Graph:
    """Operators over x; weights of 2 by 2 that step 0.5 changes by 0.2 where they are 0.3."""
    values = {v: Value(v, shape) for v in ("x", *(o for n in nodes for o in n.outputs))}
    square = torch.tensor([[0.3, 0.5], [0.5, 0.3]])
    weights = {"w": square, "v": square.clone(), "k": square.view(2, 2, 1, 1), "b": torch.zeros(2), "c": torch.zeros(2)}
    return Graph(list(nodes), ["x"], [nodes[-1].output], values, weights)


CONV = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}


def test_operators_whose_weights_are_rounded_and_why_a_bias_stays():
    graph = several(
        linear("alone", "x", "c"),
        linear("first", "x"),
        linear("second", "x"),
        linear("bare", "x", None),
        linear("raw", "x", "c", "v"),
        linear("computed", "x", "c", "x"),
        Node("relu", "Relu", ("x",), ("relu'",)),
        linear("float", "x", "b", "v"),
    )
    graph.nodes[4] = graph.nodes[4].with_(inputs=("x", "w", "c"))
    plan = weights_only(several(linear("one", "x")), 0.5)
    plan = replace(plan, float_edges=frozenset({("w", "raw"), ("x", "alone")}))
    shared = "'{}' is read by several operators".format
    assert [(n.name, why) for n, why in quantized_linear(graph, plan)] == [
        ("alone", shared("c")),
        ("first", shared("b")),
        ("second", shared("b")),
        ("bare", "it has none"),
    ]
    graph.nodes = [n for n in graph.nodes if n.name in ("alone", "float")]
    assert [(n.name, why) for n, why in quantized_linear(graph, plan)] == [("alone", "")]


@pytest.mark.parametrize(
    "shape, open_size", [((None, 2, 3, 3), False), ((None, 2, None, 3), True), ((None, 2, 3, None), True)]
)
def test_an_open_size_of_an_image_leaves_its_bias(shape, open_size):
    graph = several(Node("c", "Conv2D", ("x", "k", "b"), ("y",), CONV), shape=shape)
    ((_, why),) = quantized_linear(graph, weights_only(graph, 0.5))
    assert why == ("the size of its input is not known" if open_size else "")


def test_an_open_length_of_a_sequence_does_not_matter_to_a_linear_layer():
    graph = several(linear("l", "x"), shape=(None, None, 2))
    assert [why for _, why in quantized_linear(graph, weights_only(graph, 0.5))] == [""]


def test_a_refusal_ends_nothing_and_what_was_corrected_before_is_passed_over():
    graph = several(linear("bare", "x", None), linear("done", "bare'"), linear("last", "done'", "c"))
    stats = collect(graph, [[torch.tensor([[1.0, 5.0]])]], tensors=with_means(graph, {}))
    new, notes = correct_bias(graph, weights_only(graph, 0.5), stats, changed={"done"})
    assert notes[0] == "the bias of 'bare' is not corrected: it has none"
    assert notes[1].startswith("corrected the bias of 'last' by at most") and len(notes) == 2
    assert new.weights["b"] is graph.weights["b"] and (new.weights["c"] < 0).all()
    del stats["done'"]
    _, notes = correct_bias(graph, weights_only(graph, 0.5), stats)
    assert notes[2] == "the bias of 'last' is not corrected: the mean of its input was not collected"
    _, notes = correct_bias(graph, weights_only(graph, 0.5), {})
    assert notes[0] == "the bias of 'bare' is not corrected: it has none"


def test_means_are_asked_for_along_the_axis_of_the_channels():
    graph = several(linear("l", "x"), Node("c", "Conv2D", ("l'", "k"), ("y",), CONV), Node("r", "Relu", ("y",), ("z",)))
    graph.nodes.append(linear("constant", "v", "c"))
    needs = with_means(graph, {"x": Need(histogram=True), "z": Need(histogram=True)})
    assert {k: (n.histogram, n.channel_axis) for k, n in needs.items()} == {
        "x": (True, -1),
        "l'": (False, 1),
        "z": (True, None),
    }


@pytest.mark.parametrize(
    "by, moves",
    [(12.7, True), (12.74, True), (12.76, False), (-12.8, True), (-12.84, True), (-12.86, False)],
)
@pytest.mark.parametrize("zero", [0, 20])
def test_a_bias_moves_as_far_as_its_grid_reaches(by, moves, zero):
    """Step 0.1 from -128 to 127: codes behind either end would be cut off. A zero point moves both ends."""
    graph = several(linear("l", "x"))
    grid = Grid(bits=8, qmin=-128, qmax=127)
    stored = Stored(format="", grid=grid, scale=torch.tensor(0.1), zero_point=torch.tensor(zero, dtype=torch.int32))
    plan = Plan(tensors={"b": TensorPlan(name="b", role="bias", stored=stored)})
    change = torch.tensor([0.0, by - 0.1 * zero])
    note = move_bias(graph, plan, graph.nodes[0], change)
    if moves:
        assert note == f"corrected the bias of 'l' by at most {abs(by - 0.1 * zero):.3g}"
        torch.testing.assert_close(graph.weights["b"], change)
    else:
        assert note == "the bias of 'l' is not corrected: the sum exceeds its 8-bit grid"
        assert graph.weights["b"].tolist() == [0.0, 0.0]
