"""Matching: the first rule that names the operator and whose conditions hold, and a reason when there is none."""

import pytest
import torch

from chipfit.graph.ir import Node
from chipfit.platform.filters import AttributeFilter, Member
from chipfit.platform.load import load, names
from chipfit.platform.match import covers, facts, fusions, names_operator, needs_weight, resolve, resolve_node, sets_of
from tests.build import graph_of, node, platform_of

CONV = {"stride": (1, 1), "dilation": (1, 1), "kernel": (3, 3), "groups": 1, "padding": ((1, 1), (1, 1))}


def rule(match, *, use=True, **more):
    return {"match": [match], "use": [{"in": "a8", "out": "a8"}] if use else [], **more}


def test_the_first_rule_whose_conditions_hold_wins():
    p = platform_of(
        rule("Conv2D", where={"kernel": {"max": 2}}, note="small"), rule("@conv", note="any"), rule("*", exec="float")
    )
    assert resolve(p, "Conv2D", CONV).rule.note == "any"
    assert resolve(p, "Conv2D", {**CONV, "kernel": (1, 1)}).rule.note == "small"
    assert resolve(p, "Erf", {}).exec == "float"


def test_a_condition_that_fails_says_what_was_wanted():
    p = platform_of(rule("Conv2D", where={"stride": {"min": 1, "max": 3}}))
    found = resolve(p, "Conv2D", {**CONV, "stride": (4, 4)})
    assert (found.rule, found.exec) == (None, "float")
    assert found.why == "'npu' runs Conv2D only with stride at most 3 (got 4 x 4); rule ops.0"


def test_what_a_node_does_not_tell_counts_as_satisfied_and_is_noted():
    p = platform_of(rule("Conv2D", where={"batch": 1, "fused_activation": "none"}))
    found = resolve(p, "Conv2D", {**CONV, "in_shape": (None, 3, 8, 8)})
    assert found.rule is not None
    assert [n.split()[2] for n in found.notes] == ["batch", "fused_activation"]


def test_a_rule_without_formats_adds_its_constraints_and_conditions():
    tie = {"tie": ["ins", "out"]}
    p = platform_of(
        rule("Add", use=False, rules=[tie], where={"rank": {"max": 4}}),
        rule("@eltwise", rules=[{"dtype": ["ins", "out"]}]),
    )
    assert [r.head for r in resolve(p, "Add", {"in_shape": (1, 2)}).rules] == ["tie", "dtype"]
    assert [r.head for r in resolve(p, "Mul", {"in_shape": (1, 2)}).rules] == ["dtype"]
    assert resolve(p, "Add", {"in_shape": (1,) * 5}).exec == "float"


@pytest.mark.parametrize(
    "op, attrs, words",
    [
        ("Clamp", {"min": -1.0, "max": 1.0}, "ReluN1To1"),
        ("Clamp", {"min": 0.0, "max": 2.0}, "HardTanh"),
        ("Relu6", {}, "Clamp"),
        ("Reshape", {"shape": (-1,)}, "Flatten"),
        ("Slice", {}, "StridedSlice"),
        ("Select", {}, "GetItem Slice"),
        ("DepthToSpace", {}, "PixelShuffle"),
        ("SDPA", {}, "Attention"),
        ("GlobalAvgPool", {}, "Mean AvgPool"),
        ("Conv2D", {}, "@compute *"),
    ],
)
def test_a_platforms_own_word_for_an_operator_is_understood(op, attrs, words):
    assert all(resolve(platform_of(rule(word)), op, attrs).exec == "int" for word in words.split())


def test_a_platforms_word_stands_for_its_operator_alone():
    assert resolve(platform_of(rule("ReluN1To1")), "Clamp", {"min": -2.0, "max": 2.0}).exec == "float"
    p = platform_of(rule("Mean", note="mean"), rule("GlobalAvgPool", note="pool"))
    assert resolve(p, "GlobalAvgPool", {}).rule.note == "pool"


def test_a_global_pool_has_its_input_as_window():
    p = platform_of(rule("AvgPool", where={"kernel": [2, 4]}))
    assert resolve(p, "GlobalAvgPool", {"in_shape": (None, 8, 4, 4)}).exec == "int"
    assert resolve(p, "GlobalAvgPool", {"in_shape": (None, 8, 7, 7)}).exec == "float"


