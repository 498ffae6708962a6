"""Constraints: ties, dictated scales, bounds on products of scales, and what training has to keep of them."""

import math

import numpy as np
import pytest
import torch

from chipfit.decide.constraints import Constraint, connected_components, dictated_qparams, tie_groups
from chipfit.decide.legality import ProductBound, plan_limits, product_bounds
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Rule
from chipfit.quantizers.scale_bounds import ScaleBound
from tests.build import grid, plan_of, stored

SIGMOID = {"fix": "out", "scale": 1 / 256, "zp": -128}
RATIO = {"in0": 1, "out": -1}


def constraint(*rules, op="Add", attrs=None, **slots):
    """Rules over tensors: `a="x"` puts x in slot a."""
    tensors = {k: (v,) if isinstance(v, str) else v for k, v in slots.items()}
    return Constraint(
        op=op, rules=tuple(r if isinstance(r, Rule) else Rule(**r) for r in rules), slots=tensors, attrs=attrs or {}
    )


def test_slots_of_an_operator_stand_for_each_other():
    c = constraint(in0="a", in1="b", in2="c", out="y")
    assert (c.of("ins"), c.of("outs"), c.of("out"), c.of("w")) == (("a", "b", "c"), ("y",), ("y",), ())
    c = constraint(in0="a", ins=("a", "z"), out="y", outs=("y", "v"))
    assert (c.of("ins"), c.of("outs"), c.of("in0")) == (("a", "z"), ("y", "v"), ("a",))
    rules = [{"tie": ("in0", "out")}, {"dtype": ("ins", "out")}, {"fix": "out", "scale": 0.5, "zp": 3}]
    c = constraint(*rules, *({**r, "hard": False} for r in rules), in0="a", out="y")
    assert (c.tied, c.same_type, c.dictated) == ([["a", "y"]], [["a", "y"]], [("y", (0.5, 3))])


def test_groups_grow_together_over_common_members():
    assert connected_components([["b", "a"], ["c", "d"], ["e"], ["d", "b"], []]) == (("a", "b", "c", "d"), ("e",))
    assert tie_groups([constraint({"tie": ("in0", "out")}, in0="a", out="a")]) == ()


def test_a_dictated_scale_holds_for_all_that_is_tied_to_it():
    sigmoid = constraint(SIGMOID, op="Sigmoid", in0="x", out="a")
    concat = constraint({"tie": ("ins", "out")}, op="Concat", ins=("a", "b", "c"), out="y")
    found = dictated_qparams([sigmoid, concat, constraint(ins=("b", "z"), out="s")])
    assert found == dict.fromkeys(("a", "b", "c", "y"), (1 / 256, -128))


def test_two_dictated_scales_of_one_tensor_or_of_tied_ones_are_refused():
    tanh = constraint({"fix": "out", "scale": 1 / 128, "zp": 0}, op="Tanh", out="t")
    concat = constraint({"tie": ("ins", "out")}, op="Concat", ins=("s", "t"), out="y")
    with pytest.raises(UnsupportedError, match=r"'s' by Sigmoid.*'t' by Tanh"):
        dictated_qparams([constraint(SIGMOID, op="Sigmoid", out="s"), tanh, concat])
    half, quarter = ({"fix": "in0", "zp": 0, "scale": s} for s in (0.5, 0.25))
    with pytest.raises(UnsupportedError, match=r"Tensor 'a' is.*0.5.*by Add.*0.25.*by Mul"):
        dictated_qparams([constraint(half, in0="a"), constraint(quarter, op="Mul", in0="a")])


# ---------------------------------------------------------------- products of scales


@pytest.mark.parametrize(
    "low, high, total, holds",
    [
        (-1.0, 2.0, -1.0, True),
        (-1.0, 2.0, 2.0, True),
        (-1.0, 2.0, -1.0 - 1e-11, False),
        (-1.0, 2.0, 2.0 + 1e-11, False),
        (-1.0, math.inf, 300.0, True),
        (1.5, 1.5, 1.5 + 2e-7, True),
        (1.5, 1.5, 1.5 - 2e-7, True),
        (1.5, 1.5, 1.5 + 3e-7, False),
        (1.5, 1.5, 1.5 - 3e-7, False),
    ],
)
def test_a_bound_holds_up_to_rounding_and_an_equality_up_to_two_of_float32(low, high, total, holds):
    bound = ProductBound(op="Add", terms=(("a", 1), ("b", -2)), low=low, high=high, rule=Rule(mono=RATIO, eq=1))
    assert bound.holds({"a": np.array(total + 8.0), "b": np.array(4.0)}) is holds
    assert bound.holds({"a": np.array([low + 8.0, total + 8.0]), "b": np.array([4.0])}) is holds


