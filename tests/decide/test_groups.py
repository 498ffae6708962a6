"""Fused groups of a graph: what each reads and writes, and the formats that its rule has for it."""

import pytest

from chipfit.decide import groups as grouping
from chipfit.decide.groups import find_groups
from chipfit.platform.match import Resolved
from chipfit.platform.schema import Format, Option, Rule
from tests.build import graph_of, node, platform_of


def chip(*ops, **more):
    """Formats of 4, 8 and 16 bits for activations and weights, and the given rules."""
    formats = {
        **{f"a{k}": {"bits": k, "zero": "any"} for k in (8, 4, 16)},
        **{f"w{k}": {"bits": k, "per": "channel"} for k in (8, 4, 16)},
    }
    return platform_of(*ops, formats=formats, **more)


LINEAR = {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "b": "a16", "out": "a8"}, {"in": "float", "w": "w8"}]}
OTHERS = {"match": ["Add", "Relu"], "use": [{"in": "a8", "out": "a8"}]}


THREE = graph_of("l = Linear(x, w, b)", "r = Relu(l)", "s = Add(r, x)", "t = Relu(s)", weights="wb")


def test_a_group_stands_at_its_last_node_and_reads_what_none_of_its_nodes_makes():
    groups = find_groups(THREE, chip(LINEAR, OTHERS), [("l", "r", "s")], {})
    assert [[n.name for n in g.nodes] for g in groups] == [["l", "r", "s"], ["t"]]
    first, second = groups
    assert [(r.node.name, r.slot, r.tensor) for r in first.operands] == [
        ("l", "in0", "x"), ("l", "w", "w"), ("l", "b", "b"), ("s", "in1", "x"),
    ]  # fmt: skip
    assert [r.is_data for r in first.operands] == [True, False, False, True]
    assert (first.head.name, first.tail.name, first.layer, first.data) == ("l", "s", "l", ["x", "x"])
    assert (second.head.name, second.data, second.is_pass_through, second.float_reason) == ("t", ["s"], False, "")
    assert first.data_formats(Option(in_=("a8", "a4"))) == {"x": "a8"}  # the first time that it is read
    moving = find_groups(THREE, chip({**OTHERS, "exec": "follow"}), (), {"t": {"float": "by hand"}})
    assert [g.is_pass_through for g in moving] == [False, True, True, True] and moving[-1].float_reason == "by hand"


def test_the_last_choice_about_a_group_wins():
    p = chip(LINEAR, OTHERS)
    for overrides, choices in (
        ({"l": {"bits": 4}, "s": {"bits": 8}, "t": {"bits": 2}}, {"bits": 8}),
        ({"s": {"bits": 8}, "l": {"bits": 4, "rule": "mse"}}, {"bits": 4, "rule": "mse"}),
        ({"l": {"float": "no"}, "r": {"bits": 4}}, {"bits": 4}),
        ({"r": {"bits": 4}, "l": {"float": "no"}}, {"bits": 4, "float": "no"}),
        ({"x": {"bits": 4}}, {}),
    ):
        assert find_groups(THREE, p, [("l", "r", "s")], overrides)[0].choices == choices


def test_activation_bits_open_the_rules_for_them():
    wide = {"match": ["Relu"], "when": {"bits": 16}, "use": [{"in": "a16", "out": "a16"}]}
    p = chip(wide, OTHERS)
    graph = graph_of("t = Relu(x)")
    for asked, name in ((None, "a8"), (16, "a16"), (8, "a8"), ("float", "a8")):
        (group,) = find_groups(graph, p, (), {"t": {"activation_bits": asked}} if asked else {})
        assert group.resolved.options[0].in_ == name


def test_where_quantizers_belong_to_writers_a_group_writes_what_its_last_operator_writes():
    any8 = {"match": ["Linear"], "use": [{"in": "any", "w": "w8", "out": "a8"}]}
    relu = {"match": ["Relu"], "use": [{"in": "any", "out": "a4"}, {"in": "any", "out": "a16"}]}
    # operators between the first and the last do not count
    found = find_groups(THREE, chip(any8, relu, OTHERS), [("l", "s", "t")], {})
    assert [(o.w, o.out) for o in found[-1].resolved.options] == [("w8", "a4"), ("w8", "a16")]
    pair = find_groups(THREE, chip(any8, relu, OTHERS), [("l", "r")], {})[0]
    assert [o.out for o in pair.resolved.options] == ["a4", "a16"]
    alone = find_groups(THREE, chip(any8, relu, OTHERS), (), {})[0]
    assert [o.out for o in alone.resolved.options] == ["a8"]
    codes = find_groups(THREE, chip(LINEAR, relu), [("l", "r")], {})[0]
    assert [o.out for o in codes.resolved.options] == ["a8", None]
    unlisted = find_groups(THREE, chip({**relu, "match": ["Add"]}), [("l", "r")], {})[0]
    assert unlisted.resolved.options == ()