@pytest.mark.parametrize("gate, open_on", [(">=B", "BC"), ("<B", "A"), ("B", "B")])
def test_gates_follow_the_order_of_the_revisions(gate, open_on):
    p = platform_of(rule("Add", when={"arch": gate}), arch=["A", "B", "C"])
    assert "".join(a for a in "ABC" if resolve(p.model_copy(update={"arch_selected": a}), "Add", {}).rule) == open_on


@pytest.mark.parametrize(
    "unlisted, how", [("float", "float"), ("cpu", "float"), ("reject", "float"), ("follow", "follow")]
)
def test_an_operator_that_is_not_listed_runs_as_the_platform_says(unlisted, how):
    found = resolve(platform_of(rule("Add"), unlisted=unlisted), "Erf", {})
    where = ", which the CPU computes" if unlisted == "cpu" else ""
    assert (found.exec, found.why) == (how, f"'npu' lists no rule for Erf{where}")


@pytest.mark.parametrize("name", names())
def test_every_built_in_takes_a_plain_convolution(name):
    shapes = {"in_shape": (1, 16, 8, 8), "out_shape": (1, 16, 8, 8), "static_shape": True}
    assert resolve(load(name), "Conv2D", CONV | shapes).options


def test_a_branched_fusion_becomes_the_chain_along_its_edges():
    graph = {"nodes": {"c": "@conv", "s": "Add", "r": ["Relu"]}, "edges": [["c", "s.in1"], ["s", "r"]]}
    p = platform_of(rule("Add"), fuse=[{"graph": {**graph, "free_input": "s.in0"}, "src": ["M"], "conf": "V"}])
    conv = frozenset({"Conv1D", "Conv2D", "DepthwiseConv2D", "Conv3D"})
    assert fusions(p) == ((conv, frozenset({"Add"}), frozenset({"Relu"})),)


def layers():
    """A graph of a convolution, a linear layer whose weight is computed, and a ReLU; sizes differ by axis."""
    conv = node("y = Conv2D(x, w)", {"stride": (2, 1), "groups": 1}, layer_type="Conv2d", config={"bias": False})
    nodes = conv, node("u = Linear(y, z)"), node("v = Relu(u)"), Node("none", "Nobody's", (None,), ())
    shapes = {"x": (None, 3, 9, 7), "y": (None, 5, None, 7), "z": (4, 7), "u": (None, 5, 4, 4)}
    return graph_of(*nodes, shapes=shapes, weights={"w": torch.ones(5, 3, 2, 1)}, outputs=["v"])


def test_what_a_condition_may_ask_about_a_node():
    graph = layers()
    del graph.values["v"]  # a value of unknown shape
    conv, linear, relu, none = (facts(graph, n) for n in graph)
    assert conv == {
        "stride": (2, 1), "groups": 1, "config": {"bias": False}, "layer_type": "Conv2d", "in_shape": (None, 3, 9, 7),
        "static_shape": True, "channels": 3, "in_channels": 3, "out_shape": (None, 5, None, 7), "const_weights": True,
        "weights": "constant", "weight_elements": 30, "kernel": (2, 1),
    }  # fmt: skip
    assert (linear["const_weights"], linear["weights"], linear["static_shape"]) == (False, "computed", False)
    assert "kernel" not in linear and linear["channels"] == 5
    assert relu == {"config": {}, "layer_type": "", "in_shape": (None, 5, 4, 4), "static_shape": True} | {
        "channels": 5, "in_channels": 5,
    }  # fmt: skip
    assert none == {"config": {}, "layer_type": ""}


@pytest.mark.parametrize("shape, more", [((), {}), ((4,), {}), ((4, None), {}), ((None, 2), {"channels": 2})])
def test_channels_are_known_where_there_is_an_axis_of_known_size(shape, more):
    graph = graph_of("y = Relu(x)", shape=shape)
    found = facts(graph, graph.nodes[0])
    assert {k: found[k] for k in found if k == "channels"} == more
    assert found["static_shape"] is (shape != (4, None))


def test_an_operator_of_weights_needs_one():
    assert [needs_weight(op) for op in ("Conv2D", "Linear", "Relu", "MatMul", "Nobody's")] == [True, True] + 3 * [False]


