"""Formats: what consumers want, seen through pass-through operators, and what each operator reads and writes."""

import pytest
import torch
from torch import nn

from chipfit.decide.formats import formats_wanted_by_consumers, limit_to_consumers
from chipfit.decide.groups import find_groups
from chipfit.errors import UnsupportedError
from tests.build import graph_of, images, model_of, platform_of, quantized, sequential

FORMATS = {f"a{k}": {"bits": k, "zero": "any"} for k in (4, 8, 16)} | {"w8": {"bits": 8, "per": "channel"}}


def use(*options):
    return [{"in": a, "out": b} for a, b in options]


def chip(rules, **more):
    ops = [{"match": [op], "use": options} for op, options in rules.items()]
    ops += [{"match": ["Reshape", "Concat"], "use": [{"in": "any", "out": "same"}], "exec": "follow"}]
    return platform_of(*ops, formats=FORMATS, **more)


# ---------------------------------------------------------------- widths that consumers read

WIDE = use(("a16", "a16"), ("a8", "a8"), ("a4", "a4"))
NARROW_READER = [{"in": "any", "in_bits": [4, 8], "out": "a4"}]
RT = "r = Relu(x)", "t = Tanh(r)"


def limited(rules, *nodes, overrides=None, **more):
    """Results that are left to each operator."""
    groups = find_groups(graph_of(*nodes, **more), p := chip(rules), (), overrides or {})
    return {g.head.name: [o.out for o in g.resolved.options] for g in limit_to_consumers(p, groups)}


def test_a_producer_writes_no_wider_format_than_its_consumer_reads():
    assert limited({"Relu": WIDE, "Tanh": NARROW_READER}, *RT) == {"r": ["a8", "a4"], "t": ["a4"]}
    assert limited({"Tanh": NARROW_READER}, *RT) == {"r": [], "t": ["a4"]}  # without options, none to lose


def test_the_limit_goes_through_pass_through_operators_and_no_further():
    nodes = "p = Relu(x)", "q = Relu(p)", "m = Reshape(q)", "n = Reshape(m)", "t = Tanh(n)"
    assert limited({"Relu": WIDE, "Tanh": NARROW_READER}, *nodes) == {
        "p": ["a16", "a8", "a4"], "q": ["a8", "a4"], "m": ["same"], "n": ["same"], "t": ["a4"],
    }  # fmt: skip


def test_the_least_of_several_limits_counts_in_either_order():
    rules = {"Relu": WIDE, "Tanh": NARROW_READER, "Sigmoid": [{"in": "any", "in_bits": [4], "out": "a4"}]}
    for first, second in (("Tanh", "Sigmoid"), ("Sigmoid", "Tanh")):
        assert limited(rules, RT[0], f"s = {first}(r)", f"t = {second}(r)", outputs=["s", "t"])["r"] == ["a4"]


@pytest.mark.parametrize(
    "writes, reads, overrides, left",
    [
        (WIDE, [{"in": "any", "out": "a4"}], {}, ["a16", "a8", "a4"]),  # it reads any width
        (WIDE, NARROW_READER, {"t": {"float": "by hand"}}, ["a16", "a8", "a4"]),
        (WIDE, [{"in": "any", "in_bits": [4], "out": "a4"}, *NARROW_READER], {}, ["a8", "a4"]),  # the widest counts
        (use(("a16", "float"), ("a16", "a16")), NARROW_READER, {}, ["float"]),  # everything reads floats
        (use(("a16", "a16")), NARROW_READER, {"r": {"float": "by hand"}}, ["a16"]),
    ],
)
def test_what_a_consumer_reads_limits_its_producer(writes, reads, overrides, left):
    assert limited({"Relu": writes, "Tanh": reads}, *RT, overrides=overrides)["r"] == left


def test_a_result_that_no_consumer_reads_is_refused_with_both_layers():
    with pytest.raises(UnsupportedError, match=r"result of 'r' is wider than its consumer 't'.*'npu'.*16.*most 8 bits"):
        limited({"Relu": use(("a16", "a16")), "Tanh": NARROW_READER}, *RT)


