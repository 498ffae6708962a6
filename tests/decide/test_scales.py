"""Scales of tensors together: ties, signs, room for biases, sums of weights, and data that are zero."""

import re

import pytest
import torch
from torch import nn

from chipfit import quantize
from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.constraints import bounded, copies
from chipfit.decide.scales import choose
from chipfit.decide.statistics import RangeRules
from chipfit.errors import DataError, PlanError, UnsupportedError
from chipfit.graph.ir import Graph, Value
from chipfit.platform.load import load_platform, names
from chipfit.platform.schema import Format
from chipfit.ranges.qparams import GREATEST_SCALE
from chipfit.registry import entry
from tests.build import graph_of, images, model_of, node, platform_of, quantized, sequential
from tests.decide.test_constraints import constraint


def test_a_shared_weights_scale_grows_until_each_bias_fits_at_the_final_product():
    """Two layers share a weight; the second one's bias is far too large for the first guess of its scale."""
    torch.manual_seed(0)
    model = model_of(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    model.a.weight.data.mul_(1e-6)
    model.b.bias.data.fill_(3e4)
    result = quantize(model.eval(), [torch.randn(16, 4)], progress=False)  # where it is: a move may untie weights
    readers = [n for n in result.graph if n.op == "Linear"]
    assert len(readers) == 2 and result.plan.tensors["a.weight"].origin.endswith("enlarged to store the bias")
    for n in readers:
        x, w, b = (result.plan.tensors[i] for i in n.inputs)
        assert torch.equal(b.scale, x.scale * w.scale)
        assert (result.graph.weights[b.name] / b.scale).abs().max() <= b.grid.qmax


@pytest.mark.parametrize("platform", ["vitis_dpu", "qualcomm_aic100"])
def test_an_eight_bit_bias_has_a_range_of_its_own(platform):
    model = sequential(nn.Conv2d(2, 4, 3), nn.ReLU())
    plan = quantized(model, torch.randn(4, 2, 6, 6), platform).plan
    b, w = plan.tensors["0.bias"], plan.tensors["0.weight"]
    assert b.grid.bits == 8
    assert b.scale * b.grid.qmax <= 4 * model[0].bias.detach().abs().max()
    assert "enlarged" not in w.origin


# ---------------------------------------------------------------- on paper

A8 = Format(bits=8, zero="any")  # -128..127
AUTO = Format(bits=8, zero="any", signed="auto")
TIE = {"tie": ["in0", "out"]}


def slot(name, fmt=A8, role="activation", **facts):
    return TensorSpec(name=name, role=role, format_name="a8", format=fmt, **facts)


def chosen(ranges, *rules, slots=(), op="Add", weights=None, floats=None, nodes=(), order=("in0", "out"), known=None):
    """The tensors of one operator that reads the first of `ranges` and writes the second, by their extremes."""
    order_of = list(ranges)
    stats = {k: TensorStats(k, low=r[0], high=r[1], count=4, batches=2) for k, r in ranges.items() if r is not None}
    own = {s.name: s for s in slots}
    slots = {k: own.get(k, slot(k)) for k in [*order_of, *(k for k in own if k not in order_of)]}
    bound = {where: (k,) for where, k in zip(order, slots, strict=False)}
    bound |= {"ins": tuple(k for w, (k,) in bound.items() if w.startswith("in")), "outs": bound.get("out", ())}
    values = {k: Value(k, (None, 4)) for k in slots}
    graph = Graph([node(n) if isinstance(n, str) else n for n in nodes], [], [], values, weights or {})
    assignment = Assignment(tensors=slots, constraints=(constraint(*rules, op=op, **bound),), floats=floats or {})
    return choose(graph, assignment, stats, RangeRules(rule="no_clipping", weight_rule="no_clipping"), known)


def step(tensor):
    return float(tensor.scale) * 255


def test_tied_tensors_take_the_range_that_covers_each():
    made = chosen({"x": (-1.0, 1.0), "y": (0.0, 3.0)}, TIE)
    assert step(made["x"]) == step(made["y"]) == pytest.approx(4.0, rel=0.01)  # to a step
    assert int(made["x"].stored.zero_point) == int(made["y"].stored.zero_point) == -128 + 64
    assert made["x"].origin == "no_clipping over 2 batches, tied with 'y'"
    assert made["y"].origin == "no_clipping over 2 batches, tied with 'x'"
    assert (made["x"].low, made["x"].high, made["y"].high) == (-1.0, 1.0, 3.0)
    other = chosen({"x": (0.0, 3.0), "y": (-1.0, 1.0)}, TIE)
    assert step(other["x"]) == step(other["y"]) == pytest.approx(4.0, rel=0.01)
    made = chosen({"x": (-1.0, 1.0), "y": (0.0, 3.0)}, {**TIE, "hard": False})
    assert (step(made["x"]), step(made["y"])) == (pytest.approx(2.0), pytest.approx(3.0))
    assert made["x"].origin == made["y"].origin == "no_clipping over 2 batches"


def test_three_tied_tensors_name_each_other():
    ranges = {"x": (-1.0, 0.0), "v": (0.0, 1.0), "y": (0.0, 2.0)}
    made = chosen(ranges, {"tie": ["ins", "out"]}, order=("in0", "in1", "out"))
    assert all(step(made[k]) == pytest.approx(3.0, rel=0.01) for k in "xvy")
    assert made["v"].origin.endswith(", tied with 'x', 'y'") or made["v"].origin.endswith(", tied with 'y', 'x'")


@pytest.mark.parametrize("zp", [0, -128])
def test_all_tied_tensors_have_the_scale_that_the_platform_dictates(zp):
    made = chosen({"x": (-1.0, 1.0), "y": (0.0, 3.0)}, TIE, {"fix": "out", "scale": 0.125, "zp": zp})
    for k in "xy":
        assert (float(made[k].scale), int(made[k].stored.zero_point)) == (0.125, zp)
    assert made["y"].origin == made["x"].origin == "fixed by the platform"


def test_a_tensor_of_zeros_does_not_widen_the_others():
    made = chosen({"x": (0.0, 0.0), "y": (-0.01, 0.01)}, TIE)
    assert step(made["x"]) == step(made["y"]) == pytest.approx(0.02)
    for seen in ((0.0, 0.5), (-0.5, 0.0)):
        assert step(chosen({"x": seen, "y": (-0.01, 0.01)}, TIE)["y"]) == pytest.approx(0.51, rel=0.01)
    both = chosen({"x": (0.0, 0.0), "y": (0.0, 0.0)}, TIE)
    assert float(both["x"].scale) == float(both["y"].scale) > 0
    for fill, top in ((0.0, 0.02), (5.0, 5.01)):
        constants = {"c": torch.full((4,), fill)}
        made = chosen({"y": (-0.01, 0.01)}, TIE, slots=[slot("c", role="weight")], weights=constants)
        assert step(made["y"]) == step(made["c"]) == pytest.approx(top, rel=1e-3)


def test_a_range_known_beforehand_counts_though_it_was_zero_and_copies_have_it():
    wide = slot("x", range=(-2.0, 2.0))
    assert step(chosen({"x": None, "y": (-0.01, 0.01)}, TIE, slots=[wide])["y"]) == pytest.approx(4.0)
    # what a reshape copies has that range, whatever was seen of it
    move = "y = Reshape(x)"
    moved = chosen({"x": None, "y": (-9.0, 9.0)}, TIE, slots=[wide], nodes=[move], op="Reshape")
    assert step(moved["x"]) == step(moved["y"]) == pytest.approx(4.0)
    free = chosen({"x": (-2.0, 2.0), "y": (-9.0, 9.0)}, TIE, nodes=[move], op="Reshape")
    assert step(free["y"]) == pytest.approx(18.0, rel=0.01)


@pytest.mark.parametrize("choice", [{"rule": "percentile"}, {"z_threshold": 1.0}])
def test_a_rule_for_a_tensor_is_the_rule_for_its_copies(choice):
    """What a reshape copies had its own search before, whose wider range won."""
    seen, move = {"x": (-1.0, 1.0), "y": (-9.0, 9.0)}, {"nodes": ["y = Reshape(x)"], "op": "Reshape"}
    made = chosen(seen, TIE, slots=[slot("x", **choice)], **move)
    assert step(made["x"]) == step(made["y"]) == pytest.approx(2.0, rel=0.01)
    both = chosen(seen, TIE, slots=[slot("x", **choice), slot("y", **choice)], **move)
    assert step(both["y"]) == pytest.approx(18.0, rel=0.01)


def test_beyond_a_constant_bound_codes_may_saturate_unless_something_else_reads_them():
    graph = graph_of("y = Max(x, c)", "z = Min(d, y)", weights={"c": torch.tensor(-1.0), "d": torch.tensor(9.0)})
    tie = ("x", "c", "y", "d", "z")
    assert bounded(graph, [tie]) == {"x", "c", "y", "d"}
    assert bounded(graph, [("x", "c", "y"), ("d", "z")]) == {"x", "c"}
    graph.outputs.append("y")
    assert bounded(graph, [tie]) == {"x", "c", "d"}
    assert bounded(graph_of("y = Max(x, z)"), [("x", "y", "z")]) == set()
    assert bounded(graph_of("y = Max(x, c)", "v = Add(x, y)", weights={"c": torch.tensor(1.0)}), ["xycv"]) == {"c"}


def test_copies_are_what_only_moves_members_of_the_tie():
    graph = graph_of("y = Reshape(x)", "j = Concat(x, z)", "s = Add(x, y)", "t = Reshape(s)")
    assert copies(graph, ("x", "y", "j", "s", "t")) == {"y", "t"}
    assert copies(graph, ("x", "y", "z", "j")) == {"y", "j"}
    assert copies(graph, ("x", "z")) == set()


def test_of_tied_tensors_one_with_powers_of_two_decides_their_steps():
    pot = slot("y", Format(bits=8, zero="any", scale="pot"))
    made = chosen({"x": (-1.0, 0.99), "y": (0.0, 3.0)}, TIE, slots=[pot])
    assert float(made["x"].scale) == float(made["y"].scale) == 2.0**-5  # -1..3.98 take 1.25 / 64


def test_scales_that_a_rule_moves_say_so():
    rule = {"mono": {"in0": 1, "out": -1}, "max": 1.0}  # the result's step is at least the operand's
    made = chosen({"x": (-1.0, 1.0), "y": (-0.5, 0.5)}, rule)
    assert float(made["x"].scale) <= float(made["y"].scale) * (1 + 1e-6)
    moved = [k for k in "xy" if made[k].origin.endswith(", moved to satisfy the platform's rules")]
    assert moved == [k for k, top in (("x", 2.0), ("y", 1.0)) if step(made[k]) != pytest.approx(top, rel=1e-5)] != []
    kept = chosen({"x": (-0.5, 0.5), "y": (-1.0, 1.0)}, rule)
    assert [kept[k].origin for k in "xy"] == ["no_clipping over 2 batches"] * 2


# ---------------------------------------------------------------- signs


@pytest.mark.parametrize(("low", "signed"), [(-1.0, True), (-1e-3, True), (0.0, False), (0.5, False), (1.5, False)])
def test_codes_have_a_sign_where_something_was_below_zero(low, signed):
    assert chosen({"x": (low, 2.0)}, slots=[slot("x", AUTO)])["x"].grid.signed is signed
    known = slot("x", AUTO, range=(low, 2.0))
    assert chosen({"x": None}, slots=[known])["x"].grid.signed is signed
    constant = {"c": torch.tensor([low, 2.0])}
    assert chosen({}, slots=[slot("c", AUTO, "weight")], weights=constant)["c"].grid.signed is signed
    for fixed in (True, False):  # unless the format says
        fmt = Format(bits=8, zero="any", signed=fixed)
        assert chosen({"x": (low, 2.0)}, slots=[slot("x", fmt)])["x"].grid.signed is fixed


def test_without_statistics_no_sign_can_be_told():
    with pytest.raises(PlanError, match="Tensor 'x' was not calibrated.*quantize again with these overrides"):
        chosen({"x": None}, slots=[slot("x", AUTO)])


@pytest.mark.parametrize("rule", [TIE, {"dtype": ["in0", "out"]}])
def test_tensors_of_one_type_are_signed_as_soon_as_one_is(rule):
    auto = [slot("x", AUTO), slot("y", AUTO)]
    for x, y, signed in (((-1.0, 1.0), (0.0, 1.0), True), ((0.0, 1.0), (-1.0, 1.0), True), ((0, 1), (0, 1), False)):
        made = chosen({"x": x, "y": y}, rule, slots=auto)
        assert (made["x"].grid.signed, made["y"].grid.signed) == (signed, signed)
    alone = chosen({"x": (-1.0, 1.0), "y": (0.0, 1.0)}, slots=auto)
    assert (alone["x"].grid.signed, alone["y"].grid.signed) == (True, False)


def test_tensors_that_cannot_be_of_one_type_are_refused_with_the_types():
    rule, unsigned = {"dtype": ["in0", "out"]}, slot("y", Format(bits=8, zero="any", signed=False))
    with pytest.raises(UnsupportedError, match="Add stores these tensors in one type.*'x' s8, 'y' u8.*same bits"):
        chosen({"x": (-1.0, 1.0), "y": (0.0, 1.0)}, rule, slots=[unsigned])
    with pytest.raises(UnsupportedError, match="'x' s8, 'y' s4"):
        chosen({"x": (-1.0, 1.0), "y": (0.0, 1.0)}, rule, slots=[slot("y", Format(bits=4, zero="any"))])


# ---------------------------------------------------------------- what is refused, what is said


def test_numbers_beyond_what_kernels_multiply_are_refused_by_name():
    most = GREATEST_SCALE * 255
    assert chosen({"x": (0.0, 0.99 * most)})["x"].quantized
    with pytest.raises(DataError, match=r"The numbers of 'x' are too large.*up to about .*scaled as in training"):
        chosen({"x": (0.0, 1.01 * most)})


def test_tensors_in_float_stand_under_the_first_node_that_has_them():
    nodes = node("y = Linear(x, w)", layer="first"), node("z = Relu(y)", layer="second")
    floats = {"y": "it is kept", "w": "the platform stores it in float", "x": "known", "lost": "nobody has it"}
    made = chosen({"x": (0.0, 1.0)}, floats=floats, nodes=nodes, weights={"w": torch.ones(2, 2)}, op="Linear")
    assert made["x"].quantized and made["x"].why == ""
    in_float = {k: (t.role, t.layer, t.op, t.why) for k, t in made.items() if not t.quantized}
    assert in_float == {
        "y": ("activation", "first", "Linear", "it is kept"),
        "w": ("weight", "first", "Linear", "the platform stores it in float"),
        "lost": ("activation", "", "", "nobody has it"),
    }


def test_earlier_numbers_are_kept_where_the_format_is_the_same():
    first = chosen({"x": (-1.0, 1.0), "y": (0.0, 3.0)})
    again = chosen({"x": (-7.0, 7.0), "y": (0.0, 7.0)}, known={"x": first["x"]})
    assert (step(again["x"]), step(again["y"])) == (pytest.approx(2.0), pytest.approx(7.0))


def test_a_tensor_that_is_tied_to_floats_alone_is_tied_to_none():
    graph = Graph([], [], [], {k: Value(k, (None, 4)) for k in "xy"}, {})
    tie = constraint(TIE, in0="x", out="y")
    assignment = Assignment(tensors={"x": slot("x")}, constraints=(tie,), floats={"y": "it is kept"})
    made = choose(
        graph, assignment, {"x": TensorStats("x", low=-1.0, high=1.0, batches=2)}, RangeRules(rule="no_clipping")
    )
    assert made["x"].origin == "no_clipping over 2 batches" and not made["y"].quantized


# ---------------------------------------------------------------- sums of quantized weights


def summing(*rules):
    linear = {"match": ["Linear", "Conv2D"], "use": [{"in": "a8", "w": "w8", "out": "a8"}], "rules": list(rules)}
    w8 = {"bits": 8, "range": "narrow", "per": "channel"}
    return platform_of(linear, formats={"a8": {"bits": 8, "zero": "any"}, "w8": w8})


SUM = {"wsum_max": 508}  #: 4 times 127


def test_sums_that_no_weights_can_exceed_are_left_out_of_the_plan():
    """Of 3 and 4 inputs a channel cannot exceed 508, of 5, and of a 1 x 5 window, it can."""
    torch.manual_seed(0)
    layers = [nn.Linear(n, m) for n, m in ((3, 4), (4, 5), (5, 8))]
    net = sequential(*layers, nn.Unflatten(1, (1, 1, 8)), nn.Conv2d(1, 2, (1, 4)), nn.Conv2d(2, 1, (1, 5)))
    result = quantized(net, torch.randn(8, 3), summing(SUM))
    assert dict(result.plan.sums) == {"2.weight": 508, "5.weight": 508}
    for name in (name for name in result.plan.tensors if name.endswith("weight")):
        values = result.plan[name].quantize(result.graph.weights[name])
        assert int(values.abs().flatten(1).sum(1).max()) <= 508


def five_ones(*rules):
    """The quantized weights of one channel of five ones: 127 each, unless the scale grows."""
    net = nn.Linear(5, 1)
    nn.init.ones_(net.weight)
    result = quantized(net, torch.randn(8, 5), summing(*rules))
    return result.plan["weight"].quantize(result.graph.weights["weight"])[0].tolist()


def test_a_sum_that_other_rules_make_too_large_again_is_refused():
    small = {"mono": {"w": 1}, "max": 1 / 127}
    says = "The quantized values of 'weight' sum to more than 508, and other rules forbid a larger scale. Got: 635."
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        five_ones(SUM, small)
    assert five_ones({"wsum_max": 635}, small) == five_ones({**SUM, "hard": False}) == [127] * 5
    assert sum(five_ones(SUM)) <= 508


# ---------------------------------------------------------------- data that are zero, or nearly

LITERT = [
    n for n in names() for r in load_platform(n).runtimes[:1] if entry("runtime", r).declares.suffix == ".tflite"
]  # fmt: skip
LAYERS = {
    "depthwise": (lambda: nn.Conv2d(32, 32, 1, groups=32), (32, 8, 8)),
    "conv": (lambda: nn.Conv2d(32, 32, 1), (32, 8, 8)),
    "linear": (lambda: nn.Linear(32, 32), (32,)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 32, 2, 2), (32, 8, 8)),
}