def test_a_fused_group_has_the_rules_about_its_result_from_its_last_operator():
    def rules(n):
        return [
            Rule(fix="out", scale=n, zp=0), Rule(zero="out", eq=n), Rule(mono={"in0": 1, "out": -1}, eq=n),
            Rule(fix="in0", scale=n, zp=0), Rule(zero="in0", eq=n), Rule(mono={"in0": 1, "w": -1}, eq=n),
            Rule(tie=("ins", "out")),
        ]  # fmt: skip

    two = (Option(in_="any", w="w8", out="a8"), Option(in_="any", w="w4", out="a8"))
    head = Resolved(None, two, tuple(rules(1)), "int")
    tail = Resolved(None, (Option(out="a4"), Option(out="a16"), Option(out="a4")), tuple(rules(2)), "int")
    found = grouping.with_result_of(head, tail)
    assert list(found.rules) == [*rules(1)[3:], *rules(2)[:3]]
    assert [(o.w, o.out) for o in found.options] == [("w8", "a4"), ("w8", "a16"), ("w4", "a4"), ("w4", "a16")]
    nothing = grouping.with_result_of(head, Resolved(None, (), (), "float"))
    assert [(o.w, o.out) for o in nothing.options] == [("w8", "none"), ("w4", "none")]
    assert list(nothing.rules) == rules(1)[3:]


STEP = {"layer": "act", "layer_type": "Mine", "source": "net.py:3"}
FIX = [{"fix": slot, "scale": 1.0, "zp": 0} for slot in ("in0", "out", "outs")]


@pytest.mark.parametrize(
    "member, second, outputs, free",
    [
        ({"type": "Mine"}, STEP, None, True),
        ({"type": "Mine", "op": ["Relu"]}, STEP, None, False),  # it names an operator, not the layer as a whole
        ({"type": "Yours"}, STEP, None, False),
        ({"name": "Mine"}, STEP, None, False),
        ({"type": "Mine"}, {**STEP, "layer": "other"}, None, False),
        ({"type": "Mine"}, {**STEP, "layer_type": "Other"}, None, False),
        ({"type": "Mine"}, {**STEP, "source": "net.py:4"}, None, False),
        ({"type": "Mine"}, STEP, ["a", "c"], False),
    ],
)
def test_steps_inside_of_a_layer_that_a_set_names_have_free_results(member, second, outputs, free):
    nodes = node("a = Relu(x)", **STEP), node("b = Relu(a)", **second), node("c = Add(b, a)", **second)
    graph = graph_of(*nodes, outputs=outputs or ["c"])
    rule = {"match": ["Add", "@mine", "Relu"], "use": [{"in": "a8", "out": "a8"}], "rules": FIX}
    groups = find_groups(graph, chip(rule, sets={"mine": [{"type": "Nobody"}, member]}), (), {})
    assert [r.fix for r in groups[0].resolved.rules] == (["in0"] if free else ["in0", "out", "outs"])
    assert [r.fix for r in groups[-1].resolved.rules] == ["in0", "out", "outs"]  # it gives the layer's result


def test_a_step_that_nothing_reads_is_not_inside():
    graph = graph_of(node("a = Relu(x)", **STEP), "b = Relu(x)")
    rule = {"match": ["@mine", "Relu"], "use": [{"in": "a8", "out": "a8"}], "rules": FIX}
    first = find_groups(graph, chip(rule, sets={"mine": [{"type": "Mine"}]}), (), {})[0]
    assert len(first.resolved.rules) == 3
    unlisted = find_groups(graph, chip(sets={"mine": [{"type": "Mine"}]}), (), {})[0]
    assert unlisted.resolved.rules == ()


ROW = graph_of("p = Relu(x)", "k = Linear(p, w)", "l = Linear(k, w)", "m = Linear(l, w)", "q = Relu(m)", weights="w")