@pytest.mark.parametrize("in_float", ["Conv2D", "Add"])
def test_keeping_producers_or_consumers_in_float_is_a_way_out(in_float):
    writes = {"match": ["Conv2D"], "use": [{"in": "any", "w": "w8", "out": "a16"}]}
    wide = platform_of(writes, {"match": ["Add"], "use": NARROW_READER}, formats=FORMATS)
    model = model_of(lambda m, x: m.a(x) + m.b(x), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    plan = quantized(model, images(2), wide, overrides={in_float: "float"}).plan
    assert plan.quantized("add") is (in_float == "Conv2D") and plan.quantized("a.weight") is (in_float == "Add")


# ---------------------------------------------------------------- formats that consumers want

RULES = {
    "Relu": use(("a8", "a8")), "Tanh": use(("a4", "a4")), "Sigmoid": use(("any", "a4")), "Gelu": use(("float", "a8")),
}  # fmt: skip


def wanted(*nodes, platform=None, overrides=None, **more):
    graph, p = graph_of(*nodes, **more), platform or chip(RULES)
    return formats_wanted_by_consumers(graph, p, find_groups(graph, p, (), overrides or {}))


def test_a_consumer_wants_the_format_of_its_first_option():
    assert wanted(*RT) == {"r": "a4", "x": "a8"}
    assert wanted("s = Sigmoid(x)") == {"x": "any"} and wanted("g = Gelu(x)") == {}


@pytest.mark.parametrize(
    "first, second, found",
    [
        ("Relu", "Tanh", "a4"),
        ("Tanh", "Relu", "a8"),
        ("Sigmoid", "Relu", "a8"),
        ("Relu", "Sigmoid", "a8"),
        ("Sigmoid", "Sigmoid", "any"),
        ("Relu", "Gelu", "a8"),
        ("Gelu", "Relu", "a8"),
    ],
)
def test_of_several_consumers_the_last_decides_unless_it_reads_anything(first, second, found):
    assert wanted(f"p = {first}(x)", f"q = {second}(x)", outputs=["p", "q"])["x"] == found


def test_a_pass_through_operator_passes_the_format_on_to_what_it_alone_reads():
    row = "r = Relu(x)", "m = Reshape(r)", "t = Tanh(m)"
    assert wanted(*row) == {"m": "a4", "r": "a4", "x": "a8"}
    assert wanted(*row, "g = Gelu(r)", outputs=["t", "g"]) == {"m": "a4", "x": "a8"}
    at_input = "m = Reshape(x)", "t = Tanh(m)", "g = Gelu(x)"
    assert wanted(*at_input, outputs=["t", "g"]) == {"m": "a4", "x": "a4"}
    assert wanted(*row, overrides={"m": {"float": "by hand"}}) == {"m": "a4", "x": "a8"}
    unread = "r = Relu(x)", "m = Reshape(r)", "n = Reshape(x)", "t = Tanh(n)"
    assert wanted(*unread, outputs=["m", "t"]) == {"n": "a4", "x": "a4"}
    moved = "r = Reshape(x)", "m = Reshape(r)", "t = Tanh(m)", "o = Reshape(r)"  # a state that is an output, too
    assert wanted(*moved, outputs=["t", "o"]) == {"m": "a4"}
    without = chip(RULES, float_unit=False)
    assert wanted(*moved, outputs=["t", "o"], platform=without) == {"m": "a4", "r": "a4", "x": "a4"}


@pytest.mark.parametrize(
    "place, unlisted, found",
    [
        ({"io_out": ["a4", "a8"]}, "float", {"m": "a4", "r": "a4", "x": "a8"}),
        ({"io_out": ["a4", "float"]}, "float", {"x": "a8"}),
        ({}, "float", {"x": "a8"}),
        ({"io_out": ["a4", "a8"]}, "cpu", {"x": "a8"}),
    ],
)
def test_results_of_the_model_are_wanted_in_the_formats_of_the_chips_outputs(place, unlisted, found):
    p = chip(RULES, place=place, unlisted=unlisted)
    assert wanted("r = Relu(x)", "m = Reshape(r)", platform=p) == found


# ---------------------------------------------------------------- networks

X = images(2, 4)


def test_an_index_that_is_computed_is_not_quantized_with_what_it_picks():
    def picked(m, x):
        y = m.conv(x)
        return torch.index_select(y, 1, torch.argmax(y[0, :, 0, 0]).reshape(1))

    result = quantized(model_of(picked, conv=nn.Conv2d(3, 8, 1)), X, "tflite_int8")
    gather = next(n for n in result.graph.nodes if n.op == "Gather")
    assert result.plan.quantized(gather.output)
    assert [result.plan.quantized(i) for i in gather.inputs] == [True, False]


def test_a_pass_through_operator_that_is_kept_in_float_moves_floats():
    model = sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))
    whole, kept = (quantized(model, X, "tflite_int8", overrides=o).plan for o in ({}, {"MaxPool": "float"}))
    assert whole.nodes["max_pool2d"].exec == "follow" and not whole.float_edges
    assert kept.nodes["max_pool2d"].exec == "float" and kept.nodes["max_pool2d"].why
    assert whole["max_pool2d"].same_numbers(whole["conv2d"])


