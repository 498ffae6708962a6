"""Scales of biases: the product where the chip adds in its accumulator, and room for every bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.constraints import Constraint, copies
from chipfit.decide.scales import choose
from chipfit.decide.statistics import needs
from chipfit.errors import DataError, PlanError, UnsupportedError
from chipfit.graph.ir import Graph, Node, Value
from chipfit.pipeline import quantize
from chipfit.platform.schema import Format, Rule
from chipfit.ranges.qparams import GREATEST_SCALE
from tests.steps import begin


class _Tied(nn.Module):
    """Two layers share a weight; the second one's bias is far too large for the first guess of its scale."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        with torch.no_grad():
            self.a.weight.mul_(1e-6)
            self.b.bias.fill_(3e4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@pytest.fixture(scope="module")
def tied():
    torch.manual_seed(0)
    return quantize(_Tied(), [torch.randn(16, 4)], progress=False)


def test_a_weight_scale_grows_until_the_bias_fits_its_codes(tied):
    t = tied.plan.tensors["b.bias"]
    assert tied.plan.tensors["a.weight"].origin.endswith("enlarged to store the bias")
    assert (tied.graph.weights["b.bias"] / t.scale).abs().max() <= t.grid.qmax


def test_every_reader_of_a_tied_weight_has_its_bias_at_the_final_product(tied):
    plan, readers = tied.plan, [n for n in tied.graph if n.op == "Linear"]
    assert len(readers) == 2
    for n in readers:
        x, w, b = (plan.tensors[i] for i in n.inputs)
        assert torch.equal(b.scale, x.scale * w.scale)


@pytest.mark.parametrize("platform", ["vitis_dpu", "qualcomm_aic100"])
def test_an_eight_bit_bias_has_a_range_of_its_own(platform):
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), torch.randn(4, 2, 6, 6)
    plan = quantize(model, [x], platform, progress=False).plan
    b, w = plan.tensors["0.bias"], plan.tensors["0.weight"]
    assert b.grid.bits == 8
    assert b.scale * b.grid.qmax <= 4 * model[0].bias.detach().abs().max()
    assert "enlarged" not in w.origin


def test_a_histogram_is_collected_only_where_a_range_is_searched():
    steps = begin(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4), "tflite_int8")
    a, dictated = steps.assignment, "tanh"  # 1/128 on this chip
    assert a.tensors[dictated].rule is None

    def searched(rule, z=None, slots=a.tensors):
        return {t for t, need in needs(replace(a, tensors=slots), rule, z).items() if need.histogram}

    others = {t for t, s in a.tensors.items() if s.role == "activation"} - {dictated}
    assert searched("mse") == others and len(others) == 3
    assert searched("no_clipping") == set() and searched("no_clipping", 3.0) == others
    own = {**a.tensors, "linear": replace(a.tensors["linear"], rule="kl")}
    assert searched("no_clipping", slots=own) == {"linear"}
    own["linear"] = replace(a.tensors["linear"], rule="no_clipping")
    assert searched("mse", slots=own) == others - {"linear"}


# ---------------------------------------------------------------- on paper

A8 = Format(bits=8, zero="any")  # -128..127
AUTO = Format(bits=8, zero="any", signed="auto")
TIE = {"tie": ["in0", "out"]}


def slot(name, fmt=A8, role="activation", **facts):
    return TensorSpec(name=name, role=role, format_name="a8", format=fmt, **facts)


def chosen(ranges, *rules, slots=(), op="Add", weights=None, floats=None, nodes=(), order=("in0", "out"), **options):
    """The tensors of one operator that reads the first of `ranges` and writes the second, by their extremes."""
    names = list(ranges)
    stats = {k: TensorStats(k, low=r[0], high=r[1], count=4, batches=2) for k, r in ranges.items() if r is not None}
    own = {s.name: s for s in slots}
    slots = {k: own.get(k, slot(k)) for k in [*names, *(k for k in own if k not in names)]}
    bound = {where: (k,) for where, k in zip(order, slots, strict=False)}
    bound |= {"ins": tuple(k for w, (k,) in bound.items() if w.startswith("in")), "outs": bound.get("out", ())}
    constraint = Constraint(op=op, rules=tuple(Rule(**r) for r in rules), slots=bound)
    values = {k: Value(k, (None, 4)) for k in slots}
    graph = Graph(list(nodes), [], [], values, weights or {})
    assignment = Assignment(tensors=slots, constraints=(constraint,), floats=floats or {})
    return choose(graph, assignment, stats, **{"rule": "no_clipping", "weight_rule": "no_clipping", **options})


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


def test_tensors_that_nothing_ties_keep_their_own():
    made = chosen({"x": (-1.0, 1.0), "y": (0.0, 3.0)}, {**TIE, "hard": False})
    assert (step(made["x"]), step(made["y"])) == (pytest.approx(2.0), pytest.approx(3.0))
    assert made["x"].origin == made["y"].origin == "no_clipping over 2 batches"


