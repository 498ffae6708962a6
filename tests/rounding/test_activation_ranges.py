"""Ranges of activations that are chosen by the effect of their errors on the outputs."""

import itertools
from dataclasses import replace

import pytest
import torch

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import FEW_BITS
from chipfit.plan.record import Plan
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.ranges import choose
from chipfit.ranges.search import Sample
from chipfit.rounding.methods import gptq
from chipfit.rounding.methods.gptq import free_low_bit_activations, with_weighted_ranges
from chipfit.rounding.sequential_reconstruction import range_of_scores
from tests.build import plan_of, randn, stored

A4 = stored(1.0, bits=4, signed=False)


def test_low_scores_are_clipped_and_the_highest_keep_their_codes():
    """Most classes are hopeless at -40; among the others a step of 40 / 15 would make the first two alike."""
    x = torch.tensor([[5.0, 3.0, 0.0, -40.0], [1.0, 4.5, 3.5, -40.0]])
    scale, zero = range_of_scores(A4, [x[:1], x[1:]], [x[:1], x[1:]])
    low, high = -int(zero) * float(scale), (15 - int(zero)) * float(scale)
    assert high == pytest.approx(5.0, abs=0.6) and -13 < low <= -4
    p = x.log_softmax(1)

    def loss(s, z):
        q = ((x / s).round() + z).clamp(0, 15)
        return float((p.exp() * (p - ((q - z) * s).log_softmax(1))).sum())

    tried = []
    for a, b in itertools.product(range(21), range(10, 21)):  # ends in steps of a twentieth
        lo, hi = -40 * a / 20, 5 * b / 20
        s = (hi - lo) / 15
        tried.append(loss(s, min(max(round(-lo / s), 0), 15)))
    assert loss(float(scale), int(zero)) == pytest.approx(min(tried), rel=1e-3)


def test_ranges_of_few_bits_are_free_where_no_rule_says_them():
    others = {"wide": stored(bits=8), "floor": stored(bits=4, rounding="floor"), "channels": stored([1.0, 2], axis=1)}
    closed = dict.fromkeys(("weight", "zeros", "tied", "fixed"), A4)
    plan = plan_of({"weight": "weight"}, yes=A4, **others, **closed, float=None, also=A4)
    plan = replace(plan, zeros=("zeros",), ties=(("tied", "yes2"),), fixed=("fixed",))
    assert free_low_bit_activations(plan) == ["yes", "also"]
    assert free_low_bit_activations(plan_of(x=stored(bits=FEW_BITS), y=stored(bits=FEW_BITS + 1))) == ["x"]


def test_only_activations_that_vary_are_placed_anew():
    plan = plan_of(x=A4, y=A4)  # one never changes, of the other nothing is known
    assert with_weighted_ranges(None, plan, {"x": TensorStats("x", 1.0, 1.0)}, [], seed=0) is plan


def placed(monkeypatch, plan, weighed, **stats):
    """The plan by errors that are weighed like this, and what importance was asked of."""
    asked = []
    monkeypatch.setattr(gptq, "importance", lambda graph, *given: asked.append(given) or weighed)
    known = {n: TensorStats(n, low, high) for n, (low, high) in stats.items()}
    return with_weighted_ranges("network", plan, known, "batches", seed=5), asked


#: multiples of a fifth up to 3 matter, the greatest value hardly
FIFTHS = Sample(
    torch.tensor([[*(0.2 * k for k in range(16)), 9.0]]),
    torch.tensor([[*[1.0] * 16, 1e-6]]),
    *torch.tensor([[0.0], [9.0]], dtype=torch.float64),
)


def test_a_range_serves_the_values_whose_errors_matter(monkeypatch):
    plan = plan_of(x=A4, y=A4, z=A4, float_edges={("x", "n")})
    new, (asked,) = placed(monkeypatch, plan, {"x": FIFTHS}, x=(0.0, 9.0), y=(-1.0, 1.0))
    edges, names, stats, batches, seed = asked
    assert (edges, names, batches, seed) == (plan.float_edges, ["x", "y"], "batches", 5) and set(stats) == {"x", "y"}
    assert float(new["x"].scale) == pytest.approx(0.2, rel=5e-3) and new["x"].scale.shape == ()
    assert int(new["x"].zero_point) == 0
    assert new.tensors["x"].origin == "least squared error weighed by squared gradients"
    assert all(new.tensors[n] is plan.tensors[n] for n in "yz") and float(plan["x"].scale) == 1


@pytest.mark.parametrize("low, moves", [(-1.0, False), (-3.0, True)])
def test_a_range_that_a_rule_of_the_platform_forbids_is_not_taken(low, moves, monkeypatch):
    rule = ScaleBound(op="Add", terms=(("x", 1),), low=low)
    plan: Plan = replace(plan_of(x=A4), limits=(rule,))
    new, _ = placed(monkeypatch, plan, {"x": FIFTHS}, x=(0.0, 9.0))
    assert (new is plan) is not moves


def test_where_all_values_matter_alike_the_range_is_that_of_the_least_squares(monkeypatch):
    x = randn(400).pow(3)
    low, high = x.double().aminmax()
    weighed = Sample(x.view(1, -1), torch.ones(1, 400), low.view(1), high.view(1))
    new, _ = placed(monkeypatch, plan_of(x=A4), {"x": weighed}, x=(float(low), float(high)))
    squares, cubes = (choose(x, A4.grid, rule=rule) for rule in ("mse", "lp(p=3)"))
    assert float(squares.scale) != float(cubes.scale)
    assert float(new["x"].scale) == float(squares.scale) and int(new["x"].zero_point) == int(squares.zero_point)
