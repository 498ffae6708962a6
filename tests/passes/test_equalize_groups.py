"""Equalization of activations: magnitudes alike in every channel of a group, and the same network."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.calibration.collect import collect
from chipfit.decide import statistics
from chipfit.engine.run import run
from chipfit.passes.equalize_groups import FEW_BITS, equalize_groups, keeps_channels, with_channels, worth_a_trial
from tests.build import graph_of, model_of, node, set_layer
from tests.steps import Steps, assert_same, begin


def equalized(model: nn.Module, x: torch.Tensor, platform: str = "ort_cpu") -> tuple[Steps, Steps, list[str]]:
    """Before, after (without histograms), and what is said."""
    steps = begin(model.eval(), x, platform)
    needs = with_channels(steps.graph, statistics.needs(steps.assignment))
    stats = collect(steps.graph, [[x]], tensors=needs)
    graph, new, notes = equalize_groups(steps.graph, steps.assignment, stats)
    return steps, steps.decided(graph, new), notes


def same(before: Steps, after: Steps, x: torch.Tensor) -> None:
    assert_same(before.graph, after.graph, x)


def unchanged(before: Steps, after: Steps) -> bool:
    return all(torch.equal(w, after.graph.weights[k]) for k, w in before.graph.weights.items())


def pair(second: nn.Module, act: nn.Module = nn.ReLU()) -> nn.Sequential:  # noqa: B008
    """Channels 4 x, x / 4 and one that stays 0, then `second` with weights of 1."""
    nn.init.ones_(second.weight)
    return nn.Sequential(set_layer(nn.Conv2d(1, 3, 1), [4.0, 0.25, -1.0]), act, second)


X = torch.tensor([0.5, 1.0]).view(2, 1, 1, 1)


def test_a_dense_reader_on_paper():
    """t = 4, 1/4, 0: s = 1, (1/16)^0.75 = 1/8, and 1 for the channel without any value."""
    before, after, notes = equalized(pair(nn.Conv2d(3, 1, 1)), X)
    assert after.graph.weights["0.weight"].flatten().tolist() == [4.0, 2.0, -1.0]
    assert after.graph.weights["2.weight"].flatten().tolist() == [1.0, 0.125, 1.0]
    same(before, after, X)
    same(before, after, -9 * X)
    seen = after.stats[after.graph.nodes[1].output]
    assert seen.channels.high.tolist() == [4.0, 2.0, 0.0] and seen.histogram is None
    assert "the channels of '0' grow by up to 8" in notes


def test_a_depthwise_reader_on_paper():
    """s = t / max t: both channels reach 4 then."""
    before, after, _ = equalized(pair(nn.Conv2d(3, 3, 1, groups=3)), X)
    assert after.graph.weights["0.weight"].flatten().tolist() == [4.0, 4.0, -1.0]
    assert after.graph.weights["2.weight"].flatten().tolist() == [1.0, 1 / 16, 1.0]
    same(before, after, X)


def test_no_channel_is_taken_for_less_than_a_hundredth():
    net = pair(nn.Conv2d(3, 3, 1, groups=3))
    nn.init.constant_(net[0].weight[1], 1e-4)
    _, after, _ = equalized(net, X)
    torch.testing.assert_close(after.graph.weights["2.weight"].flatten(), torch.tensor([1.0, 0.01, 1.0]))


def block(act=F.relu) -> nn.Module:
    """Return a network in which sums, pools, a padded depthwise convolution and a head share channels."""

    def forward(m, x):
        x = act(m.a(x))
        x = F.max_pool2d(act(m.b(x)), 2) + F.avg_pool2d(x, 2)
        x = act(m.c(x)) + x
        x = act(m.e(act(m.d(x))))
        return m.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    layers = {"a": nn.Conv2d(3, 6, 3, padding=1), "b": nn.Conv2d(6, 6, 1), "c": nn.Conv2d(6, 6, 3, padding=1)}
    layers |= {"d": nn.Conv2d(6, 6, 3, padding=1, groups=6), "e": nn.Conv2d(6, 8, 1), "head": nn.Linear(8, 4)}
    with torch.no_grad():
        for name in "abd":
            layers[name].weight.mul_(torch.logspace(-1.5, 0.5, 6)[torch.randperm(6)].view(-1, 1, 1, 1))
    return model_of(forward, **layers)


def test_groups_go_through_sums_pools_and_the_head():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    before, after, notes = equalized(block(), x)
    same(before, after, x)
    same(before, after, torch.randn(4, 3, 8, 8) * 9)
    assert all(" grow by up to " in n for n in notes) and len(notes) == 3  # a, b and c share one group
    changed = {k for k, w in before.graph.weights.items() if not torch.equal(w, after.graph.weights[k])}
    assert {f"{k}.weight" for k in ("a", "b", "c", "d", "e", "head")} <= changed

    def spread(steps, who):
        name = next(n.data for n in steps.graph.nodes if n.display_name == who)
        peaks = steps.float(name)[-1].abs().amax((0, 2, 3))
        return float(peaks.max() / peaks[peaks > 0].min())

    for who in ("b", "d", "e"):
        assert spread(after, who) < 0.7 * spread(before, who)
    assert spread(before, "d") > 2  # which would show that nothing was scaled


def test_a_clip_stays_where_it_is_and_clips_nothing_that_calibration_saw():
    """Channels of 8 x and x / 2, clipped at 6: s = 1 and 1/12, so that the second ends at 6 / 12 = 0.5 of before."""
    net = pair(nn.Conv2d(3, 3, 1, groups=3), nn.ReLU6())
    set_layer(net[0], [8.0, 0.5, -1.0])
    before, after, _ = equalized(net, X)
    assert [n.op for n in after.graph.nodes] == [n.op for n in before.graph.nodes]
    torch.testing.assert_close(after.graph.weights["2.weight"].flatten(), torch.tensor([1.0, 1 / 12, 1.0]))
    same(before, after, X)
    beyond = run(after.graph, [2 * X])[after.graph.outputs[0]].flatten(1)
    bias = net[2].bias.detach()
    torch.testing.assert_close(beyond[1] - bias, torch.tensor([6.0, 0.5, 0.0]))  # of 6, 1, 0 without the rewrite


def test_a_clip_in_front_of_a_sum_keeps_what_calibration_saw():
    """t = 6 + 96, 3 + 1 gives (4 / 102)^0.75 = 0.088 for the second; 6 s >= 3 asks for 0.5."""
    layers = {"a": set_layer(nn.Conv2d(1, 2, 1), [8.0, 3.0]), "b": set_layer(nn.Conv2d(1, 2, 1), [96.0, 1.0])}
    layers["c"] = set_layer(nn.Conv2d(2, 1, 1), [1.0, 1.0])
    before, after, _ = equalized(model_of(lambda m, x: m.c(F.relu6(m.a(x)) + torch.relu(m.b(x))), **layers), X)
    assert after.graph.weights["c.weight"].flatten().tolist() == [1.0, 0.5]
    same(before, after, X)


def normed(norm: nn.Module) -> nn.Module:
    """A norm whose channels have deviations of 4 and 1/4, and its reader, a convolution with weights of 1."""
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([4.0, 0.25]))
        norm.bias.copy_(torch.tensor([-8.0, 0.0]))
    layers = {"a": nn.Conv2d(2, 2, 1), "n": norm, "c": set_layer(nn.Conv2d(2, 1, 1), [1.0, 1.0])}
    addend = nn.Parameter(torch.tensor([12.0, 0.0]).view(2, 1, 1))
    return model_of(lambda m, x: m.c(torch.relu(m.n(m.a(x)) + m.p)), p=addend, **layers)


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, affine=True)])
@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])  # whole, and opened into parts
def test_scale_and_shift_of_a_norm_and_an_addend_take_the_scales_of_channels(norm, platform):
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 5)
    net = normed(norm)
    before, after, _ = equalized(net, x, platform)
    same(before, after, x)
    high = torch.relu(net.n(net.a(x)) + net.p).detach().amax((0, 2, 3))  # what the convolution reads
    grows = [1.0, float((high[0] / high[1]) ** 0.75)]
    assert after.graph.weights["c.weight"].flatten().tolist() == pytest.approx([1 / k for k in grows], rel=1e-4)
    constants = [w.flatten().tolist() for w in after.graph.weights.values() if w.numel() == 2]
    assert all(
        any(w == pytest.approx(c, rel=1e-4) for w in constants) for c in ([4, 0.25 * grows[1]], [-8, 0], [12, 0])
    )


@pytest.mark.parametrize("between", [nn.SiLU(), nn.Hardtanh(-1.0, 1.0), nn.ChannelShuffle(2), nn.Softmax(1)])
def test_what_does_not_scale_with_its_channels_ends_a_group(between):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), between, nn.Conv2d(4, 2, 1))
    before, after, _ = equalized(net, torch.randn(2, 3, 4, 4))
    assert unchanged(before, after)


@pytest.mark.parametrize(
    "forward, platform, why",
    [
        (
            lambda m, x: m.c(F.relu6(m.b(y := m.a(x).relu())) + y),
            "mqbench_academic",
            "clipped at 6 and stored on no grid",
        ),
        (lambda m, x: m.c(m.a(m.a(x).relu()).relu()), "ort_cpu", "'a.weight' is read by several operators"),
    ],
)
def test_a_clip_on_no_grid_and_weights_of_several_operators_are_left(forward, platform, why):
    net = model_of(forward, **{k: nn.Conv2d(3, 3, 1) for k in "abc"})
    before, after, notes = equalized(net, torch.randn(2, 3, 4, 4), platform)
    assert any(n.endswith(why) for n in notes) and unchanged(before, after)


# ---------------------------------------------------------------- when it is tried, and what shares channels


@pytest.mark.parametrize(
    "bits, settings, axis, groups, tried",
    [
        (FEW_BITS, {}, 0, 3, True),
        (FEW_BITS + 1, {}, 0, 3, False),
        (4, {"rounding": "nearest"}, 0, 3, False),
        (4, {"seconds": 10.0}, 0, 3, False),
        (4, {}, None, 3, False),
        (4, {}, 0, 1, False),
    ],
)
def test_a_rewrite_for_few_bits_is_tried_where_weights_are_fitted_and_channels_cost_nothing(
    bits, settings, axis, groups, tried
):
    def slot(role, bits, axis=None):
        return SimpleNamespace(role=role, format=SimpleNamespace(bits=bits), axis=axis)

    slots = {"x": slot("activation", 8), "y": slot("activation", bits), "w": slot("weight", 4, axis)}
    if axis == 0:
        slots["v"] = slot("weight", 4, 1)
    conv, weights = node("y = Conv2D(x, w)", {"groups": groups}), {"w": torch.ones(3, 3 // groups, 1, 1)}
    graph = graph_of(conv, shape=(None, 3, 2, 2), weights=weights)
    given = SimpleNamespace(**{"rounding": "gptq", "rounding_guard": True, "seconds": None, **settings})
    assert worth_a_trial(given, graph, SimpleNamespace(tensors=slots)) == ("always" if tried else None)


@pytest.mark.parametrize(
    "op, attrs, before, after, shares",
    [
        ("Relu", {}, (None, 3, 4, 5), None, True),
        ("Sigmoid", {}, (None, 3, 4, 5), None, False),
        ("Clamp", {"min": 0.0, "max": 2.0}, (None, 3, 4, 5), None, True),
        ("Clamp", {"min": None, "max": 2.0}, (None, 3, 4, 5), None, True),
        ("Clamp", {"min": -1.0, "max": 2.0}, (None, 3, 4, 5), None, False),
        ("MaxPool", {}, (None, 3, 4, 5), (None, 3, 2, 2), True),
        ("Mean", {"axes": (-1, 2)}, (None, 3, 4, 5), (None, 3), True),
        ("Mean", {"axes": (-3, 2)}, (None, 3, 4, 5), (None, 5), False),
        ("Mean", {"axes": (0,)}, (None, 3, 4, 5), (3, 4, 5), False),
        ("Reshape", {}, (None, 3, 1, 1), (None, 3), True),
        ("Reshape", {}, (None, 3), (None, 3, 1, 1), True),
        ("Reshape", {}, (None, 3, 1, 1), (None, 1, 3), False),
        ("Reshape", {}, (None, 3, 2), (None, 3, 2, 1), False),
        ("Reshape", {}, (None,), (None,), False),
        ("Squeeze", {"axes": (2, 3)}, (None, 3, 1, 1), (None, 3), True),
        ("Squeeze", {"axes": (3,)}, (None, 3, 4, 1), (None, 3, 4), False),
        ("Nobody's", {}, (None, 3), (None, 3), False),
    ],
)
def test_what_shares_channels_with_its_operand(op, attrs, before, after, shares):
    graph = graph_of(node(f"y = {op}(x)", attrs), shapes={"x": before, "y": after or before})
    assert keeps_channels(graph, graph.nodes[0]) is shares
    split = graph.nodes[0].with_(outputs=("y", "z"))
    assert not keeps_channels(graph, split)


def test_inputs_and_results_of_the_model_keep_their_magnitudes():
    def forward(m, x):
        y = torch.relu(m.a(x))
        return (m.b(y), y) if returned else m.b(y + x)

    for returned, what in ((True, "an output"), (False, "an input")):
        net = model_of(forward, a=nn.Conv2d(2, 2, 1), b=nn.Conv2d(2, 2, 1))
        steps = begin(net, torch.randn(2, 2, 3, 3), "ort_cpu")
        stats = collect(steps.graph, [[steps.x]], tensors=with_channels(steps.graph, {}))
        graph, _, notes = equalize_groups(steps.graph, steps.assignment, stats)
        name = steps.graph.outputs[1] if returned else steps.graph.inputs[0]
        assert f"the channels of 'a' keep their magnitudes: '{name}' is {what} of the model" in notes
        assert all(torch.equal(w, graph.weights[k]) for k, w in steps.graph.weights.items())


def test_channels_that_were_not_collected_keep_their_magnitudes():
    steps = begin(pair(nn.Conv2d(3, 1, 1)), X, "ort_cpu")
    bare = {k: replace(s, channels=None) for k, s in steps.stats.items()}
    notes = equalize_groups(steps.graph, steps.assignment, bare)[2]
    assert "the channels of '0' keep their magnitudes: its channels were not collected" in notes
