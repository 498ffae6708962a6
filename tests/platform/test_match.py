"""Matching: the first rule that names the operator and whose conditions hold, and a reason when there is none."""

from __future__ import annotations

import pytest

from chipfit.platform.filters import Member
from chipfit.platform.load import load, names
from chipfit.platform.match import fusions, resolve
from chipfit.platform.schema import Platform
from chipfit.platform.where import judge

CONV = {"stride": (1, 1), "dilation": (1, 1), "kernel": (3, 3), "groups": 1, "padding": ((1, 1), (1, 1))}


def platform(*ops, **more):
    """A platform with one format a8 and the given rules."""
    rules = [{"src": ["M"], "conf": "V", **o} for o in ops]
    return Platform.model_validate(
        {"name": "npu", "formats": {"a8": {"bits": 8}}, "sources": {"M": "paper"}, "ops": rules, **more}
    )


def rule(match, *, use=True, **more):
    return {"match": [match], "use": [{"in": "a8", "out": "a8"}] if use else [], **more}


def test_the_first_rule_whose_conditions_hold_wins():
    p = platform(
        rule("Conv2D", where={"kernel": {"max": 2}}, note="small"), rule("@conv", note="any"), rule("*", exec="float")
    )
    assert resolve(p, "Conv2D", CONV).rule.note == "any"
    assert resolve(p, "Conv2D", {**CONV, "kernel": (1, 1)}).rule.note == "small"
    assert resolve(p, "Erf", {}).exec == "float"


def test_a_condition_that_fails_says_what_was_wanted():
    p = platform(rule("Conv2D", where={"stride": {"min": 1, "max": 3}}))
    found = resolve(p, "Conv2D", {**CONV, "stride": (4, 4)})
    assert (found.rule, found.exec) == (None, "float")
    assert found.why == "'npu' runs Conv2D only with stride at most 3 (got 4 x 4); rule ops.0"


@pytest.mark.parametrize(
    "where, attrs, refused",
    [
        ({"groups": 1}, {"groups": 1}, ""),
        ({"groups": 1}, {"groups": 2}, "groups 1 (got 2)"),
        ({"groups": [1, "in_channels"]}, {"groups": 8, "in_channels": 8}, ""),
        ({"groups": [1, "in_channels"]}, {"groups": 2, "in_channels": 8}, "groups 1 or 8 (got 2)"),
        ({"kernel": [1, 3]}, {"kernel": (3, 5)}, "kernel 1 or 3 (got 3 x 5)"),
        ({"channels": {"multiple": 16}}, {"channels": 24}, "channels a multiple of 16 (got 24)"),
        ({"dilation": "equal_xy"}, {"dilation": (2, 2)}, ""),
        ({"dilation": "equal_xy"}, {"dilation": (1, 2)}, "dilation equal in x and y (got 1 x 2)"),
        ({"slope": 0.1015625}, {"negative_slope": 0.01}, "slope 0.1015625 (got 0.01)"),
        ({"dilated_h": {"max": 64}}, {"kernel": (33, 1), "dilation": (2, 1)}, "dilated_h at most 64 (got 65)"),
        ({"dilated_hw": {"max": 9}}, {"kernel": (2, 2), "dilation": (3, 3)}, "dilated_hw at most 9 (got 16)"),
        ({"padding": ["same", "valid"]}, {"padding": ((0, 0), (0, 0))}, ""),
        (
            {"padding": ["same"]},
            {"padding": ((1, 1),), "stride": (2,), "in_shape": (1, 2, 9), "out_shape": (1, 2, 5)},
            "",
        ),
        (
            {"padding": ["same"]},
            {"padding": ((2, 2),), "stride": (1,), "in_shape": (1, 2, 9), "out_shape": (1, 2, 11)},
            "padding same (got explicit)",
        ),
        ({"axis": "depth"}, {"axis": -3, "in_shape": (None, 8, 4, 4)}, ""),
        ({"axis": "depth"}, {"axis": 2, "in_shape": (None, 8, 4, 4)}, "axis depth (got other)"),
        ({"reduced": {"max": 100}}, {"axes": (2, 3), "in_shape": (None, 8, 11, 11)}, "reduced at most 100 (got 121)"),
        ({"rank": {"max": 4}}, {"in_shape": (None, 3, 4, 4, 4)}, "rank at most 4 (got 5)"),
        ({"dims_above_1": {"max": 2}}, {"in_shape": (None, 3, 1, 4, 1)}, ""),
        ({"dims_above_1": {"max": 2}}, {"in_shape": (1, 3, 2, 4)}, "dims_above_1 at most 2 (got 3)"),
    ],
)
def test_conditions_are_read_as_the_files_mean_them(where, attrs, refused):
    assert judge(where, attrs) == (refused, ())


def test_what_a_node_does_not_tell_counts_as_satisfied_and_is_noted():
    p = platform(rule("Conv2D", where={"batch": 1, "fused_activation": "none"}))
    found = resolve(p, "Conv2D", {**CONV, "in_shape": (None, 3, 8, 8)})
    assert found.rule is not None
    assert [n.split()[2] for n in found.notes] == ["batch", "fused_activation"]


