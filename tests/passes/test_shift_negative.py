"""Shift-negative correction: what an unsigned grid gains, and that nothing else changes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.calibration.collect import Need, TensorStats, collect
from chipfit.passes.shift_negative import SHIFT, fuse_shifts, shift_constant, shift_negative, with_pad_operator
from chipfit.platform.schema import Format
from tests.build import graph_of, model_of, node, set_layer
from tests.steps import assert_same, begin


def before(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.SiLU(), *layers)


def spread(low: float, high: float) -> torch.Tensor:
    """Images of the same three channels whose values reach from low to high."""
    return torch.linspace(low, high, 4 * 3 * 36).view(4, 3, 6, 6)


def net_of(act: nn.Module, forward=lambda m, x: m.last(m.act(m.first(x))), last: nn.Module | None = None) -> nn.Module:
    """Return a point convolution that passes three channels on, an activation and a padded convolution."""
    first = set_layer(nn.Conv2d(3, 3, 1, bias=False), torch.eye(3))
    return model_of(forward, first=first, act=act, last=last or nn.Conv2d(3, 4, 3, padding=1))


def reads_its_bias(m, x):
    return m.last(m.act(m.first(x))) + m.last.bias.view(4, 1, 1)


def test_the_shift_on_paper():
    """Swish of [-4, 7] lies in [-0.278, 6.99]. Signed: threshold 8, 1/16. Unsigned: 8, 1/32; 9 of them: 0.28125."""
    x = spread(-4, 7)
    steps = begin(net_of(nn.SiLU()), x)
    new, stats, notes = shift_negative(steps.graph, steps.assignment, steps.stats)
    assert notes == ["shifted 'act' by 0.28125, now unsigned, before 'last'"]
    assert [n.op for n in new.nodes] == ["Conv2D", "Swish", "Add", "Pad", "Conv2D"]
    add, pad, conv = new.nodes[2:]
    assert add.layer_type == SHIFT and float(new.weights[add.inputs[1]]) == 0.28125
    assert pad.attrs["value"] == 0.28125 and pad.attrs["padding"] == ((0, 0), (0, 0), (1, 1), (1, 1))
    assert conv.attrs["padding"] == ((0, 0), (0, 0))
    w, b = steps.graph.weights["last.weight"], steps.graph.weights["last.bias"]
    torch.testing.assert_close(new.weights["last.bias"], b - 0.28125 * w.sum((1, 2, 3)))
    assert stats[add.output].low == pytest.approx(0.28125 - 0.2785, abs=1e-3)
    assert_same(steps.graph, new, x)


@pytest.mark.parametrize(
    "act", [nn.SiLU(), nn.GELU(), nn.Hardswish(), nn.LeakyReLU(0.02), nn.PReLU(3, 0.01), nn.Mish()]
)
def test_the_error_behind_the_activation_falls(act):
    steps = begin(net_of(act), spread(-8, 6.5))
    graph, stats, notes = shift_negative(steps.graph, steps.assignment, steps.stats)
    assert notes[0].startswith("shifted"), notes
    shifted = steps.decided(graph, stats)
    plan = shifted.plan()
    add = next(n for n in graph.nodes if n.layer_type == SHIFT)
    assert plan.tensors[add.output].grid.qmin == 0 and float(plan.tensors[add.output].scale) == 1 / 32
    assert not plan.quantized(add.inputs[0]), "the activation's own result is inside the kernel"

    # half the step, a quarter of the squared error behind the next convolution
    assert shifted.error(add.output) < 0.4 * steps.error(steps.graph.nodes[1].output)
    assert shifted.error() < steps.error()


def test_the_shifted_statistics_are_those_of_a_new_calibration():
    steps = begin(net_of(nn.SiLU(), lambda m, x: m.last(F.max_pool2d(m.act(m.first(x)), 2))), spread(-4, 7))
    graph, stats, _ = shift_negative(steps.graph, steps.assignment, steps.stats)
    add, pool = graph.nodes[2].output, graph.nodes[3].output
    again = collect(graph, [[steps.x]], tensors={n: Need() for n in (add, pool)})
    for name in (add, pool):
        found, expected = stats[name], again[name]
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-5)
        h, g = found.histogram, expected.histogram
        assert h.counts.sum() == g.counts.sum()
        step, sums = 2 * h.reach / len(h.counts), [float((k.counts * k.centers).sum()) for k in (h, g)]
        assert sums[0] == pytest.approx(sums[1], abs=step * float(g.counts.sum()))


@pytest.mark.parametrize(
    "net, span, why",
    [
        (net_of(nn.SiLU()), (-4, 3), "more than 0.05 of the threshold 4"),
        (net_of(nn.SiLU()), (-4, 7.9), "would not fall"),
        (net_of(nn.ELU()), (-4, 7), "more than 0.05"),
        (before(), (-80, 60), "an output of the model"),
        (before(nn.Sigmoid(), nn.Conv2d(3, 3, 1)), (-80, 60), "Sigmoid '2' reads it"),
        (before(nn.ConvTranspose2d(3, 3, 2, 2)), (-80, 60), "another bias at every position"),
        (before(nn.AvgPool2d(2, padding=1), nn.Conv2d(3, 3, 1)), (-80, 60), "AvgPool '2' reads it"),
    ],
)
def test_a_shift_that_does_not_help_or_cannot_be_undone_is_refused(net, span, why):
    steps = begin(net, spread(*span))
    new, _, notes = shift_negative(steps.graph, steps.assignment, steps.stats)
    assert new.nodes == steps.graph.nodes and len(notes) == 1 and why in notes[0]


def test_a_bias_that_is_read_elsewhere_stays_there():
    net = net_of(nn.SiLU(), reads_its_bias)
    steps = begin(net, spread(-4, 7))
    new, _, notes = shift_negative(steps.graph, steps.assignment, steps.stats)
    assert notes == ["shifted 'act' by 0.28125, now unsigned, before 'last'"]
    assert torch.equal(new.weights["last.bias_operand"], net.last.bias)
    assert not torch.equal(new.weights["last.bias"], net.last.bias)


WEIGHTS, BIAS = [1.0, 2.0, 3.0, 0.0, -4.0, 1.0], [1 - 6 * 0.28125, 1 + 3 * 0.28125]


@pytest.mark.parametrize(
    "behind, weight, bias",
    [
        ([nn.Conv2d(3, 3, 1, groups=3)], [1.0, 2.0, -4.0], [1 - 0.28125, 1 - 0.5625, 1 + 1.125]),
        ([nn.Conv2d(3, 2, 1)], WEIGHTS, BIAS),
        ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)], WEIGHTS, BIAS),
    ],
)
def test_each_output_gives_back_the_sum_of_its_own_weights(behind, weight, bias):
    """The shift of 9/32 as above; an output whose weights sum to s has s * 9/32 less in its bias."""
    set_layer(behind[-1], weight, 1.0)
    steps = begin(net_of(nn.SiLU(), last=nn.Sequential(*behind)), spread(-4, 7))
    new, _, _ = shift_negative(steps.graph, steps.assignment, steps.stats)
    assert new.weights[new.nodes[-1].bias].tolist() == bias


def test_one_that_cannot_be_shifted_keeps_no_other_from_it():
    def forward(m, x):  # the first activation is also returned, so that only the second can be shifted
        y = F.silu(m.one(x))
        return m.three(F.silu(m.two(y))), y

    net = model_of(forward, **{k: nn.Conv2d(3, 3, 1) for k in ("one", "two", "three")})
    steps = begin(net, spread(-4, 7))
    new, _, notes = shift_negative(steps.graph, steps.assignment, steps.stats, ratio=10.0)
    assert [n.split(" by ")[0].split(": ")[0] for n in notes] == ["'silu' is not shifted", "shifted 'silu_1'"]
    assert sum(n.layer_type == SHIFT for n in new.nodes) == 1


# ---------------------------------------------------------------- the parts

AUTO = Format(bits=8, signed="auto")


def seen(low, high):
    return TensorStats("x", low=low, high=high)


@pytest.mark.parametrize(
    "low, high, ratio, c",
    [
        # signed: 12.7 / 127 = 0.1, threshold 12.8; unsigned: 12.95 / 255, five of which hold 0.25: (12.7 + 5 s') / 255
        (-0.25, 12.7, 0.05, 5 * (12.7 + 5 * 12.95 / 255) / 255),
        (-0.64, 12.7, 0.05, None),
        (-0.25, 12.7, 0.019, "more than 0.019 of the threshold 12.8"),
        (-12.0, 12.7, 1.0, None),
        (-12.8, 12.7, 1.0, "would not fall"),  # both grids hold 25.5 in 255 steps
        (-12.8, 12.7, 1.1, 12.8),  # is shifted nevertheless: 25.5 / 255 = 0.1
    ],
)
def test_the_constant_and_why_none_helps(low, high, ratio, c):
    found, why = shift_constant(AUTO, seen(low, high), ratio)
    if isinstance(c, str):
        assert found == 0.0 and c in why
        return
    assert why == "" and found >= -low
    unsigned = (high + found) / 255  # the grid's step when the constant is on it
    assert c is None or found == pytest.approx(c, rel=1e-6)
    assert found / unsigned == pytest.approx(round(found / unsigned), abs=0.02 * round(found / unsigned))
    assert found - unsigned < -low * 1.01 + unsigned * 0.02


@pytest.mark.parametrize("op, attrs, crossed", [("MaxPool", {}, True), ("Sigmoid", {}, False), ("Nobody's", {}, False)])
def test_what_a_constant_passes_through(op, attrs, crossed):
    assert node(f"y = {op}(x)", attrs).facts.shifts is crossed


@pytest.mark.parametrize("width", [6, None])
def test_padding_of_a_convolution_becomes_an_operator_of_its_own(width):
    conv = {"stride": (1, 1), "padding": ((1, 2), (0, 3)), "dilation": (1, 1), "groups": 1}
    layer, weights = node("y = Conv2D(x, w, b)", conv), {"w": torch.randn(2, 3, 2, 2), "b": torch.zeros(2)}
    graph = graph_of(layer, weights=weights, shape=(None, 3, 5, width))
    pad, rest = with_pad_operator(graph, layer, 0.75)
    assert graph.shape(pad.output) == (None, 3, 8, None if width is None else 9)
    assert pad.attrs == {"padding": ((0, 0), (0, 0), (1, 2), (0, 3)), "mode": "constant", "value": 0.75}
    assert rest.inputs == (pad.output, "w", "b") and rest.attrs["padding"] == ((0, 0), (0, 0))
    bare = layer.with_(attrs={**conv, "padding": ((0, 0), (0, 0))})
    assert with_pad_operator(graph, bare, 0.75) == (bare,)
    linear = layer.with_(op="Linear", attrs={})
    assert with_pad_operator(graph, linear, 0.75) == (linear,)


def test_shifts_join_the_kernel_of_their_activation_in_its_place():
    a, e = node("a = Add(s, k)", layer_type=SHIFT), node("e = Add(t, k)", layer_type=SHIFT)
    nodes = "c = Conv2D(x)", "s = Swish(c)", a, "d = Conv2D(a)", "t = Swish(d)", e, "f = Add(e, a)"
    graph = graph_of(*nodes, weights="k")
    assert fuse_shifts(graph, (("d", "t"), ("f",))) == (("s", "a"), ("d", "t", "e"), ("f",))
    assert fuse_shifts(graph, (("c", "s"),)) == (("c", "s", "a"), ("t", "e"))
    # in the order in which kernels begin, wherever they end
    assert fuse_shifts(graph, (("d", "t"), ("c", "f"))) == (("c", "f"), ("s", "a"), ("d", "t", "e"))


def test_nothing_above_zero_nor_with_a_sign_or_zero_point_of_its_own_is_shifted():
    own = begin(net_of(nn.SiLU()), spread(-4, 7), "ort_cpu")
    assert shift_negative(own.graph, own.assignment, own.stats)[2] == []
    steps = begin(net_of(nn.SiLU()), spread(-4, 7))
    act = next(n.output for n in steps.graph.nodes if n.op == "Swish")
    above = {**steps.stats, act: seen(0.0, 7.0)}
    assert shift_negative(steps.graph, steps.assignment, above)[2] == []
    assert shift_negative(steps.graph, steps.assignment, {})[2] == []
    slot = steps.assignment.tensors[act]
    signed = replace(slot, format=slot.format.model_copy(update={"signed": True}))
    held = replace(steps.assignment, tensors={**steps.assignment.tensors, act: signed})
    assert shift_negative(steps.graph, held, steps.stats)[2] == []
    # 5 % of the threshold unless another share is asked for: 0.2785 of 8 is 3.5 %
    assert shift_negative(steps.graph, steps.assignment, steps.stats)[2][0].startswith("shifted")
    low = steps.stats[act].shifted(-0.13)  # 5.1 % of 8
    assert "more than 0.05 of" in shift_negative(steps.graph, steps.assignment, {**steps.stats, act: low})[2][0]


@pytest.mark.parametrize(
    "pad, value", [(nn.ZeroPad2d(1), 0.28125), (nn.ConstantPad2d(1, 0.5), 0.78125), (nn.ReflectionPad2d(1), None)]
)
def test_a_pad_on_the_way_holds_the_shift_as_well(pad, value):
    x = spread(-4, 7)
    steps = begin(net_of(nn.SiLU(), last=nn.Sequential(pad, nn.Conv2d(3, 4, 3))), x)
    new, stats, notes = shift_negative(steps.graph, steps.assignment, steps.stats)
    assert notes == ["shifted 'act' by 0.28125, now unsigned, before 'last.1'"]
    (made,) = (n for n in new.nodes if n.op == "Pad")
    before = next(n for n in steps.graph.nodes if n.op == "Pad")
    assert made.attrs == {**before.attrs, **({"value": value} if value else {})}
    assert_same(steps.graph, new, x)
    if made.output in steps.stats:
        assert stats[made.output].low == pytest.approx(steps.stats[made.output].low + 0.28125)
