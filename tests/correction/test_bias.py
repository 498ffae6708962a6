"""Bias correction: the mean that rounding weights takes away comes back."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import Need, collect
from chipfit.correction.bias import correct_bias, move_bias, quantized_linear, with_means
from chipfit.engine.run import run
from chipfit.frameworks.torch.lower import lower
from chipfit.plan.record import Plan
from tests.build import graph_of, node, plan_of, set_layer, stored
from tests.steps import begin, captured


def weights_only(graph, scale: float, bits: int = 4) -> Plan:
    """Every weight on a symmetric grid of this step; nothing else is rounded."""
    names = {n.inputs[1] for n in graph.nodes if len(n.inputs) > 1}
    symmetric = stored(scale, bits=bits, low=1 - 2 ** (bits - 1))
    return plan_of(dict.fromkeys(names, "weight"), **dict.fromkeys(names, symmetric))


def means(graph, x):
    return collect(graph, [[x]], tensors=with_means(graph, {}))


def per_channel_error(graph, reference, plan, x) -> torch.Tensor:
    """Mean difference of the output channels between `graph` with rounded weights and `reference` in float."""
    with torch.no_grad():
        got, want = lower(graph, plan).run_flat([x])[0], run(reference, [x])[reference.outputs[0]]
    return (got - want).mean([k for k in range(want.dim()) if k != 1])


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
    x = torch.full((2, 1, 1), 10.0)
    graph = captured(set_layer(nn.Conv1d(1, 1, 3, padding=1), [0.3, 0.3, 0.3]), x)
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
    want, made = steps.float()[0], (replace(steps, graph=g).quantized(plan)[0] for g in (steps.graph, new))
    before, after = ((y - want).mean((0, 2, 3)).abs().mean() for y in made)
    assert after < 0.35 * before


@pytest.mark.parametrize(
    "layer, weight, bias",
    [
        (nn.Linear(2, 2), [0.3, 1.1, 0.5, 0.3], [-(0.8 - 0.2), -0.4]),
        (nn.Conv2d(2, 2, 1), [0.3, 1.1, 0.5, 0.3], [-(0.8 - 0.2), -0.4]),
        (nn.Conv2d(2, 2, 1, groups=2), [0.3, 1.1], [-0.8, 0.2]),
        (nn.ConvTranspose2d(2, 2, 1), [0.3, 1.1, 0.5, 0.3], [-0.8, 0.4 - 0.4]),
        # every output sees one tap of each input: the mean over the taps counts
        (nn.ConvTranspose2d(2, 1, 2, 2), [0.3, 0.3, 1.1, 1.1, 0.5, 0.5, 0.5, 0.3], [-(0.05 * 4 + 0.05 * 2)]),
    ],
)
def test_the_shift_of_the_outputs_mean_by_hand(layer, weight, bias):
    """At step 0.5, 0.3 gains 0.2, 1.1 loses 0.1, 0.5 stays; the inputs' means are 4 and 2; the bias was 1."""
    x = torch.tensor([[3.0, 1.0], [5.0, 3.0]])
    x = x if isinstance(layer, nn.Linear) else x[:, :, None, None].expand(2, 2, 3, 3).contiguous()
    graph = captured(set_layer(layer, weight, 1.0), x)
    plan = weights_only(graph, 0.5)
    torch.testing.assert_close(per_channel_error(graph, graph, plan, x), -torch.tensor(bias))
    new, (note,) = correct_bias(graph, plan, means(graph, x))
    torch.testing.assert_close(new.weights["bias"], 1 + torch.tensor(bias))
    assert f"by at most {max(map(abs, bias)):.3g}" in note and bool((graph.weights["bias"] == 1).all())
    assert float(per_channel_error(new, graph, plan, x).abs().max()) < 1e-5


# ---------------------------------------------------------------- which biases, and how far


CONV = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
SQUARE = torch.tensor([[0.3, 0.5], [0.5, 0.3]])
WEIGHTS = {"w": SQUARE, "v": SQUARE, "k": SQUARE.view(2, 2, 1, 1), "b": torch.zeros(2), "c": torch.zeros(2)}


def several(*nodes, shape=(None, 2)):
    """Operators over x; weights of 2 by 2 that step 0.5 changes by 0.2 where they are 0.3."""
    return graph_of(*nodes, weights={k: w.clone() for k, w in WEIGHTS.items()}, inputs=["x"], shape=shape)


