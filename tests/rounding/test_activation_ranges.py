"""Grids of activations that are chosen by what they do to the outputs."""

from __future__ import annotations

import pytest
import torch

from chipfit.calibration.collect import TensorStats
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored
from chipfit.ranges import choose
from chipfit.ranges.search import Sample
from chipfit.rounding import activation_ranges
from chipfit.rounding.activation_ranges import (
    are_low_bit_scores,
    free_low_bit_activations,
    range_of_scores,
    with_weighted_ranges,
)

A4 = Grid(bits=4, qmin=0, qmax=15, zero="any")


def tensor(name="x", scale=1.0, role="activation", axis=None, **grid):
    g = Grid(**{"bits": 4, "qmin": 0, "qmax": 15, "zero": "any", **grid})
    s = torch.tensor(scale)
    stored = Stored(format="a", grid=g, scale=s, zero_point=torch.zeros_like(s, dtype=torch.int32), axis=axis)
    return TensorPlan(name=name, role=role, stored=stored)


def test_ends_of_class_scores_are_tried_in_steps_of_a_twentieth():
    assert [round(20 * v, 5) for v in activation_ranges._LOWS] == list(range(21))
    assert [round(20 * v, 5) for v in activation_ranges._HIGHS] == list(range(10, 21))


def test_low_scores_are_clipped_and_the_highest_keep_their_codes():
    """Most classes are hopeless at -40; among the others a step of 40 / 15 would make the first two alike."""
    x = torch.tensor([[5.0, 3.0, 0.0, -40.0], [1.0, 4.5, 3.5, -40.0]])
    scale, zero = range_of_scores(tensor().stored, [x[:1], x[1:]], [x[:1], x[1:]])
    low, high = -int(zero) * float(scale), (15 - int(zero)) * float(scale)
    assert high == pytest.approx(5.0, abs=0.6) and -13 < low <= -4
    p = x.log_softmax(1)

    def loss(s, z):
        q = ((x / s).round() + z).clamp(0, 15)
        return float((p.exp() * (p - ((q - z) * s).log_softmax(1))).sum())

    tried = []
    for a in range(21):
        for b in range(10, 21):
            lo, hi = -40 * a / 20, 5 * b / 20
            s = (hi - lo) / 15
            tried.append(loss(s, min(max(round(-lo / s), 0), 15)))
    assert loss(float(scale), int(zero)) == pytest.approx(min(tried), rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "grid", "scores"),
    [
        ((5, 2), A4, True),
        ((5, 1), A4, False),
        ((5,), A4, False),
        ((5, 2, 2), A4, False),
        ((5, 2), Grid(bits=7, qmin=0, qmax=127), True),
        ((5, 2), Grid(bits=8, qmin=0, qmax=255), False),
        ((5, 2), Grid(bits=4, qmin=0, qmax=1, kind="lut", table=(0.0, 1.0)), False),
    ],
)
def test_scores_are_of_two_classes_at_least_and_of_fewer_than_eight_bits(shape, grid, scores):
    assert are_low_bit_scores(torch.zeros(shape), grid) is scores


def test_grids_of_few_bits_are_open_where_no_rule_says_them():
    tensors = [
        tensor("yes"),
        tensor("weight", role="weight"),
        tensor("wide", bits=8, qmax=255),
        tensor("floor", rounding="floor"),
        tensor("channels", [1.0, 2.0], axis=1),
        tensor("zeros"),
        tensor("tied"),
        tensor("fixed"),
        TensorPlan(name="float", role="activation"),
        tensor("also"),
    ]
    plan = Plan(tensors={t.name: t for t in tensors}, zeros=("zeros",), ties=(("tied", "yes2"),), fixed=("fixed",))
    assert free_low_bit_activations(plan) == ["yes", "also"]
    assert free_low_bit_activations(Plan(tensors={"w": tensor("w", bits=activation_ranges.FEW_BITS, qmax=3)})) == ["w"]
    assert free_low_bit_activations(Plan(tensors={"w": tensor("w", bits=activation_ranges.FEW_BITS + 1, qmax=3)})) == []


def test_only_activations_that_vary_are_placed_anew():
    plan = Plan(tensors={t.name: t for t in (tensor("a"), tensor("b"))})
    still = {"a": TensorStats("a", 1.0, 1.0)}
    assert with_weighted_ranges(None, plan, still, []) is plan  # one never changes, of the other nothing is known


def placed(monkeypatch, plan, weighed, *seed, **stats):
    """By errors that are weighed like this; and what importance was asked of."""
    asked = []
    monkeypatch.setattr(activation_ranges, "importance", lambda graph, *given: asked.append(given) or weighed)
    seen = {n: TensorStats(n, low, high) for n, (low, high) in stats.items()}
    return with_weighted_ranges("network", plan, seen, "batches", *seed), asked


#: multiples of a fifth up to 3 matter, the greatest value hardly
FIFTHS = Sample(
    torch.tensor([[*(0.2 * k for k in range(16)), 9.0]]),
    torch.tensor([[*[1.0] * 16, 1e-6]]),
    torch.tensor([0.0], dtype=torch.float64),
    torch.tensor([9.0], dtype=torch.float64),
)


def test_a_grid_serves_the_values_whose_errors_matter(monkeypatch):
    plan = Plan(
        tensors={t.name: t for t in (tensor("x"), tensor("y"), tensor("z"))}, float_edges=frozenset({("x", "n")})
    )
    new, ((edges, names, stats, batches, seed),) = placed(
        monkeypatch, plan, {"x": FIFTHS}, 5, x=(0.0, 9.0), y=(-1.0, 1.0)
    )
    assert (edges, names, batches, seed) == (plan.float_edges, ["x", "y"], "batches", 5) and set(stats) == {"x", "y"}
    assert float(new["x"].scale) == pytest.approx(0.2, rel=5e-3) and new["x"].scale.shape == ()
    assert (
        int(new["x"].zero_point) == 0 and new.tensors["x"].origin == "least squared error weighed by squared gradients"
    )
    assert all(new.tensors[n] is plan.tensors[n] for n in "yz") and float(plan["x"].scale) == 1


@pytest.mark.parametrize("low, moves", [(-1.0, False), (-3.0, True)])
def test_a_grid_that_a_rule_of_the_platform_forbids_is_not_taken(low, moves, monkeypatch):
    rule = ScaleBound(op="Add", terms=(("x", 1),), low=low)
    plan = Plan(tensors={"x": tensor("x")}, limits=(rule,))
    new, ((*_, seed),) = placed(monkeypatch, plan, {"x": FIFTHS}, x=(0.0, 9.0))
    assert (new is plan) is not moves and seed == 0


def test_where_all_values_matter_alike_the_grid_is_that_of_the_least_squares(monkeypatch):
    x = torch.randn(400, generator=torch.Generator().manual_seed(0)).pow(3)
    low, high = x.double().aminmax()
    weighed = Sample(x.view(1, -1), torch.ones(1, 400), low.view(1), high.view(1))
    plan = Plan(tensors={"x": tensor("x")})
    new, _ = placed(monkeypatch, plan, {"x": weighed}, x=(float(low), float(high)))
    squares, cubes = (choose(x, A4, rule=rule) for rule in ("mse", "lp(p=3)"))
    assert float(squares.scale) != float(cubes.scale)
    assert float(new["x"].scale) == float(squares.scale) and int(new["x"].zero_point) == int(squares.zero_point)