@pytest.mark.parametrize(
    "first_last, overrides, found",
    [
        (None, {}, ["a8 w8 a8"] * 3),
        ({"bits": 4}, {}, ["a4 w4 a4", "a8 w8 a8", "a4 w4 a4"]),
        ({"bits": 2}, {}, ["a8 w8 a8"] * 3),  # there is no such format
        ({"bits": 16, "slots": ["w"]}, {}, ["a8 w16 a8", "a8 w8 a8", "a8 w16 a8"]),
        ({"bits": 16, "slots": ["in0", "outs"]}, {}, ["a16 w8 a16", "a8 w8 a8", "a16 w8 a16"]),
        ({"bits": 16, "slots": ["out"]}, {}, ["a8 w8 a16", "a8 w8 a8", "a8 w8 a16"]),
        ({"bits": 4}, {"k": {"bits": 8}, "l": {"bits": 8}}, ["a4 w8 a4", "a8 w8 a8", "a4 w4 a4"]),
        ({"bits": 4}, {"m": {"activation_bits": 8}}, ["a4 w4 a4", "a8 w8 a8", "a8 w4 a8"]),
    ],
)
def test_first_and_last_layers_with_weights_have_other_bits_unless_the_user_chose_some(first_last, overrides, found):
    weighted = {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "out": "a8"}]}
    place = {"at": "outputs", **({"first_last": first_last} if first_last else {})}
    groups = find_groups(ROW, chip(weighted, OTHERS, place=place), (), overrides)
    options = [g.resolved.options[0] for g in groups]
    assert [f"{o.in_} {o.w} {o.out}" for o in options[1:-1]] == found
    assert {o.in_ for o in (options[0], options[-1])} == {"a8"}


def test_a_network_without_weights_has_no_first_layer():
    p = chip(OTHERS, place={"at": "outputs", "first_last": {"bits": 4}})
    [group] = find_groups(graph_of("t = Relu(x)"), p, (), {})
    assert group.resolved.options[0].in_ == "a8"


@pytest.mark.parametrize(
    "name, bits, found",
    [("a8", 4, "a4"), ("w8", 16, "w16"), ("a8", 8, "a8"), ("a8", 5, "a8"), (("a8", "a4"), 4, ("a8", "a4"))]
    + [(word, 4, word) for word in grouping.NO_FORMAT],
)
def test_the_format_of_another_width(name, bits, found):
    assert grouping.variant_with_bits(chip(), name, bits) == found


@pytest.mark.parametrize(
    "block, size, found",
    [(4, 8, 4), (4, 6, None), (4, None, None), (4, 0, None), (None, 8, None), ((3, 4, 2), 8, 4), ((3, 2, 4), 8, 2)],
)
def test_the_first_size_of_blocks_that_divides_an_axis(block, size, found):
    assert grouping.block_length(Format(bits=8, per="block", axis="in", block=block), size) == found


@pytest.mark.parametrize(
    "op, shape, found",
    [
        ("Linear", (6, 8), (1, 4)),
        ("MatMul", (8, 6), (0, 4)),
        ("Embedding", (6, 8), (1, 4)),
        ("Gather", (6, 8), (1, 4)),
        ("Linear", (8, 6), None),
        ("MatMul", (6, 8), None),
        ("Linear", (8,), None),
        ("Conv2D", (8, 8, 1, 1), None),
    ],
)
def test_blocks_divide_what_a_sum_runs_over(op, shape, found):
    assert grouping.blocks_of(Format(bits=8, per="block", axis="in", block=4), op, shape) == found


def test_the_last_format_listed_serves_all_further_operands():
    option = Option(in_=("a8", "a4", "a16"))
    assert [grouping.format_of(option, f"in{k}") for k in range(5)] == ["a8", "a4", "a16", "a16", "a16"]
    assert grouping.format_of(option, "index") == "a8" and grouping.format_of(option, "in") == "a8"
    assert grouping.format_of(Option(in_="a8"), "in3") == "a8" and grouping.format_of(Option(), "in0") is None


def test_formats_agree_in_the_given_fields():
    a, b = Format(bits=8, zero="any"), Format(bits=8, signed=False)
    assert grouping.same_fields(a, b, "bits") and grouping.same_fields(a, b)
    assert not grouping.same_fields(a, b, "bits", "zero") and not grouping.same_fields(a, b, "signed", "bits")