def test_a_rule_without_formats_adds_its_constraints_and_conditions():
    tie = {"tie": ["ins", "out"]}
    p = platform(
        rule("Add", use=False, rules=[tie], where={"rank": {"max": 4}}),
        rule("@eltwise", rules=[{"dtype": ["ins", "out"]}]),
    )
    assert [r.head for r in resolve(p, "Add", {"in_shape": (1, 2)}).rules] == ["tie", "dtype"]
    assert [r.head for r in resolve(p, "Mul", {"in_shape": (1, 2)}).rules] == ["dtype"]
    assert resolve(p, "Add", {"in_shape": (1,) * 5}).exec == "float"


@pytest.mark.parametrize(
    "op, attrs, word",
    [
        ("Clamp", {"min": -1.0, "max": 1.0}, "ReluN1To1"),
        ("Clamp", {"min": 0.0, "max": 2.0}, "HardTanh"),
        ("Relu6", {}, "Clamp"),
        ("Reshape", {"shape": (-1,)}, "Flatten"),
        ("Slice", {}, "StridedSlice"),
        ("Select", {}, "GetItem"),
        ("Select", {}, "Slice"),
        ("DepthToSpace", {}, "PixelShuffle"),
        ("SDPA", {}, "Attention"),
        ("GlobalAvgPool", {}, "Mean"),
        ("GlobalAvgPool", {}, "AvgPool"),
        ("Conv2D", {}, "@compute"),
        ("Conv2D", {}, "*"),
    ],
)
def test_a_platforms_own_word_for_an_operator_is_understood(op, attrs, word):
    assert resolve(platform(rule(word)), op, attrs).exec == "int"


def test_a_clamp_between_other_bounds_is_no_relu_n1_to_1():
    assert resolve(platform(rule("ReluN1To1")), "Clamp", {"min": -2.0, "max": 2.0}).exec == "float"


def test_a_global_pool_listed_by_name_is_not_taken_for_a_mean():
    p = platform(rule("Mean", note="mean"), rule("GlobalAvgPool", note="pool"))
    assert resolve(p, "GlobalAvgPool", {}).rule.note == "pool"


def test_a_global_pool_has_its_input_as_window():
    p = platform(rule("AvgPool", where={"kernel": [2, 4]}))
    assert resolve(p, "GlobalAvgPool", {"in_shape": (None, 8, 4, 4)}).exec == "int"
    assert resolve(p, "GlobalAvgPool", {"in_shape": (None, 8, 7, 7)}).exec == "float"


@pytest.mark.parametrize("gate, open_on", [(">=B", "BC"), ("<B", "A"), ("B", "B")])
def test_gates_follow_the_order_of_the_revisions(gate, open_on):
    p = platform(rule("Add", when={"arch": gate}), arch=["A", "B", "C"])
    assert "".join(a for a in "ABC" if resolve(p.model_copy(update={"arch_selected": a}), "Add", {}).rule) == open_on


def test_a_gate_on_bits_chooses_the_wide_kernel():
    p = platform(rule("Add", when={"bits": 16}, note="wide"), rule("Add", note="narrow"))
    assert resolve(p, "Add", {}, bits=16).rule.note == "wide"
    assert resolve(p, "Add", {}, bits=8).rule.note == "narrow"


@pytest.mark.parametrize(
    "unlisted, how", [("float", "float"), ("cpu", "float"), ("reject", "float"), ("follow", "follow")]
)
def test_an_operator_that_is_not_listed_runs_as_the_platform_says(unlisted, how):
    found = resolve(platform(rule("Add"), unlisted=unlisted), "Erf", {})
    where = ", which the CPU computes" if unlisted == "cpu" else ""
    assert (found.exec, found.why) == (how, f"'npu' lists no rule for Erf{where}")


@pytest.mark.parametrize("name", names())
def test_every_built_in_takes_a_plain_convolution(name):
    assert resolve(
        load(name), "Conv2D", {**CONV, "in_shape": (1, 16, 8, 8), "out_shape": (1, 16, 8, 8), "static_shape": True}
    ).options


def test_a_branched_fusion_becomes_the_chain_along_its_edges():
    graph = {
        "nodes": {"c": "@conv", "s": "Add", "r": ["Relu"]},
        "edges": [["c", "s.in1"], ["s", "r"]],
        "free_input": "s.in0",
    }
    p = platform(rule("Add"), fuse=[{"graph": graph, "src": ["M"], "conf": "V"}])
    conv = frozenset({"Conv1D", "Conv2D", "DepthwiseConv2D", "Conv3D"})
    assert fusions(p) == ((conv, frozenset({"Add"}), frozenset({"Relu"})),)


def test_a_layer_is_meant_first_by_its_own_name_then_by_its_operator():
    assert Member(op=("Conv2D",), type="Conv2d").nearness("Conv2d") == 0
    assert Member(op=("Conv2D",), name="Conv2d").nearness("Conv2d") == 0
    assert Member(op=("Conv2D",)).nearness("Conv2d") == 1
    assert Member(op=("Conv2D",), name="Conv1d").nearness("Conv2d") == 2