def test_three_tied_tensors_name_each_other():
    made = chosen(
        {"x": (-1.0, 0.0), "v": (0.0, 1.0), "y": (0.0, 2.0)}, {"tie": ["ins", "out"]}, order=("in0", "in1", "out")
    )
    assert all(step(made[k]) == pytest.approx(3.0, rel=0.01) for k in "xvy")
    assert made["v"].origin.endswith(", tied with 'x', 'y'") or made["v"].origin.endswith(", tied with 'y', 'x'")


@pytest.mark.parametrize("zp", [0, -128])
def test_what_the_platform_dictates_is_everybodys(zp):
    made = chosen({"x": (-1.0, 1.0), "y": (0.0, 3.0)}, TIE, {"fix": "out", "scale": 0.125, "zp": zp})
    for k in "xy":
        assert (float(made[k].scale), int(made[k].stored.zero_point)) == (0.125, zp)
    assert made["y"].origin == made["x"].origin == "fixed by the platform"


def test_what_was_zero_throughout_says_nothing_about_the_others():
    made = chosen({"x": (0.0, 0.0), "y": (-0.01, 0.01)}, TIE)
    assert step(made["x"]) == step(made["y"]) == pytest.approx(0.02)
    for seen in ((0.0, 0.5), (-0.5, 0.0)):
        assert step(chosen({"x": seen, "y": (-0.01, 0.01)}, TIE)["y"]) == pytest.approx(0.51, rel=0.01)
    both = chosen({"x": (0.0, 0.0), "y": (0.0, 0.0)}, TIE)
    assert float(both["x"].scale) == float(both["y"].scale) > 0


def test_a_constant_of_zeros_says_nothing_about_the_others():
    for fill, top in ((0.0, 0.02), (5.0, 5.01)):
        constant = slot("c", role="weight")
        made = chosen({"y": (-0.01, 0.01)}, TIE, slots=[constant], weights={"c": torch.full((4,), fill)})
        assert step(made["y"]) == step(made["c"]) == pytest.approx(top, rel=1e-3)


def test_a_range_known_beforehand_counts_though_it_was_zero_and_copies_have_it():
    wide = slot("x", range=(-2.0, 2.0))
    assert step(chosen({"x": None, "y": (-0.01, 0.01)}, TIE, slots=[wide])["y"]) == pytest.approx(4.0)
    # what a reshape copies has that range, whatever was seen of it
    move = Node("m", "Reshape", ("x",), ("y",))
    moved = chosen({"x": None, "y": (-9.0, 9.0)}, TIE, slots=[wide], nodes=[move], op="Reshape")
    assert step(moved["x"]) == step(moved["y"]) == pytest.approx(4.0)
    free = chosen({"x": (-2.0, 2.0), "y": (-9.0, 9.0)}, TIE, nodes=[move], op="Reshape")
    assert step(free["y"]) == pytest.approx(18.0, rel=0.01)


def test_copies_are_what_only_moves_members_of_the_tie():
    nodes = [
        Node("m", "Reshape", ("x",), ("y",)),
        Node("c", "Concat", ("x", "z"), ("j",)),
        Node("a", "Add", ("x", "y"), ("s",)),
        Node("n", "Reshape", ("s",), ("t",)),
    ]
    values = {k: Value(k, (None, 4)) for k in "xyzjst"}
    graph = Graph(nodes, ["x", "z"], [], values, {})
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
    nodes = [
        Node("a", "Linear", ("x", "w"), ("y",), layer="first"),
        Node("b", "Relu", ("y",), ("z",), layer="second"),
    ]
    floats = {"y": "it is kept", "w": "the platform stores it in float", "x": "known", "lost": "nobody has it"}
    made = chosen({"x": (0.0, 1.0)}, floats=floats, nodes=nodes, weights={"w": torch.ones(2, 2)}, op="Linear")
    assert made["x"].quantized and made["x"].why == ""
    said = {k: (t.role, t.layer, t.op, t.why) for k, t in made.items() if not t.quantized}
    assert said == {
        "y": ("activation", "first", "Linear", "it is kept"),
        "w": ("weight", "first", "Linear", "the platform stores it in float"),
        "lost": ("activation", "", "", "nobody has it"),
    }


def test_earlier_numbers_are_kept_where_the_format_is_the_same():
    first = chosen({"x": (-1.0, 1.0), "y": (0.0, 3.0)})
    again = chosen({"x": (-7.0, 7.0), "y": (0.0, 7.0)}, known={"x": first["x"]})
    assert (step(again["x"]), step(again["y"])) == (pytest.approx(2.0), pytest.approx(7.0))


def test_a_tensor_that_is_tied_to_floats_alone_is_tied_to_none():
    constraint = Constraint(op="Add", rules=(Rule(**TIE),), slots={"in0": ("x",), "out": ("y",)})
    assignment = Assignment(tensors={"x": slot("x")}, constraints=(constraint,), floats={"y": "it is kept"})
    graph = Graph([], [], [], {k: Value(k, (None, 4)) for k in "xy"}, {})
    seen = {"x": TensorStats("x", low=-1.0, high=1.0, count=4, batches=2)}
    made = choose(graph, assignment, seen, rule="no_clipping")
    assert made["x"].origin == "no_clipping over 2 batches" and not made["y"].quantized
