"""The numbers of one tensor by itself: an earlier decision, the platform's, a known range, or a rule over data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.histogram import Histogram
from chipfit.decide.assignment import TensorSpec
from chipfit.decide.qparams import QParamsSource, as_stored, tensor_plan
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import TensorPlan
from chipfit.platform.schema import Format
from chipfit.quantizers.stored import Stored
from chipfit.ranges.qparams import QParams

A8 = Format(bits=8, zero="any")
W8 = Format(bits=8)
W8_CHANNEL = Format(bits=8, per="channel")
LUT = Format(bits=2, kind="lut", lut={"entries": 4})
#: one outlier beside many small numbers: a rule that clips and one that does not part
WEIGHT = torch.cat([torch.linspace(-0.1, 0.1, 399), torch.tensor([1.0])]).reshape(4, 100)


def activation(fmt=A8, **facts):
    return TensorSpec(name="x", role="activation", format_name="a8", format=fmt, **facts)


def weight(fmt, **facts):
    return TensorSpec(name="w", role="weight", format_name="w8", format=fmt, **facts)


def sources(**facts):
    graph = Graph([], [], [], {}, {"w": WEIGHT})
    seen = {"x": TensorStats("x", low=-1.0, high=1.55, count=4, batches=3)}
    given = {"stats": seen, "dictated": {}, "known": {}, "rule": "no_clipping", "weight_rule": "mse"}
    return QParamsSource(graph, **given | {"z_threshold": None, **facts})


def stored(fmt=A8, scale=0.25, zero=3, name="a8", axis=None):
    numbers = torch.tensor(scale), torch.tensor(zero, dtype=torch.int32)
    return Stored(format=name, grid=fmt.grid(), scale=numbers[0], zero_point=numbers[1], axis=axis)


def test_an_entry_names_the_layer_that_makes_it_and_an_input_has_none():
    node = Node("relu", "Relu", ("a",), ("x",), layer="block.act")
    made = tensor_plan(activation(), node, stored(), "mse", TensorStats("x", low=-1.0, high=2.0))
    assert (made.name, made.role, made.layer, made.op, made.origin) == ("x", "activation", "block.act", "Relu", "mse")
    assert (made.low, made.high, float(made.scale)) == (-1.0, 2.0, 0.25)
    bare = tensor_plan(activation(), None, stored(), "mse")
    assert (bare.layer, bare.op, bare.low, bare.high) == ("", "Input", None, None)


def test_a_table_that_was_fitted_is_part_of_the_grid():
    q = QParams(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    assert as_stored(weight(LUT), LUT.grid(), q).grid.table is None
    fitted = as_stored(weight(LUT), LUT.grid(), replace(q, table=(-2.0, 0.0, 1.0, 3.0)))
    assert fitted.grid.table == (-2.0, 0.0, 1.0, 3.0) and fitted.grid.entries == 4 and fitted.format == "w8"


def test_least_and_greatest_value_span_the_codes():
    found, origin = sources().qparams_of(activation(), A8.grid())
    assert float(found.scale) == pytest.approx(2.55 / 255) and int(found.zero_point) == -128 + 100
    assert origin == "no_clipping over 3 batches"


@pytest.mark.parametrize("zero", [0, -28])
def test_what_the_platform_dictates_comes_before_any_rule(zero):
    found, origin = sources(dictated={"x": (0.125, zero)}).qparams_of(activation(), A8.grid())
    assert (float(found.scale), int(found.zero_point), origin) == (0.125, zero, "fixed by the platform")
    assert found.scale.dtype == torch.float32 and found.zero_point.dtype == torch.int32


def test_a_known_range_needs_nothing_that_was_seen():
    found, origin = sources(stats={}).qparams_of(activation(range=(-0.5, 2.05)), A8.grid())
    assert float(found.scale) == pytest.approx(2.55 / 255) and int(found.zero_point) == -128 + 50
    assert origin == "known beforehand"


def test_a_known_range_of_symmetric_codes_is_their_threshold():
    signed = Format(bits=8)  # 128 codes below 0: the step is 1 / 128, and +1 rounds down to 127 of them
    found, _ = sources().qparams_of(activation(signed, range=(-1.0, 1.0)), signed.grid())
    assert float(found.scale) == 1 / 128


def test_what_was_not_calibrated_is_refused_with_the_way_out():
    with pytest.raises(PlanError, match="'x' was not calibrated.*quantize again with these overrides"):
        sources(stats={}).qparams_of(activation(), A8.grid())


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("slot", "origin"),
    [
        (weight(A8), "no_clipping over the weights"),  # with a zero point of its own, one scale for all
        (weight(W8), "mse over the weights"),
        (weight(Format(bits=8, zero="any", per="channel"), axis=0), "mse over the weights"),
        (weight(W8_CHANNEL, axis=0), "mse over the weights"),
        (weight(A8, rule="mae"), "mae over the weights"),
        (weight(W8_CHANNEL, axis=0, rule="no_clipping"), "no_clipping over the weights"),
        (weight(LUT), "look-up table fitted to the weights"),
        (weight(W8, rule="hmse"), "hmse over the weights, without importance"),
    ],
    ids=str,
)
def test_the_rule_of_a_weight_is_its_own_or_that_of_all(slot, origin):
    found, says = sources().qparams_of(slot, slot.grid())
    assert says == origin and found.scale.shape == ((4,) if slot.axis is not None else ())


def test_weights_with_a_zero_point_are_not_clipped_unless_asked():
    found, _ = sources().qparams_of(weight(A8), A8.grid())
    assert float(found.scale) == pytest.approx(1.1 / 255, rel=1e-5)
    one = Format(bits=3, zero="any")
    assert float(sources().qparams_of(weight(one, rule="mse"), one.grid())[0].scale) < 1.1 / 7


def test_importance_of_weights_decides_their_range():
    heavy = {"w": TensorStats("w", extras={"importance": (WEIGHT == 1).float()})}  # only the outlier matters
    low = Format(bits=3)
    weighed, origin = sources(stats=heavy).qparams_of(weight(low, rule="hmse"), low.grid())
    alike, _ = sources().qparams_of(weight(low, rule="hmse"), low.grid())
    assert origin == "hmse over the weights" and float(weighed.scale) > float(alike.scale)


@pytest.mark.parametrize(
    ("own", "others", "origin"),
    [
        ({}, {}, "no_clipping over 3 batches"),
        ({"rule": "mae"}, {}, "mae over 3 batches"),
        ({"rule": "mae"}, {"rule": "hmse"}, "mae over 3 batches"),
        ({}, {"rule": "hmse"}, "hmse over 3 batches, without importance"),
    ],
    ids=str,
)
def test_the_rule_of_an_activation_is_its_own_or_that_of_all(own, others, origin):
    histogram = Histogram()
    values = torch.linspace(-1, 1.55, 256)
    histogram.add(values, float(values.abs().max()))
    seen = {"x": TensorStats("x", low=-1.0, high=1.55, count=256, batches=3, histogram=histogram)}
    assert sources(stats=seen, **others).qparams_of(activation(**own), A8.grid())[1] == origin


def outlier():
    """1000 numbers of -1..1, and a 50; the extremes are of all, the histogram of a part without the 50."""
    part = torch.linspace(-1, 1, 1000)
    histogram = Histogram()
    histogram.add(torch.cat([part, torch.tensor([50.0])]), 50.0)
    return {"x": TensorStats("x", low=-1.0, high=60.0, count=1002, batches=2, histogram=histogram)}


@pytest.mark.parametrize(
    ("own", "others", "top"),
    [
        ({}, {}, 60.0),  # the extremes of all values, not those of the sample
        ({"z_threshold": 5.0}, {}, 1.0),
        ({}, {"z_threshold": 5.0}, 1.0),
        ({"z_threshold": 100.0}, {"z_threshold": 5.0}, 50.0),
    ],
    ids=str,
)
def test_outliers_are_left_out_where_a_threshold_says_so(own, others, top):
    found, _ = sources(stats=outlier(), **others).qparams_of(activation(**own), A8.grid())
    assert float(found.scale) == pytest.approx((top + 1) / 255, rel=0.05)  # to one bin


# ---------------------------------------------------------------- earlier decisions


def earlier(**facts):
    held = facts.pop("stored", stored())
    return {"x": TensorPlan(name="x", role="activation", stored=held, origin="mse over 9 batches, tied with 'y'")}


def test_an_earlier_decision_holds_where_the_format_is_the_same():
    found, origin = sources(known=earlier()).qparams_of(activation(), A8.grid())
    assert (float(found.scale), int(found.zero_point), origin) == (0.25, 3, "mse over 9 batches")


@pytest.mark.parametrize(
    ("known", "slot"),
    [
        ({}, activation()),
        ({"x": TensorPlan(name="x", role="activation", why="kept in float")}, activation()),
        (earlier(stored=stored(Format(bits=4, zero="any"))), activation()),
        (earlier(stored=stored(name="other")), activation()),
        (earlier(stored=replace(stored(), grid=replace(A8.grid(), rounding="half_up"))), activation()),
        (earlier(), activation(rule="no_clipping")),
        (earlier(), activation(z_threshold=1e9)),
        (earlier(), activation(range=(-1.0, 1.55))),
    ],
    ids=range(8),
)
def test_an_earlier_decision_does_not_hold_where_anything_else_is_asked(known, slot):
    histogram = Histogram()
    values = torch.linspace(-1, 1.55, 256)
    histogram.add(values, 1.55)
    seen = {"x": TensorStats("x", low=-1.0, high=1.55, count=256, batches=3, histogram=histogram)}
    assert float(sources(known=known, stats=seen).qparams_of(slot, A8.grid())[0].scale) == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(("axis", "same"), [(0, True), (1, False)])
def test_an_earlier_decision_is_about_the_same_channels(axis, same):
    held = Stored(
        format="w8",
        grid=W8_CHANNEL.grid(),
        scale=torch.full((4,), 0.5),
        zero_point=torch.zeros(4, dtype=torch.int32),
        axis=axis,
    )
    known = {"w": TensorPlan(name="w", role="weight", stored=held)}
    found, _ = sources(known=known).qparams_of(weight(W8_CHANNEL, axis=0), W8_CHANNEL.grid())
    assert (found is held) is same


def test_an_earlier_table_is_kept():
    held = replace(stored(LUT, 0.5, 0, "w8"), grid=replace(LUT.grid(), table=(-2.0, 0.0, 1.0, 3.0)))
    known = {"w": TensorPlan(name="w", role="weight", stored=held)}
    assert sources(known=known).qparams_of(weight(LUT), LUT.grid())[0] is held