def nearly_dead(kind, most):
    """A network whose ReLU is open for one value a channel, by so much; and its data, the last batch unseen."""
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer, data = make(), [torch.randn(4, *shape) for _ in range(3)]
    first = nn.Conv2d(32, 32, 1) if len(shape) == 3 else nn.Linear(32, 32)
    model = sequential(first, layer, nn.ReLU())
    with torch.no_grad():
        layer.weight.mul_(30)
        layer.bias.zero_()
        y = torch.cat([model[:2](d) for d in data[:2]])
        layer.bias.copy_(most - y.transpose(0, 1).flatten(1).amax(1))
    return model, data


@pytest.mark.thinned(3)
@pytest.mark.parametrize("platform", LITERT)
@pytest.mark.parametrize("most", [-1.0, 1e-6])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_relu_that_hardly_opens_is_computed_as_simulated(platform, kind, most):
    model, data = nearly_dead(kind, most)
    check = quantized(model, data[:2], platform).verify([data[2] * 2])
    assert check.sound and (check.integers or not check.rows), check.summary()


def test_zeros_throughout_get_a_grid_of_unit_size_and_do_not_widen_what_they_are_tied_to():
    dead, x = nn.Linear(4, 4), torch.randn(8, 4).clamp(-0.1, 0.1)
    nn.init.constant_(dead.bias, -100.0)
    join = model_of(lambda m, x: torch.cat([m.dead(x).relu(), x], 1), dead=dead)
    plan = quantized(join, x, "tflite_int8", rule="no_clipping").plan
    assert float(plan["cat"].scale) == float(plan["relu"].scale) == pytest.approx(0.2 / 255)
    plan = quantized(sequential(dead, nn.ReLU()), x, "tflite_int8").plan
    assert float(plan["relu"].scale) == pytest.approx(1 / 255)


def test_of_two_equal_moves_the_one_that_clips_nothing_is_taken():
    model, data = nearly_dead("linear", 1e-6)
    plan = quantized(model, data[:2], "ethos_u", rule="no_clipping").plan
    seen = float(torch.cat([model[0](d).detach() for d in data[:2]]).abs().max())
    assert float(plan["linear"].scale) * 255 >= seen  # the ReLU's scale was raised, its input's was not lowered
    assert "moved to satisfy" in plan.tensors["relu"].origin


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e9])
def test_the_scale_of_a_bias_keeps_the_bounds_of_the_chip(size):
    """The shift of Vitis's biases has an end: s_bias / s_out >= 2^-16, and at most 2^16 s_in s_w."""
    conv = nn.Conv2d(3, 4, 3)
    nn.init.uniform_(conv.bias, -size, size)
    plan = quantized(conv, [images(4)], "vitis_dpu").plan
    x, w, b, out = (float(plan[t].scale.max()) for t in ("input", "weight", "bias", "conv2d"))
    assert b / out >= 2**-16 and 2**-16 <= b / (x * w) <= 2**16