@pytest.mark.parametrize(
    "match, by_name, at_all",
    [
        ("Add", True, True),
        ("Mul Add", True, True),
        ("Mul", False, False),
        ("*", False, True),
        ("@eltwise", True, True),
        ("@conv", False, False),
        ("@mine", True, True),
        ("@nobody", False, False),
        ("", False, False),
    ],
)
def test_what_a_rule_names(match, by_name, at_all):
    names = tuple(match.split())
    assert covers(names, {"Add", "@mine"}, everything=False) is by_name
    assert covers(names, {"Add", "@mine"}) is at_all


def test_of_two_sets_the_one_that_names_the_layer_is_meant():
    few = AttributeFilter(attr="n", test="lt", value=3)
    sets = {
        "any": (Member(op=("Add",)),),
        "mine": (Member(op=("Add",), name="Mine"), Member(type="Other")),
        "few": (Member(op=("Add",), where=few),),
    }
    assert sets_of(sets, "Add", "Mine", {"n": 5}) == {"@mine"}
    assert sets_of(sets, "Add", "add", {"n": 5}) == {"@any"}
    assert sets_of(sets, "Add", "add", {"n": 2}) == {"@any", "@few"}
    assert sets_of(sets, "Add", "add", {"n": 2}, filtered=True) == {"@few"}
    assert sets_of({"mine": sets["mine"]}, "Add", "add", {}) == {"@mine"}
    assert sets_of(sets, "Mul", "mul", {}) == set() == sets_of({}, "Add", "add", {})


def test_a_set_with_a_condition_goes_before_rules_for_its_operator_and_is_not_meant_by_everything():
    few = Member(op=("Add",), where=AttributeFilter(attr="n", test="lt", value=3))
    p = platform_of(rule("*", note="all"), rule("Add", note="add"), rule("@few", note="few"), sets={"few": [few]})
    notes = [resolve(p, "Add", {"config": {"n": n}}).rule.note for n in (2, 3)]
    assert notes == ["few", "all"]
    p = platform_of(rule("@few", note="few", where={"rank": 2}), rule("Add", note="add"), sets={"few": [few]})
    assert resolve(p, "Add", {"config": {"n": 2}, "in_shape": (1, 2)}).rule.note == "few"
    assert resolve(p, "Add", {"config": {"n": 2}, "in_shape": (1, 2, 3)}).rule.note == "add"


def test_whether_a_rule_names_the_operator_or_all_there_are():
    graph = layers()
    conv, _, relu, _ = graph.nodes
    p = platform_of(rule("@convs"), rule("*"), sets={"convs": [Member(type="Conv2d")]})
    assert names_operator(p, graph, conv) and not names_operator(p, graph, relu)
    assert names_operator(platform_of(rule("Relu")), graph, relu)
    assert not names_operator(platform_of(rule("Add")), graph, relu)


def test_a_restriction_that_does_not_hold_ends_the_search_and_the_first_reason_stays():
    only = rule("Add", use=False, where={"rank": 2})
    p = platform_of(rule("Add", where={"rank": 3}), only, rule("Add"))
    found = resolve(p, "Add", {"in_shape": (1,) * 4})
    assert (found.rule, found.options, found.rules, found.exec) == (None, (), (), "float")
    assert found.why == "'npu' runs Add only with rank 3 (got 4); rule ops.0"
    assert resolve(p, "Add", {"in_shape": (1, 1)}).rule is p.ops[2]
    skipped = platform_of(rule("Add", where={"rank": 3}, rules=[{"tie": ["ins", "out"]}]), rule("Add"))
    assert resolve(skipped, "Add", {"in_shape": (1, 1)}).rules == ()


def test_bits_of_activations_are_8_where_nothing_is_said():
    p = platform_of(rule("Relu", when={"bits": 16}, note="wide"), rule("Relu", when={"bits": 8}, note="narrow"))
    graph = layers()
    assert resolve(p, "Relu", {}).rule.note == resolve_node(p, graph, graph.node("v")).rule.note == "narrow"
    assert resolve_node(p, graph, graph.node("v"), bits=16).rule.note == "wide"


