"""Clipped activations get a power of two as their bound."""

import math

import pytest
import torch
from torch import nn

from chipfit.passes.relu_bound import relu_bound
from tests.build import graph_of, model_of, node
from tests.steps import assert_same, captured


def test_relu6_becomes_a_clamp_at_8_and_the_weights_around_it_take_the_factor():
    x = torch.randn(2, 3, 6, 6) * 5
    graph = captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)), x)
    new, notes = relu_bound(graph)
    clip = next(n for n in new.nodes if n.op == "Clamp")
    assert clip.attrs == {"min": 0.0, "max": 8.0}
    assert torch.allclose(new.weights["0.weight"], graph.weights["0.weight"] * 4 / 3)
    assert torch.allclose(new.weights["0.bias"], graph.weights["0.bias"] * 4 / 3)
    assert torch.allclose(new.weights["3.weight"], graph.weights["3.weight"] * 3 / 4)
    assert torch.equal(new.weights["3.bias"], graph.weights["3.bias"])
    assert notes == ["the bound of '1' moved from 6 to 8"]
    assert_same(graph, new, x)


@pytest.mark.parametrize(
    "net, why",
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6()), "an output of the model"),
        (nn.Sequential(nn.ReLU6(), nn.Conv2d(3, 4, 1)), "no linear operator"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Sigmoid(), nn.Conv2d(4, 4, 1)), "Sigmoid"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.ConstantPad2d(1, 0.5), nn.Conv2d(4, 4, 1)), "Pad"),
    ],
)
def test_a_bound_that_cannot_be_undone_behind_stays(net, why):
    new, notes = relu_bound(captured(net, torch.randn(2, 3, 4, 4)))
    assert "Relu6" in {n.op for n in new.nodes} and len(notes) == 1 and why in notes[0]


def clipped(low, high, *, bias=True, shared="", outputs="z"):
    """Return linear -> clip -> linear over three and two numbers; `shared` names what another operator reads too."""
    weights = {"a": torch.ones(2, 3), "c": torch.ones(4, 2), "b": torch.full((2,), 8.0), "d": torch.full((4,), 8.0)}
    first = node(f"y = Linear(x, a{', b' * bias})", name="first")
    clip = node("r = Clamp(y)", {"min": low, "max": high}, name="clip")
    nodes = [first, clip, node("z = Linear(r, c, d)", name="last")]
    others = {"y": "o = Sigmoid(y)", "a": "o = Linear(x, a)", "c": "o = Linear(r, c)"}
    nodes += [others[shared]] if shared else []
    return graph_of(*nodes, outputs=list(outputs), weights=weights)


@pytest.mark.parametrize(
    "low, high, new",
    [
        (0.0, 3.0, (0.0, 4.0)),
        (None, 3.0, (None, 4.0)),
        (-1.5, 3.0, (-2.0, 4.0)),
        (0.0, 4.0, None),
        (0.0, 4.0 * (1 + 1e-12), None),  # as good as a power of two
        (0.0, 4.0 * (1 + 1e-6), (0.0, 8.0)),
        (0.1, 3.0, None),
        (0.0, 0.0, None),
        (-2.0, -1.0, None),
        (0.0, None, None),
        (-1.0, math.inf, None),
    ],
)
def test_the_bound_is_the_next_power_of_two(low, high, new):
    graph = clipped(low, high)
    after, notes = relu_bound(graph)
    if new is None:
        assert after.nodes == graph.nodes and notes == []
        return
    attrs = after.nodes[1].attrs
    assert (attrs["min"], attrs["max"]) == new and len(notes) == 1
    k = new[1] / high
    assert after.weights["a"].flatten().tolist() == pytest.approx([k] * 6)
    assert after.weights["c"].flatten().tolist() == pytest.approx([1 / k] * 8)
    assert after.weights["b"].tolist() == pytest.approx([8 * k] * 2) and after.weights["d"].tolist() == [8.0] * 4
    assert all(bool((w == v).all()) for w, v in zip(graph.weights.values(), (1, 1, 8, 8), strict=True))


@pytest.mark.parametrize(
    "given, why",
    [
        ({"shared": "y"}, "the result of 'first' is also read elsewhere"),
        ({"outputs": "zr"}, "'r' is an output of the model"),
        ({"shared": "a"}, "'a' is read by several operators"),
        ({"shared": "c"}, "'c' is read by several operators"),
        ({"outputs": "zc"}, "'c' is an output of the model"),
        ({"bias": False}, None),
    ],
)
def test_what_others_read_keeps_its_numbers(given, why):
    graph = clipped(0.0, 3.0, **given)
    new, notes = relu_bound(graph)
    assert notes == [f"'clip' keeps its bound 3: {why}" if why else "the bound of 'clip' moved from 3 to 4"]
    assert (new.nodes[1].attrs["max"] == 4.0) is (why is None)


def test_a_clip_that_stays_keeps_no_other_from_moving():
    """The first has no end, the second ends at a power of two, and of the third the model returns the result."""
    clips = nn.Hardtanh(-1.0, float("inf")), nn.Hardtanh(0.0, 4.0), nn.ReLU6(), nn.ReLU6()
    parts = [part for clip in clips for part in (nn.Linear(2, 2), clip)]
    net = model_of(lambda m, x: (m.rest(y := m.first(x)), y), first=nn.Sequential(*parts[:6]))
    net.rest = nn.Sequential(*parts[6:], nn.Linear(2, 2))
    graph = captured(net, torch.randn(2, 2))
    new, notes = relu_bound(graph)
    kept = f"'first.5' keeps its bound 6: '{graph.outputs[1]}' is an output of the model"
    assert notes == [kept, "the bound of 'rest.1' moved from 6 to 8"]
    assert [n.attrs["max"] for n in new.nodes if n.op == "Clamp"][-1] == 8.0
