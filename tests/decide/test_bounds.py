"""What training has to keep of a platform's rules: bounds on scales, dictated numbers, zero points, sums of weights."""

from __future__ import annotations

import math

import pytest
import torch

from chipfit.decide.constraints import Constraint, plan_limits
from chipfit.graph.ir import Graph
from chipfit.plan.record import TensorPlan
from chipfit.platform.schema import Rule
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored

#: 3 channels of 2 * 5 numbers
WEIGHT = torch.ones(3, 2, 5, 1)
SYMMETRIC = Grid(bits=8, qmin=-127, qmax=127)


def plan_of(**grids):
    roles = {"x": "activation", "y": "activation", "w": "weight", "b": "bias"}

    def entry(name, grid):
        stored = None
        if grid is not None:
            scale = torch.tensor(0.5)
            stored = Stored(format="f", grid=grid, scale=scale, zero_point=torch.zeros_like(scale, dtype=torch.int32))
        return TensorPlan(name=name, role=roles[name], op="Conv2D", stored=stored)

    return {name: entry(name, grid) for name, grid in grids.items()}


def limits(rules, tensors=None, op="Conv2D", weight=WEIGHT):
    slots = {"in0": ("x",), "ins": ("x",), "w": ("w",), "b": ("b",), "out": ("y",), "outs": ("y",)}
    constraint = Constraint(op=op, rules=tuple(Rule(**r) for r in rules), slots=slots)
    tensors = tensors or plan_of(x=SYMMETRIC, w=SYMMETRIC, b=Grid(bits=32, qmin=-(2**31), qmax=2**31 - 1), y=SYMMETRIC)
    return plan_limits(Graph([], [], [], {}, {"w": weight}), [constraint], tensors)


def test_no_rule_bounds_nothing():
    assert limits([]) == {"limits": (), "fixed": (), "zeros": (), "sums": ()}


def test_a_product_of_scales_keeps_its_bounds():
    found = limits([{"mono": {"in0": 1, "w": 1, "out": -1}, "min": 0.25, "max": 8.0}] * 2)["limits"]
    assert found == (ScaleBound(op="Conv2D", terms=(("x", 1), ("w", 1), ("y", -1)), low=-2.0, high=3.0),)
    (one,) = limits([{"mono": {"w": 1}, "max": 4.0}])["limits"]
    assert (one.low, one.high) == (-math.inf, 2.0)
    (one,) = limits([{"mono": {"w": 1}, "min": 4.0}])["limits"]
    assert (one.low, one.high) == (2.0, math.inf)


def test_biases_and_preferences_bound_nothing():
    assert limits([{"mono": {"b": 1, "w": -1}, "eq": 1}, {"mono": {"w": 1}, "max": 4.0, "hard": False}])["limits"] == ()


def test_the_least_scale_of_the_hardware_is_a_bound():
    least = Grid(bits=8, qmin=-127, qmax=127, scale_min=2.0**-9)
    found = limits([], plan_of(x=SYMMETRIC, w=least))["limits"]
    assert found == (ScaleBound(op="Conv2D", terms=(("w", 1),), low=-9.0),)
    assert limits([], plan_of(x=None, b=least))["limits"] == ()


def test_dictated_numbers_stay_and_only_of_what_is_stored():
    rule = {"fix": "out", "scale": 0.25, "zp": 0}
    assert limits([rule])["fixed"] == ("y",)
    assert limits([rule], plan_of(x=SYMMETRIC, y=None))["fixed"] == ()


def test_zero_points_stay_and_only_of_what_is_stored():
    assert limits([{"zero": "out", "eq": 0}, {"zero": "in0", "eq": [0, 128]}])["zeros"] == ("x", "y")
    assert limits([{"zero": "out", "eq": 0, "hard": False}])["zeros"] == ()
    assert limits([{"zero": "out", "eq": 0}], plan_of(x=SYMMETRIC, y=None))["zeros"] == ()


@pytest.mark.parametrize(
    ("grid", "most", "kept"),
    [
        (SYMMETRIC, 1269.0, True),  # of one channel, 10 codes of at most 127 add up to 1270
        (SYMMETRIC, 1270.0, False),
        (Grid(bits=8, qmin=-128, qmax=127), 1279.0, True),
        (Grid(bits=8, qmin=-128, qmax=127), 1280.0, False),
        (Grid(bits=8, qmin=0, qmax=255), 2549.0, True),
        (Grid(bits=8, qmin=0, qmax=255), 2550.0, False),
    ],
)
def test_a_sum_of_weights_is_watched_where_their_codes_can_exceed_it(grid, most, kept):
    assert limits([{"wsum_max": most}], plan_of(w=grid))["sums"] == ((("w", most),) if kept else ())


def test_a_sum_is_counted_along_what_one_channel_adds_up():
    # a linear layer's [3, 10] has its channels first; a matrix product's [10, 3] last: 10 * 127 of each
    assert limits([{"wsum_max": 1269.0}], plan_of(w=SYMMETRIC), "Linear", torch.ones(3, 10))["sums"]
    assert not limits([{"wsum_max": 1270.0}], plan_of(w=SYMMETRIC), "Linear", torch.ones(3, 10))["sums"]


def test_the_least_of_several_sums_holds_and_preferences_do_not():
    wide = plan_of(w=SYMMETRIC)
    assert limits([{"wsum_max": 900.0}, {"wsum_max": 500.0}, {"wsum_max": 700.0}], wide)["sums"] == (("w", 500.0),)
    assert limits([{"wsum_max": 900.0}, {"wsum_max": 500.0, "hard": False}], wide)["sums"] == (("w", 900.0),)
    assert limits([{"wsum_max": 500.0}], plan_of(x=SYMMETRIC, w=None))["sums"] == ()