def test_a_rule_without_open_formats_says_so():
    gated = {"match": ["Add"], "use": [{"in": "a8", "out": "a8", "when": {"arch": "B"}}]}
    p = platform_of(gated, rule("Mul", exec="float"), arch=["A", "B"])
    found = {a: resolve(p.model_copy(update={"arch_selected": a}), "Add", {}) for a in "AB"}
    assert found["A"].options == () and found["A"].why == "'npu' has no formats for Add on revision A"
    assert len(found["B"].options) == 1 and found["B"].why == ""
    assert resolve(p, "Mul", {}).why == "'npu' computes Mul in float"


FORMATS = {
    "a8": {"bits": 8},
    "w8": {"bits": 8, "per": "channel"},
    "now": {"bits": 8, "dynamic": True},
    "rows": {"bits": 8, "dynamic": True, "per": "row"},
    "blocks": {"bits": 8, "per": "block", "axis": "in", "block": 32},
    "half": {"bits": 16, "kind": "float", "float": "fp16"},
}
_ELSEWHERE, _PARTS = "ranges computed at run time of other tensors", "dynamic ranges for parts of the input"


_BLOCKS = "scales per block of activations"
LINEAR = {"in": "a8", "w": "w8", "out": "a8"}


@pytest.mark.parametrize(
    "op, use, why",
    [
        ("Linear", LINEAR, ""),
        ("Linear", {**LINEAR, "in": "now", "out": "float"}, ""),
        ("Linear", {**LINEAR, "in": "rows", "out": "float"}, ""),
        ("MatMul", {"in": ["rows", "a8"], "out": "float"}, ""),
        ("Conv2D", {**LINEAR, "in": "now", "out": "float"}, ""),
        ("Conv2D", {**LINEAR, "in": "rows", "out": "float"}, _PARTS),
        *(("Linear", {**LINEAR, slot: "now"}, _ELSEWHERE) for slot in ("w", "b", "out")),
        ("MatMul", {"in": ["a8", "now"], "out": "a8"}, _ELSEWHERE),
        ("Linear", {**LINEAR, "w": "blocks"}, ""),
        *(("Linear", {**LINEAR, slot: "blocks"}, _BLOCKS) for slot in ("in", "b", "out")),
        ("MatMul", {"in": ["a8", "blocks"], "out": "a8"}, _BLOCKS),
    ],
)
def test_formats_that_cannot_be_decided_say_what_is_missing(op, use, why):
    found = resolve(platform_of({"match": [op], "use": [use]}, formats=FORMATS), op, {})
    assert bool(found.options) == (not why)
    assert found.why.startswith(f"the formats of 'npu' for {op} need {why}") if why else found.why == ""
    both = platform_of({"match": [op], "use": [use, LINEAR]}, formats=FORMATS)
    assert len(resolve(both, op, {}).options) == 1 + (not why)  # the other stays open


def test_floating_point_is_one_word_whatever_its_format():
    use = {"in": ["half", "a8"], "w": "w8", "b": "half", "out": "half"}
    (found,) = resolve(platform_of({"match": ["MatMul"], "use": [use]}, formats=FORMATS), "MatMul", {}).options
    assert (found.in_, found.w, found.b, found.out) == (("float", "a8"), "w8", "float", "float")
    use = {"in": "now", "w": "w8", "out": "half"}
    (found,) = resolve(platform_of({"match": ["Linear"], "use": [use]}, formats=FORMATS), "Linear", {}).options
    assert (found.in_, found.dynamic, found.out) == ("float", "now", "float")


def test_fusions_name_their_sets_by_operators_where_those_say_it():
    convs = [{"op": ["Conv2D"]}, {"op": ["Linear"]}]
    sets = {"plain": convs, "named": [*convs, {"op": ["Add"], "type": "Mine"}], "typed": [{"type": "Mine"}]}

    def chain(*steps, **more):
        return {"chain": [[s] for s in steps], "src": ["M"], "conf": "V", **more}

    fuse = [
        chain("@plain", "Relu"),
        chain("@named", "@typed"),
        chain("Add", "Relu", when={"phase": "qat"}),
        chain("Mul", "Relu", when={"phase": "ptq"}),
        chain("Sub", "Relu", when={"arch": "A"}),
    ]
    p = platform_of(rule("Add"), arch=["A", "B"], sets=sets, fuse=fuse)
    assert fusions(p.model_copy(update={"arch_selected": "B"})) == (
        ({"Conv2D", "Linear"}, {"Relu"}),
        ({"Conv2D", "Linear", "@named"}, {"@typed"}),
        ({"Mul"}, {"Relu"}),
    )
