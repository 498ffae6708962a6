"""Calibration collects what the range rules of the assignment declare, and says where a statistic is not known."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from chipfit import registry
from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.statistics import RangeRules, declared, needs, notes_of_missing
from chipfit.decision import Decision, with_declared_statistics
from chipfit.graph.ir import Graph
from chipfit.plan.record import TensorPlan
from chipfit.platform.schema import Format
from chipfit.quantizers.grids import Grid
from chipfit.ranges import choose
from chipfit.ranges.qparams import from_min_max
from tests.build import platform_of
from tests.decide.test_constraints import SIGMOID, constraint

I8 = Grid(bits=8, qmin=-127, qmax=127)


def slot(name, role="activation", **options):
    return TensorSpec(name=name, role=role, node="a", format_name="a8", format=Format(bits=8), **options)


def assignment(*slots):
    return Assignment(tensors={s.name: s for s in slots})


SLOTS = (
    slot("x"),
    slot("y", rule="mse"),
    slot("z", rule="hmse"),
    slot("r", rule="hmse", range=(0.0, 1.0)),
    slot("w", role="weight"),
    slot("b", role="bias", rule="hmse"),
)


@pytest.mark.parametrize(
    ("rule", "weight_rule", "tensors"),
    [("hmse", "mse", {"x", "z"}), ("mse", "hmse", {"z", "w"}), ("mse", "mse", {"z"})],
)
def test_a_tensor_needs_the_statistic_of_its_own_rule_or_of_that_of_all(rule, weight_rule, tensors):
    assert declared(assignment(*SLOTS), RangeRules(rule=rule, weight_rule=weight_rule)) == {"importance": tensors}
    assert declared(assignment(slot("x")), RangeRules()) == {}


@pytest.mark.parametrize(
    ("rule", "histogram"), [("mse", True), ("no_clipping", False), ("minmax", False), (lambda x, grid: None, True)]
)
def test_calibration_collects_what_is_not_known_beforehand(rule, histogram):
    slots = slot("x"), slot("z", z_threshold=3.0), slot("r", range=(0.0, 1.0)), slot("w", role="weight")
    rules = RangeRules(rule=rule)
    found = needs(assignment(*slots), rules)
    assert {name: need.histogram for name, need in found.items()} == {"x": histogram, "z": True}
    outliers = RangeRules(rule=rule, z_threshold=3.0)  # they are looked for in the histogram
    assert needs(assignment(slot("x")), outliers)["x"].histogram
    fixed = replace(assignment(slot("x")), constraints=(constraint(SIGMOID, out="x"),))
    assert not needs(fixed, rules)["x"].histogram
    assert not needs(assignment(slot("x", rule="no_clipping")), rules)["x"].histogram


def test_tensors_without_their_statistic_are_named_in_one_note():
    def tensor(name, origin):
        return TensorPlan(name=name, role="weight", origin=origin)

    plain, bare = tensor("a", "hmse over the weights"), "hmse over the weights, without importance"
    assert notes_of_missing({"a": plain}) == []
    (note,) = notes_of_missing({"a": plain, "b": tensor("b", bare), "c": tensor("c", bare + ", tied with 'a'")})
    assert note == "no importance is known of 'b', 'c': their range rules ran without it"


@pytest.fixture
def shares(drop_ins):
    """A rule and the statistic that it needs, registered for one test; returns what the statistic was asked for."""
    asked = []

    @registry.register("statistic", "share")
    def share(graph, float_edges, names, stats, batches, seed):
        asked.append(names)
        return {n: 0.5 for n in names if n != "u"}

    @registry.register("range", "shared")
    @dataclass(frozen=True)
    class Shared:
        statistic: ClassVar[str] = "share"

        def __call__(self, sample, grid):
            factor = sample.statistic or 1.0
            return from_min_max(sample.low * factor, sample.high * factor, grid)

    return asked


def declared_values(graph, slots, stats):
    """The statistics of a network after those that the rule declares were collected."""
    rules = RangeRules(rule="shared", weight_rule="shared")
    d = Decision(platform=platform_of(), graph=graph, assignment=assignment(*slots), stats=stats, rules=rules)
    return with_declared_statistics(d, ()).stats


def test_a_rule_gets_the_value_of_its_statistic_for_activations_and_weights(shares):
    graph, slots = Graph([], [], [], {}, {"w": torch.ones(2)}), (slot("x"), slot("u"), slot("w", role="weight"))
    seen = {n: TensorStats(n, -1.0, 1.0, batches=1) for n in "xu"}
    stats = declared_values(graph, slots, seen)
    assert {n: dict(s.extras) for n, s in stats.items()} == {"x": {"share": 0.5}, "u": {}, "w": {"share": 0.5}}
    scales = [float(choose(stats[n], I8, rule="shared").scale) for n in "xu"]
    scales.append(float(choose(graph.weights["w"], I8, rule="shared", extras=stats["w"].extras).scale))
    assert scales == pytest.approx([0.5 / 127, 1 / 127, 0.5 / 127], rel=1e-2)
    assert float(choose(stats["x"], I8, rule="no_clipping").scale) == pytest.approx(1 / 127, rel=1e-2)


def test_a_statistic_is_collected_once_and_for_no_tensor_that_has_it(shares):
    graph, slots = Graph([], [], [], {}, {}), (slot("x"), slot("y"))
    x = {"x": TensorStats("x", -1.0, 1.0, batches=1)}
    stats = declared_values(graph, slots[:1], x)
    stats = declared_values(graph, slots, stats)
    assert declared_values(graph, slots, stats) == stats
    assert shares == [{"x"}, {"y"}]