def test_a_bound_sums_exponents_of_each_channel():
    bound = ProductBound(op="Add", terms=(("a", 2), ("w", -1)), rule=Rule(mono=RATIO, eq=1))
    log = {"a": np.array(3.0), "w": np.array([1.0, 2.0, 4.0])}
    assert bound.total(log).tolist() == [5.0, 4.0, 2.0]
    assert ProductBound(op="Add", terms=(), rule=bound.rule).total({}) == 0.0


@pytest.mark.parametrize(
    "slots, mono, terms",  # of each bound: a tensor and its exponent, and so on
    [
        ({"in0": "a", "out": "b"}, {"in0": 1, "out": -1}, ["a 1 b -1"]),
        ({"ins": "abc", "out": "y"}, {"ins": 2, "out": -1}, ["a 2 y -1", "b 2 y -1", "c 2 y -1"]),
        ({"ins": "ab", "outs": "yz"}, {"ins": 1, "outs": -1}, ["a 1 y -1", "b 1 z -1"]),
        ({"ins": "abc", "outs": "yz"}, {"ins": 1, "outs": -1}, ["a 1 y -1", "b 1 z -1", "c 1 z -1"]),
        ({"ins": "afc", "out": "y"}, {"ins": 1, "out": 1}, ["a 1 y 1", "c 1 y 1"]),  # f stays float
        ({"ins": "f", "out": "y"}, {"ins": 1, "out": 1}, []),
        ({"in0": "a"}, {"in0": 1, "out": 1}, []),
    ],
)
def test_slots_of_several_tensors_are_paired_in_order(slots, mono, terms):
    rules = [{"mono": mono, "max": 1.0, "hard": False}, {"tie": ("ins", "out")}, {"mono": mono, "min": 0.5, "max": 4.0}]
    tensors = {slot: tuple(names) for slot, names in slots.items()}
    found = product_bounds([constraint(*rules, op="Mul", **tensors)], {"a", "b", "c", "y", "z"})
    assert [" ".join(f"{t} {e}" for t, e in b.terms) for b in found] == terms
    assert all((b.op, b.low, b.high, b.rule.min) == ("Mul", -1.0, 2.0, 0.5) for b in found)


@pytest.mark.parametrize(
    "rule, attrs, low, high",
    [
        ({"max": 8.0}, {}, -math.inf, 3.0),
        ({"min": 0.25}, {}, -2.0, math.inf),
        ({"eq": 0.5}, {}, -1.0, -1.0),
        ({"min": 0.25, "max": 8.0, "times": "k"}, {"k": 2.0}, -3.0, 2.0),
        ({"min": 0.25, "max": 8.0, "times": "k"}, {}, -2.0, 3.0),  # an attribute that is not there counts once
        ({"min": 0.25, "max": 8.0, "times": "k"}, {"k": 0.0}, -math.inf, math.inf),
        ({"min": -4.0, "max": 8.0, "times": "k"}, {"k": -0.5}, -math.inf, 3.0),
        ({"lt": 8.0}, {}, -math.inf, 3.0 - 2e-6),
        ({"lt": 8.0, "max": 4.0}, {}, -math.inf, 2.0),
        ({"lt": 4.0, "max": 8.0}, {}, -math.inf, 2.0 - 2e-6),
        ({"lt": 8.0, "times": "k"}, {"k": 4.0}, -math.inf, 1.0 - 2e-6),
        ({"lt": 8.0, "min": 0.5}, {}, -1.0, 3.0 - 2e-6),
    ],
)
def test_bounds_in_octaves(rule, attrs, low, high):
    (bound,) = product_bounds([constraint({"mono": {"in0": 1}, **rule}, op="Relu", attrs=attrs, in0="a")], {"a"})
    assert (bound.low, bound.high) == (low, pytest.approx(high, abs=1e-9))