def test_operators_whose_weights_are_rounded_and_why_a_bias_stays():
    nodes = ["alone = Linear(x, w, c)", "first = Linear(x, w, b)", "second = Linear(x, w, b)", "bare = Linear(x, w, -)"]
    nodes += ["raw = Linear(x, w, c)", "computed = Linear(x, x, c)", "relu = Relu(x)", "float = Linear(x, v, b)"]
    edges = frozenset({("w", "raw"), ("x", "alone")})
    plan = plan_of(w=stored(0.5, bits=4), float_edges=edges)
    shared = "'{}' is read by several operators".format
    whys = {"alone": shared("c"), "first": shared("b"), "second": shared("b"), "bare": "it has none"}
    assert [(n.name, why) for n, why in quantized_linear(several(*nodes), plan)] == [*whys.items()]
    assert [(n.name, why) for n, why in quantized_linear(several(nodes[0], nodes[-1]), plan)] == [("alone", "")]


OPEN = "the size of its input is not known"


@pytest.mark.parametrize(
    "text, shape, why",
    [
        ("y = Conv2D(x, k, b)", (None, 2, 3, 3), ""),
        ("y = Conv2D(x, k, b)", (None, 2, None, 3), OPEN),
        ("y = Conv2D(x, k, b)", (None, 2, 3, None), OPEN),
        ("y = Linear(x, w, b)", (None, None, 2), ""),
    ],
)
def test_an_open_size_of_an_image_leaves_its_bias_and_that_of_a_sequence_does_not_matter(text, shape, why):
    graph = several(node(text, CONV if "Conv" in text else {}), shape=shape)
    assert [found for _, found in quantized_linear(graph, weights_only(graph, 0.5))] == [why]


def test_a_refusal_ends_nothing_and_what_was_corrected_before_is_passed_over():
    graph = several("bare = Linear(x, w, -)", "done = Linear(bare, w, b)", "last = Linear(done, w, c)")
    plan, stats = weights_only(graph, 0.5), means(graph, torch.tensor([[1.0, 5.0]]))
    new, notes = correct_bias(graph, plan, stats, changed={"done"})
    assert notes[0] == "the bias of 'bare' is not corrected: it has none"
    assert notes[1].startswith("corrected the bias of 'last' by at most") and len(notes) == 2
    assert new.weights["b"] is graph.weights["b"] and (new.weights["c"] < 0).all() and new.nodes == graph.nodes
    del stats["done"]
    said = "the bias of 'last' is not corrected: the mean of its input was not collected"
    assert correct_bias(graph, plan, stats)[1][2:] == [said]
    assert correct_bias(graph, plan, {})[1][0] == notes[0]


def test_means_are_asked_for_along_the_axis_of_the_channels():
    graph = several("l = Linear(x, w, b)", node("y = Conv2D(l, k)", CONV), "z = Relu(y)", "u = Linear(v, w, c)")
    needs = with_means(graph, {"x": Need(histogram=True), "z": Need(histogram=True)})
    found = {k: (n.histogram, n.channel_axis) for k, n in needs.items()}
    assert found == {"x": (True, -1), "l": (False, 1), "z": (True, None)}


@pytest.mark.parametrize(
    "by, moves", [(12.7, True), (12.74, True), (12.76, False), (-12.8, True), (-12.84, True), (-12.86, False)]
)
@pytest.mark.parametrize("zero", [0, 20])
def test_a_bias_moves_as_far_as_its_grid_reaches(by, moves, zero):
    """Step 0.1 from -128 to 127: codes behind either end would be cut off. A zero point moves both ends."""
    graph = several("l = Linear(x, w, b)")
    change = torch.tensor([0.0, by - 0.1 * zero])
    note = move_bias(graph, plan_of(b=stored(0.1, zero)), graph.nodes[0], change)
    if moves:
        assert note == f"corrected the bias of 'l' by at most {abs(by - 0.1 * zero):.3g}"
        torch.testing.assert_close(graph.weights["b"], change)
    else:
        assert note == "the bias of 'l' is not corrected: the sum exceeds its 8-bit grid"
        assert graph.weights["b"].tolist() == [0.0, 0.0]