def test_an_input_that_the_chip_holds_quantized_is_moved_so():
    result = quantized(model_of(lambda m, x: (m.conv(x), x.flatten(1)), conv=nn.Conv2d(3, 4, 1)), X, "tflite_int8")
    moved = next(n for n in result.graph.nodes if n.op == "Reshape")
    assert result.plan.quantized(moved.output) and result.plan.nodes[moved.name].exec == "follow"


def test_operators_of_one_kernel_name_the_last_as_their_group():
    result = quantized(sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)), X, "tflite_int8")
    first, relu, last = (n.name for n in result.graph.nodes)
    assert [result.plan.nodes[n].group for n in (first, relu, last)] == [relu, relu, ""]


def test_a_result_in_float_is_not_stored_in_a_type_that_its_kernel_does_not_support():
    """A linear layer stores what it reads and writes in one type."""

    def mixing(m, x):
        y = nn.functional.avg_pool1d(m.conv(x).relu(), 2).transpose(1, 2)
        return m.head(((y @ m.key(y).transpose(1, 2)).softmax(-1) @ y)[:, 0])

    torch.manual_seed(0)
    model = model_of(mixing, conv=nn.Conv1d(8, 8, 3, padding=1), key=nn.Linear(8, 8), head=nn.Linear(8, 4))
    result = quantized(model, torch.randn(8, 8, 12) * 3, "ort_cpu")
    (pool, key) = (next(n for n in result.graph.nodes if n.op == op).output for op in ("AvgPool", "Linear"))
    assert result.plan[pool].grid.signed is False
    assert not result.plan.quantized(key) or not result.plan[key].grid.signed
    assert result.verify([torch.randn(4, 8, 12) * 3]).verdict == "exact"


def test_a_concatenation_reads_all_its_inputs_quantized():
    """What an operator in float makes is rounded for it, to the numbers of the others."""
    model = model_of(lambda m, x: torch.cat([m.a(x), torch.erf(x)], 1), a=nn.Conv2d(3, 4, 1))
    result = quantized(model, X, "tflite_int8", overrides={"Erf": "float"})
    plan, (conv, erf, cat) = result.plan, result.graph.nodes
    assert (plan.nodes[erf.name].exec, plan.nodes[cat.name].exec) == ("float", "follow")
    assert plan[erf.output].same_numbers(plan[cat.output]) and plan[conv.output].same_numbers(plan[cat.output])
    assert (erf.output, cat.name) not in plan.float_edges