# ---------------------------------------------------------------- what training has to keep

#: 3 channels of 2 * 5 numbers
WEIGHT = torch.ones(3, 2, 5, 1)
SYMMETRIC = grid(low=-127)
ALL = {"x": SYMMETRIC, "w": SYMMETRIC, "b": grid(32), "y": SYMMETRIC}


def limits(rules, grids=ALL, op="Conv2D", weight=WEIGHT):
    """Limits of one operator over x, w, b and y; None leaves a tensor in float."""
    c = constraint(*rules, op=op, in0="x", ins="x", w="w", b="b", out="y", outs="y")
    tensors = plan_of(**{n: g and stored(on=g) for n, g in grids.items()}).tensors
    graph = Graph([], [], [], {}, {"w": weight})
    return plan_limits(graph, [c], {n: t.with_(op="Conv2D") for n, t in tensors.items()})


def test_no_rule_bounds_nothing():
    assert limits([]) == {"limits": (), "fixed": (), "zeros": (), "sums": ()}


def test_a_product_of_scales_keeps_its_bounds():
    found = limits([{"mono": {"in0": 1, "w": 1, "out": -1}, "min": 0.25, "max": 8.0}] * 2)["limits"]
    assert found == (ScaleBound(op="Conv2D", terms=(("x", 1), ("w", 1), ("y", -1)), low=-2.0, high=3.0),)
    for rule, ends in (({"max": 4.0}, (-math.inf, 2.0)), ({"min": 4.0}, (2.0, math.inf))):
        (one,) = limits([{"mono": {"w": 1}, **rule}])["limits"]
        assert (one.low, one.high) == ends
    assert limits([{"mono": {"b": 1, "w": -1}, "eq": 1}, {"mono": {"w": 1}, "max": 4.0, "hard": False}])["limits"] == ()


def test_the_least_scale_of_the_hardware_is_a_bound():
    least = grid(low=-127, scale_min=2.0**-9)
    assert limits([], {"x": SYMMETRIC, "w": least})["limits"] == (ScaleBound(op="Conv2D", terms=(("w", 1),), low=-9.0),)
    assert limits([], {"x": None, "b": least})["limits"] == ()


def test_dictated_scales_and_zero_points_of_quantized_tensors_stay():
    fix, zero = {"fix": "out", "scale": 0.25, "zp": 0}, {"zero": "out", "eq": 0}
    assert limits([fix])["fixed"] == ("y",)
    assert limits([zero, {"zero": "in0", "eq": [0, 128]}])["zeros"] == ("x", "y")
    assert limits([{**zero, "hard": False}])["zeros"] == ()
    found = limits([fix, zero], {"x": SYMMETRIC, "y": None})
    assert (found["fixed"], found["zeros"]) == ((), ())


@pytest.mark.parametrize("low, high, greatest", [(-127, 127, 1270.0), (-128, 127, 1280.0), (0, 255, 2550.0)])
def test_a_sum_of_weights_is_limited_if_their_grid_can_exceed_it(low, high, greatest):
    """Ten numbers of one channel."""
    own = {"w": grid(low=low, high=high)}
    assert limits([{"wsum_max": greatest - 1}], own)["sums"] == (("w", greatest - 1),)
    assert limits([{"wsum_max": greatest}], own)["sums"] == ()


def test_a_sum_is_counted_along_what_one_channel_adds_up():
    """A linear layer's [3, 10] has its channels first: 10 * 127 of each."""
    for most, count in ((1269.0, 1), (1270.0, 0)):
        assert len(limits([{"wsum_max": most}], {"w": SYMMETRIC}, "Linear", torch.ones(3, 10))["sums"]) == count


def test_the_least_of_several_sums_holds_and_preferences_do_not():
    sums = [{"wsum_max": 900.0}, {"wsum_max": 500.0}, {"wsum_max": 700.0}]
    assert limits(sums)["sums"] == (("w", 500.0),)
    assert limits([sums[0], {**sums[1], "hard": False}])["sums"] == (("w", 900.0),)
    assert limits(sums, {"x": SYMMETRIC, "w": None})["sums"] == ()
