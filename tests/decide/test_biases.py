"""Scales of biases: of the products where the chip adds them there, and room for large ones."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.constraints import Constraint
from chipfit.decide.qparams import with_biases
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import TensorPlan
from chipfit.platform.schema import Format, Rule
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored


def test_a_bias_behind_weights_in_blocks_has_a_range_of_its_own():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(16, 256)
    result = chipfit.quantize(model, [x], "hailo", overrides={"0": {"bits": 4, "per": "block"}}, progress=False)
    weight, bias = (t for t in result.plan.tensors.values() if t.name in ("0.weight", "0.bias"))
    assert weight.scale.shape == (8, 2) and "no_clipping" in bias.origin
    b = model[0].bias.detach()
    assert float((bias.stored.round(b) - b).abs().max()) <= float(bias.scale.max())
    assert "input scale x weight scale" in result.plan.tensors["2.bias"].origin
    alone = chipfit.quantize(model, [x], "hailo", overrides={"0": {"bits": 4}}, progress=False)

    def error(r):
        return float((r.model(x) - model(x)).square().mean().detach())

    assert error(result) < 2 * error(alone)


def test_weight_scales_grow_where_a_bias_would_not_fit_its_codes():
    model = nn.Linear(4, 2).eval()
    with torch.no_grad():
        model.weight[:] = torch.tensor([[1e-7, 2e-7, -1e-7, 0], [0.5, 0.1, -0.2, 0.3]])
        model.bias[:] = torch.tensor([3e3, 0.1])
    x = torch.rand(16, 4) * 2e-3
    plan = chipfit.quantize(model, [x], "ort_cpu", overrides={"*": {"inputs": "codes"}}, progress=False).plan
    weight, bias = plan.tensors["weight"], plan.tensors["bias"]
    product = plan.tensors["input"].scale * weight.scale
    # the first: 3000 / (s_in s_w) <= (2^31 - 1) / 2; the second has room already
    torch.testing.assert_close(float(3e3 / product[0]), (2**31 - 1) / 2, rtol=1e-5, atol=0)
    assert "enlarged" in weight.origin and float(weight.scale[1]) < 0.5 / 120
    assert float((bias.stored.round(model.bias.detach()) - model.bias.detach()).abs()[0]) <= 3e3 * 1e-6


# ---------------------------------------------------------------- on paper

CODES = Grid(bits=8, qmin=-128, qmax=127)
WIDE = Grid(bits=32, qmin=-(2**31), qmax=2**31 - 1)


def entry_of(name, scale, grid=CODES, role="weight", axis=None):
    scale = torch.tensor(scale)
    stored = Stored(
        format="f", grid=grid, scale=scale, zero_point=torch.zeros_like(scale, dtype=torch.int32), axis=axis
    )
    return TensorPlan(name=name, role=role, stored=stored, origin="mse over the weights")


def biased(
    bias, weight_scale, *, grid=WIDE, rules=(), weight=CODES, slots=("in0", "w", "b"), axis=0, fmt=None, shape=(2, 2)
):
    """The tensors of one linear layer whose input has the scale 0.5."""
    names = {"in0": ("x",), "w": ("w",), "b": ("b",)}
    constraint = Constraint(op="Linear", rules=tuple(Rule(**r) for r in rules), slots={k: names[k] for k in slots})
    slot = TensorSpec(
        name="b", role="bias", format_name="b32", format=fmt or Format(bits=grid.bits), axis=axis, node="n"
    )
    node = Node("n", "Linear", ("x", "w", "b"), ("y",), layer="fc")
    graph = Graph([node], ["x"], ["y"], {}, {"w": torch.ones(shape), "b": torch.tensor(bias)})
    tensors = {
        "x": entry_of("x", 0.5, role="activation"),
        "w": entry_of("w", weight_scale, weight, axis=0 if isinstance(weight_scale, list) else None),
    }
    assignment = Assignment(tensors={"b": slot}, constraints=(constraint,))
    return with_biases(graph, assignment, {"b": grid}, tensors)


def test_a_bias_has_the_product_of_the_scales_of_each_channel():
    made = biased([1.0, 3.0], [0.25, 0.125])
    assert made["b"].scale.tolist() == [0.125, 0.0625] and made["b"].origin == "input scale x weight scale"
    assert made["b"].stored.zero_point.tolist() == [0, 0] and made["b"].scale.dtype == torch.float32
    assert (made["b"].layer, made["b"].op, made["b"].role, made["b"].format) == ("fc", "Linear", "bias", "b32")
    assert made["w"].scale.tolist() == [0.25, 0.125] and made["w"].origin == "mse over the weights"


@pytest.mark.parametrize(("axis", "scale"), [(0, [0.125, 0.125]), (None, 0.125)])
def test_one_weight_scale_serves_every_channel_of_the_bias(axis, scale):
    made = biased([1.0, 3.0], 0.25, axis=axis)
    assert made["b"].scale.tolist() == scale


def test_scales_of_channels_count_for_a_bias_whose_format_does_not_say_so():
    assert biased([1.0, 3.0], [0.25, 0.125], axis=None)["b"].scale.tolist() == [0.125, 0.0625]


def test_of_groups_the_channels_behind_one_scale_repeat_it():
    # a transposed convolution in groups has one scale for several channels of its bias
    assert biased([1.0, 1.0, 1.0, 1.0], [0.25, 0.125])["b"].scale.numel() == 4


@pytest.mark.parametrize(
    ("bias", "scales", "grown"),
    [
        ([0.5 * 0.25 * 63, 0.0], [0.25, 0.25], False),  # 63 of 127 / 2 codes
        ([0.5 * 0.25 * 64, 0.0], [0.25, 0.25], True),
        ([0.0, -0.5 * 0.25 * 64], [0.25, 0.25], True),
        ([0.5 * 0.25 * 63, 0.5 * 0.25 * 63], 0.25, False),
        ([0.0, 0.5 * 0.25 * 127], 0.25, True),
    ],
    ids=str,
)
def test_a_weight_scale_grows_as_soon_as_half_the_codes_do_not_hold_the_bias(bias, scales, grown):
    eight = {"grid": CODES, "rules": [{"mono": {"b": 1, "in0": -1, "w": -1}, "eq": 1}]}
    made = biased(bias, scales, **eight)
    least = [abs(b) / (0.5 * 127 / 2) for b in bias]  # |b| / (s_in qmax / 2)
    want = [max(s, x) for s, x in zip(scales, least, strict=True)] if isinstance(scales, list) else max(scales, *least)
    assert made["w"].scale.tolist() == pytest.approx(want, rel=1e-6)
    assert made["w"].origin == "mse over the weights" + ", enlarged to store the bias" * grown
    assert (made["w"].scale.tolist() != scales) is grown


def test_a_scale_that_just_holds_the_bias_stays_as_it_is():
    half = Grid(bits=9, qmin=-128, qmax=128)  # half of them are 64 codes: 8 = 64 * 0.5 * 0.25
    made = biased([8.0, 8.0], [0.25, 0.25], grid=half, rules=[{"mono": {"b": 1, "in0": -1, "w": -1}, "eq": 1}])
    assert made["w"].origin == "mse over the weights" and made["w"].scale.tolist() == [0.25, 0.25]


def test_powers_of_two_grow_to_the_next_one():
    pot = Grid(bits=8, qmin=-128, qmax=127, pot=True)
    eight = {"grid": CODES, "rules": [{"mono": {"b": 1, "in0": -1, "w": -1}, "eq": 1}], "weight": pot}
    made = biased([0.0, 10.0], [0.25, 0.25], **eight)  # 10 / (0.5 * 63.5) = 0.315
    assert made["w"].scale.tolist() == [0.25, 0.5] and made["b"].scale.tolist() == [0.125, 0.25]


PRODUCT = {"mono": {"b": 1, "in0": -1, "w": -1}, "eq": 1}


@pytest.mark.parametrize(
    ("facts", "accumulated"),
    [
        ({"grid": WIDE}, True),
        ({"grid": Grid(bits=16, qmin=-(2**15), qmax=2**15 - 1)}, True),
        ({"grid": Grid(bits=15, qmin=-(2**14), qmax=2**14 - 1)}, False),  # too narrow to be added to products
        ({"grid": CODES}, False),
        ({"grid": CODES, "rules": [PRODUCT]}, True),
        ({"grid": CODES, "rules": [{**PRODUCT, "hard": False}]}, False),
        ({"grid": WIDE, "rules": [{"mono": {"b": 1, "in0": -1, "w": -1}, "max": 1.0}]}, False),
        ({"grid": CODES, "rules": [{"mono": {"b": 1, "in0": -1, "w": -1}, "max": 1.0}, PRODUCT]}, True),
        ({"grid": WIDE, "rules": [{"mono": {"in0": 1, "w": 1}, "max": 1e9}]}, True),  # about something else
        ({"grid": CODES, "rules": [{"mono": {"in0": 1, "w": -1}, "eq": 1}]}, False),
        ({"grid": WIDE, "rules": [{"zero": "b", "eq": 0}]}, True),
        ({"grid": WIDE, "slots": ("w", "b")}, False),  # what it reads is no tensor of codes
        ({"grid": WIDE, "slots": ("in0", "b")}, False),
    ],
    ids=str,
)
def test_a_bias_is_added_to_the_products_where_a_rule_says_so_or_none_and_it_is_wide(facts, accumulated):
    made = biased([0.5, -0.25], [0.25, 0.25], **facts)["b"]
    assert made.origin == ("input scale x weight scale" if accumulated else "no_clipping over the bias")
    if not accumulated:  # the greatest of each channel, or of all, takes the last code
        top = torch.tensor([0.5, 0.25])
        assert bool((made.stored.round(torch.tensor([0.5, -0.25])).abs() - top).abs().max() <= made.scale.max())


def test_of_layers_that_share_a_weight_each_bias_has_room():
    names = [{"in0": ("x",), "w": ("w",), "b": (b,)} for b in ("b1", "b2")]
    constraints = tuple(Constraint(op="Linear", rules=(Rule(**PRODUCT),), slots=s) for s in names)
    slots = {
        b: TensorSpec(name=b, role="bias", format_name="b8", format=Format(bits=8), axis=0, node=b)
        for b in ("b1", "b2")
    }
    weights = {"w": torch.ones(2, 2), "b1": torch.tensor([1.0, 1.0]), "b2": torch.tensor([1.0, 100.0])}
    tensors = {"x": entry_of("x", 0.5, role="activation"), "w": entry_of("w", [0.25, 0.25], axis=0)}
    made = with_biases(
        Graph([], [], [], {}, weights),
        Assignment(tensors=slots, constraints=constraints),
        dict.fromkeys(slots, CODES),
        tensors,
    )
    grown = 100 / (0.5 * 63.5)
    assert made["w"].scale.tolist() == pytest.approx([0.25, grown])
    for b in ("b1", "b2"):
        assert torch.equal(made[b].scale, 0.5 * made["w"].scale)
