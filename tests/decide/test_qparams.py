"""Scale and zero point of single tensors: an earlier decision, the platform's, a known range, a rule; and of biases."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.histogram import Histogram
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.scales import QParamsSource, as_stored, tensor_plan, with_biases
from chipfit.decide.statistics import RangeRules
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph
from chipfit.plan.record import TensorPlan
from chipfit.platform.schema import Format
from chipfit.ranges.qparams import QParams
from tests.build import graph_of, grid, node, plan_of, quantized, sequential, stored
from tests.decide.test_constraints import constraint

A8, W8 = Format(bits=8, zero="any"), Format(bits=8)
W8_CHANNEL = Format(bits=8, per="channel")
LUT = Format(bits=2, kind="lut", lut={"entries": 4})
#: one outlier beside many small numbers: a rule that clips and one that does not part
WEIGHT = torch.cat([torch.linspace(-0.1, 0.1, 399), torch.tensor([1.0])]).reshape(4, 100)


def activation(fmt=A8, **facts):
    return TensorSpec(name="x", role="activation", format_name="a8", format=fmt, **facts)


def weight(fmt, **facts):
    return TensorSpec(name="w", role="weight", format_name="w8", format=fmt, **facts)


def found(spec, stats=None, dictated=(), known=(), **rules):
    """(stored, origin) of a tensor; x lies in -1..1.55."""
    graph = Graph([], [], [], {}, {"w": WEIGHT})
    seen = {"x": TensorStats("x", low=-1.0, high=1.55, count=4, batches=3)} if stats is None else stats
    rules = RangeRules(**{"rule": "no_clipping", **rules})
    return QParamsSource(graph, seen, dict(dictated), dict(known), rules).qparams_of(spec, spec.grid())


def statistics(*values, high=1.55, batches=3):
    """Statistics of x with a histogram of these values."""
    histogram, numbers = Histogram(), torch.cat(values)
    histogram.add(numbers, float(numbers.abs().max()))
    return {"x": TensorStats("x", low=-1.0, high=high, count=len(numbers), batches=batches, histogram=histogram)}


def test_an_entry_names_the_layer_that_makes_it_and_an_input_has_none():
    relu, held = node("x = Relu(a)", layer="block.act"), stored(0.25)
    made = tensor_plan(activation(), relu, held, "mse", TensorStats("x", low=-1.0, high=2.0))
    assert (made.name, made.role, made.layer, made.op, made.origin) == ("x", "activation", "block.act", "Relu", "mse")
    assert (made.low, made.high, float(made.scale)) == (-1.0, 2.0, 0.25)
    bare = tensor_plan(activation(), None, held, "mse")
    assert (bare.layer, bare.op, bare.low, bare.high) == ("", "Input", None, None)


def test_a_table_that_was_fitted_is_part_of_the_grid():
    q = QParams(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    assert as_stored(weight(LUT), LUT.grid(), q).grid.table is None
    fitted = as_stored(weight(LUT), LUT.grid(), replace(q, table=(-2.0, 0.0, 1.0, 3.0)))
    assert fitted.grid.table == (-2.0, 0.0, 1.0, 3.0) and fitted.grid.entries == 4 and fitted.format == "w8"


@pytest.mark.parametrize(
    "spec, facts, scale, zero, origin",
    [
        (activation(), {}, 2.55 / 255, -128 + 100, "no_clipping over 3 batches"),
        (activation(), {"dictated": {"x": (0.125, 0)}}, 0.125, 0, "fixed by the platform"),
        (activation(), {"dictated": {"x": (0.125, -28)}}, 0.125, -28, "fixed by the platform"),
        (activation(range=(-0.5, 2.05)), {"stats": {}}, 2.55 / 255, -128 + 50, "known beforehand"),
        # 128 codes below 0: the step is 1 / 128, and +1 rounds down to 127 of them
        (activation(W8, range=(-1.0, 1.0)), {}, 1 / 128, 0, "known beforehand"),
    ],
)
def test_numbers_of_an_activation_and_their_origin(spec, facts, scale, zero, origin):
    held, says = found(spec, **facts)
    assert (float(held.scale), int(held.zero_point), says) == (pytest.approx(scale), zero, origin)
    assert held.scale.dtype == torch.float32 and held.zero_point.dtype == torch.int32


def test_a_tensor_that_was_not_calibrated_is_refused_with_the_way_out():
    with pytest.raises(PlanError, match="'x' was not calibrated.*quantize again with these overrides"):
        found(activation(), stats={})


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    "spec, origin",
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
    ids=range(8),
)
def test_the_rule_of_a_weight_is_its_own_or_that_of_all(spec, origin):
    held, says = found(spec)
    assert says == origin and held.scale.shape == ((4,) if spec.axis is not None else ())


def test_weights_with_a_zero_point_are_not_clipped_unless_a_rule_is_chosen():
    assert float(found(weight(A8))[0].scale) == pytest.approx(1.1 / 255, rel=1e-5)
    assert float(found(weight(Format(bits=3, zero="any"), rule="mse"))[0].scale) < 1.1 / 7


def test_importance_of_weights_decides_their_range():
    heavy = {"w": TensorStats("w", extras={"importance": (WEIGHT == 1).float()})}  # only the outlier matters
    weighed, origin = found(weight(Format(bits=3), rule="hmse"), stats=heavy)
    alike, _ = found(weight(Format(bits=3), rule="hmse"))
    assert origin == "hmse over the weights" and float(weighed.scale) > float(alike.scale)


@pytest.mark.parametrize(
    "own, others, origin",
    [
        ({}, {}, "no_clipping over 3 batches"),
        ({"rule": "mae"}, {}, "mae over 3 batches"),
        ({"rule": "mae"}, {"rule": "hmse"}, "mae over 3 batches"),
        ({}, {"rule": "hmse"}, "hmse over 3 batches, without importance"),
    ],
    ids=str,
)
def test_the_rule_of_an_activation_is_its_own_or_that_of_all(own, others, origin):
    assert found(activation(**own), stats=statistics(torch.linspace(-1, 1.55, 256)), **others)[1] == origin


@pytest.mark.parametrize(
    "own, others, top",
    [
        ({}, {}, 60.0),  # the extremes of all values, not those of the sample
        ({"z_threshold": 5.0}, {}, 1.0),
        ({}, {"z_threshold": 5.0}, 1.0),
        ({"z_threshold": 100.0}, {"z_threshold": 5.0}, 50.0),
    ],
    ids=str,
)
def test_outliers_beyond_a_threshold_are_left_out(own, others, top):
    """1000 numbers of -1..1, and a 50; the extremes are of all values, the histogram of a part without the 60."""
    seen = statistics(torch.linspace(-1, 1, 1000), torch.tensor([50.0]), high=60.0)
    held, _ = found(activation(**own), stats=seen, **others)
    assert float(held.scale) == pytest.approx((top + 1) / 255, rel=0.05)  # to one bin


# ---------------------------------------------------------------- earlier decisions


def earlier(name="x", **facts):
    """An earlier decision about a tensor: the scale 0.25 on the grid of A8, unless `facts` differ."""
    held = stored(**{"scale": 0.25, "zero": 3, "on": A8.grid(), **facts})
    return {name: TensorPlan(name=name, role="activation", stored=held, origin="mse over 9 batches, tied with 'y'")}


def test_an_earlier_decision_holds_if_the_format_is_the_same():
    held, origin = found(activation(), known=earlier())
    assert (float(held.scale), int(held.zero_point), origin) == (0.25, 3, "mse over 9 batches")


@pytest.mark.parametrize(
    "known, spec",
    [
        ({}, activation()),
        ({"x": TensorPlan(name="x", role="activation", why="kept in float")}, activation()),
        (earlier(on=grid(4)), activation()),
        (earlier(format="other"), activation()),
        (earlier(on=grid(rounding="half_up")), activation()),
        (earlier(), activation(rule="no_clipping")),
        (earlier(), activation(z_threshold=1e9)),
        (earlier(), activation(range=(-1.0, 1.55))),
    ],
    ids=range(8),
)
def test_an_earlier_decision_does_not_hold_for_another_format_or_choice(known, spec):
    held, _ = found(spec, known=known, stats=statistics(torch.linspace(-1, 1.55, 256)))
    assert float(held.scale) == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("axis, same", [(0, True), (1, False)])
def test_an_earlier_decision_is_about_the_same_channels(axis, same):
    known = earlier("w", scale=[0.5] * 4, zero=0, on=W8_CHANNEL.grid(), axis=axis, format="w8")
    assert (found(weight(W8_CHANNEL, axis=0), known=known)[0] is known["w"].stored) is same


def test_an_earlier_table_is_kept():
    known = earlier("w", zero=0, on=replace(LUT.grid(), table=(-2.0, 0.0, 1.0, 3.0)), format="w8")
    assert found(weight(LUT), known=known)[0] is known["w"].stored


# ---------------------------------------------------------------- biases

CODES, WIDE = grid(zero=0), grid(32, zero=0)
PRODUCT = {"mono": {"b": 1, "in0": -1, "w": -1}, "eq": 1}
EIGHT = {"bias_grid": CODES, "rules": [PRODUCT]}


def biased(bias, scale, *, bias_grid=WIDE, rules=(), on=CODES, slots="in0 w b", axis=0, more=None):
    """The tensors of a linear layer, and of another with the bias `more`, whose input x has the scale 0.5."""
    biases = {"b": bias, **({"c": more} if more else {})}
    tensors = plan_of(x=stored(0.5, on=CODES), w=stored(scale, on=on, axis=0 if isinstance(scale, list) else None))
    slots = slots.split()
    constraints, specs = [], {}
    for b in biases:
        names = {"in0": "x", "w": "w", "b": b}
        constraints.append(constraint(*rules, op="Linear", **{s: names[s] for s in slots}))
        fmt = Format(bits=bias_grid.bits)
        specs[b] = TensorSpec(name=b, role="bias", format_name="b32", format=fmt, axis=axis, node="y")
    graph = graph_of(node("y = Linear(x, w, b)", layer="fc"), weights={n: torch.tensor(v) for n, v in biases.items()})
    plan = {n: t.with_(origin="mse over the weights") for n, t in tensors.tensors.items()}
    w = TensorSpec(name="w", role="weight", format_name="w8", format=Format(bits=8), node="y")
    assignment = Assignment(tensors={**specs, "w": w}, constraints=tuple(constraints))
    return with_biases(graph, assignment, dict.fromkeys(specs, bias_grid), plan)


def test_a_bias_has_the_product_of_the_scales_of_each_channel():
    made = biased([1.0, 3.0], [0.25, 0.125])
    assert made["b"].scale.tolist() == [0.125, 0.0625] and made["b"].origin == "input scale x weight scale"
    assert made["b"].stored.zero_point.tolist() == [0, 0] and made["b"].scale.dtype == torch.float32
    assert (made["b"].layer, made["b"].op, made["b"].role, made["b"].format) == ("fc", "Linear", "bias", "b32")
    assert made["w"].scale.tolist() == [0.25, 0.125] and made["w"].origin == "mse over the weights"


@pytest.mark.parametrize(
    "scale, axis, product", [(0.25, 0, [0.125, 0.125]), (0.25, None, 0.125), ([0.25, 0.125], None, [0.125, 0.0625])]
)
def test_one_weight_scale_serves_all_channels_and_scales_of_channels_count_in_any_format(scale, axis, product):
    assert biased([1.0, 3.0], scale, axis=axis)["b"].scale.tolist() == product


@pytest.mark.parametrize(
    "bias, scales, grown",
    [
        ([0.5 * 0.25 * 63, 0.0], [0.25, 0.25], False),  # 63 of 127 / 2 codes
        ([0.5 * 0.25 * 64, 0.0], [0.25, 0.25], True),
        ([0.0, -0.5 * 0.25 * 64], [0.25, 0.25], True),
        ([0.5 * 0.25 * 63, 0.5 * 0.25 * 63], 0.25, False),
        ([0.0, 0.5 * 0.25 * 127], 0.25, True),
    ],
    ids=str,
)
def test_a_weight_scale_grows_as_soon_as_half_the_grid_does_not_hold_the_bias(bias, scales, grown):
    made = biased(bias, scales, **EIGHT)
    least = [abs(b) / (0.5 * 127 / 2) for b in bias]  # |b| / (s_in qmax / 2)
    want = [max(s, x) for s, x in zip(scales, least, strict=True)] if isinstance(scales, list) else max(scales, *least)
    assert made["w"].scale.tolist() == pytest.approx(want, rel=1e-6)
    assert made["w"].origin == "mse over the weights" + ", enlarged to store the bias" * grown
    assert (made["w"].scale.tolist() != scales) is grown


def test_a_scale_that_just_holds_the_bias_stays_and_powers_of_two_grow_to_the_next_one():
    half = grid(9, low=-128, high=128, zero=0)  # half of them are 64 codes: 8 = 64 * 0.5 * 0.25
    made = biased([8.0, 8.0], [0.25, 0.25], bias_grid=half, rules=[PRODUCT])
    assert made["w"].origin == "mse over the weights" and made["w"].scale.tolist() == [0.25, 0.25]
    made = biased([0.0, 10.0], [0.25, 0.25], **EIGHT, on=grid(zero=0, pot=True))  # 10 / (0.5 * 63.5) = 0.315
    assert made["w"].scale.tolist() == [0.25, 0.5] and made["b"].scale.tolist() == [0.125, 0.25]


def test_of_layers_that_share_a_weight_each_bias_has_room():
    made = biased([1.0, 1.0], [0.25, 0.25], **EIGHT, more=[1.0, 100.0])
    assert made["w"].scale.tolist() == pytest.approx([0.25, 100 / (0.5 * 63.5)])
    assert all(torch.equal(made[b].scale, 0.5 * made["w"].scale) for b in "bc")


@pytest.mark.parametrize(
    "facts, accumulated",
    [
        ({}, True),
        ({"bias_grid": grid(16, zero=0)}, True),
        ({"bias_grid": grid(15, zero=0)}, False),  # too narrow to be added to products
        ({"bias_grid": CODES}, False),
        (EIGHT, True),
        ({"bias_grid": CODES, "rules": [{**PRODUCT, "hard": False}]}, False),
        ({"rules": [{"mono": PRODUCT["mono"], "max": 1.0}]}, False),
        ({"bias_grid": CODES, "rules": [{"mono": PRODUCT["mono"], "max": 1.0}, PRODUCT]}, True),
        ({"rules": [{"mono": {"in0": 1, "w": 1}, "max": 1e9}]}, True),  # about something else
        ({"bias_grid": CODES, "rules": [{"mono": {"in0": 1, "w": -1}, "eq": 1}]}, False),
        ({"rules": [{"zero": "b", "eq": 0}]}, True),
        ({"slots": "w b"}, False),  # its input is not quantized
        ({"slots": "in0 b"}, False),
    ],
    ids=range(13),
)
def test_a_bias_is_added_to_the_products_if_a_rule_says_so_or_none_and_it_is_wide(facts, accumulated):
    made = biased([0.5, -0.25], [0.25, 0.25], **facts)["b"]
    assert made.origin == ("input scale x weight scale" if accumulated else "no_clipping over the bias")
    if not accumulated:  # the greatest of each channel, or of all, takes the last code
        top = torch.tensor([0.5, 0.25])
        assert bool((made.stored.round(torch.tensor([0.5, -0.25])).abs() - top).abs().max() <= made.scale.max())


def test_a_bias_behind_weights_in_blocks_has_a_range_of_its_own():
    torch.manual_seed(0)
    model, x = sequential(nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(16, 256)
    result = quantized(model, x, "hailo", overrides={"0": {"bits": 4, "per": "block"}})
    weight, bias = (result.plan.tensors[n] for n in ("0.weight", "0.bias"))
    assert weight.scale.shape == (8, 2) and "no_clipping" in bias.origin
    b = model[0].bias.detach()
    assert float((bias.stored.round(b) - b).abs().max()) <= float(bias.scale.max())
    assert "input scale x weight scale" in result.plan.tensors["2.bias"].origin
    alone = quantized(model, x, "hailo", overrides={"0": {"bits": 4}})
    error, bound = (float((r.model(x) - model(x)).square().mean().detach()) for r in (result, alone))
    assert error < 2 * bound
