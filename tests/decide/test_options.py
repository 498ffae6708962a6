"""Options: which joint formats a platform leaves for an operator, and which of them is taken."""

import pytest
import torch
from torch import nn

from chipfit.decide.groups import find_groups
from chipfit.decide.options import KEPT_BY_USER, execution_modes, first_compatible_option, limit_options
from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Format
from tests.build import graph_of, platform_of, quantized, sequential

FORMATS = {
    "a8": {"bits": 8, "zero": "any"}, "same8": {"bits": 8, "zero": "any"}, "a16": {"bits": 16},
    "pot8": {"bits": 8, "zero": "any", "scale": "pot"}, "u8": {"bits": 8, "zero": "any", "signed": False},
    "w8": {"bits": 8, "per": "channel"}, "w4": {"bits": 4, "per": "channel"}, "t8": {"bits": 8},
    "d8": {"bits": 8, "dynamic": True}, "b8": {"bits": 8, "per": "block", "axis": "in", "block": 4},
    "f8": {"bits": 8, "free": True}, "f3": {"bits": 3, "free": True}, "w2": {"bits": 2},
    "g8": {"bits": 8, "zero": "any", "free": True}, "g3": {"bits": 3, "zero": "any", "free": True},
}  # fmt: skip


def option(text):
    """An option of a platform file, written "in w out" or "in w+b out"; "-" leaves a slot out, "a/b" names two."""
    ins, w, out = text.split()
    w, _, b = w.partition("+")
    slots = {"in": ins.split("/") if "/" in ins else ins, "w": w, "b": b, "out": out}
    return {k: v for k, v in slots.items() if v not in ("-", "")}


def words(o):
    """The text of an option; a format that the kernel quantizes its data to has its own name."""
    ins = o.dynamic or ("/".join(o.in_) if isinstance(o.in_, tuple) else o.in_)
    return f"{ins or '-'} {o.w or '-'}{'+' + o.b if o.b else ''} {o.out or '-'}"


def group_of(use, choices=None, *, op="Linear", weights=None, ints=(), formats=FORMATS, **more):
    """(graph, platform, group) of one operator n over x (and z); y is its result, `use` its options."""
    given = {} if weights is None else dict.fromkeys(weights, torch.ones(8))
    weights = {"w": torch.ones(6, 8)} if op == "Linear" and weights is None else given
    call = {"Linear": "Linear(x, w)", "Relu": "Relu(x)"}.get(op, f"{op}(x, z)")
    graph = graph_of(f"y = {call}", weights=weights, shape=(None, 8), dtypes=dict.fromkeys(ints, "int64"))
    place = {"at": more.pop("at", "outputs")}
    rule = {"match": [op], "use": [option(o) if isinstance(o, str) else o for o in use], **more}
    chip = platform_of(rule, formats=formats, place=place)
    (group,) = find_groups(graph, chip, (), {"y": choices} if choices else {})
    return graph, chip, group


def applicable(use, choices=None, float_values=None, **more):
    graph, chip, group = group_of(use, choices, **more)
    return limit_options(graph, chip, group, float_values or {}).resolved


CONV = ["float float float", "a8 w8 a8", "a8 w4 a8", "a16 w8 a16", "float w4 float"]


@pytest.mark.parametrize(
    "choices, left",
    [
        ({}, CONV[1:]),  # an option that quantizes nothing is none
        ({"bits": 8}, ["a8 w8 a8", "a16 w8 a16"]),
        ({"bits": 4}, ["a8 w4 a8", "float w4 float"]),
        ({"activation_bits": 16}, ["a16 w8 a16", "float w4 float"]),  # weights alone have no activation bits
        ({"activation_bits": 8, "bits": 4}, ["a8 w4 a8", "float w4 float"]),
        ({"float": "by hand"}, []),
    ],
)
def test_bits_of_the_user_leave_the_options_that_have_them(choices, left):
    assert [words(o) for o in applicable(CONV, choices).options] == left


@pytest.mark.parametrize(
    "use, choices, left",
    [
        (["a8 w8 a8", "d8 w8 float"], {}, ["a8 w8 a8"]),  # dynamic only if asked for, or first
        (["d8 w8 float", "a8 w8 a8"], {}, ["d8 w8 float", "a8 w8 a8"]),
        (["a8 w8 a8", "d8 w8 float"], {"inputs": "dynamic"}, ["d8 w8 float"]),
        (["d8 w8 float", "a8 w8 a8"], {"inputs": "codes"}, ["a8 w8 a8"]),
        (["a8 w8 a8", "float w8 a8"], {"inputs": "float"}, ["float w8 a8"]),
        (["a8 w8 a8", "a8 w4 a8"], {"inputs": "dynamic"}, ["a8 w8 a8", "a8 w4 a8"]),  # no such kernel; see its effect
        (["a8 w8 a8", "a8 w8 float"], {}, ["a8 w8 a8", "a8 w8 float"]),
        (["a8 w8 a8", "a8 w8 float"], {"result": "float"}, ["a8 w8 float"]),
        (["a8 w8 float", "a8 w8 a8"], {"result": "codes"}, ["a8 w8 a8"]),
        (["a8 w8 a8", "a8 t8 a8"], {"per": "tensor"}, ["a8 t8 a8"]),
        (["a8 w8 a8", "a8 t8 a8"], {"per": "channel"}, ["a8 w8 a8"]),
        (["a8 w8 a8", "a8 w4 a8"], {"per": "row"}, ["a8 w8 a8", "a8 w4 a8"]),
        (["a8 b8 a8", "a8 w8 a8"], {}, ["a8 b8 a8", "a8 w8 a8"]),  # 2 x 4 of 8
        (["a8 w8 a8"], {"bits": "float"}, ["a8 float a8"]),
        (["a8 w8+a16 a8"], {"bits": "float", "activation_bits": 8}, ["a8 float+float a8"]),
        (["a8 w8 a8", "a16 w8 a16"], {"bits": "float", "activation_bits": 16}, ["a16 float a16"]),
        (["a8 w8 a8"], {"activation_bits": "float"}, ["a8 w8 float"]),
        # formats of free width
        (["g8 f8 g8"], {"bits": 3}, ["g8 f3 g8"]),
        (["g8 f8 g8"], {"activation_bits": 3}, ["g3 f8 g3"]),
        (["g8/f8 f8 g8"], {"activation_bits": 3}, ["g3/f3 f8 g3"]),
        (["g8 w2 g8", "g8 f8 g8"], {"bits": 2}, ["g8 w2 g8"]),
    ],
)
def test_which_options_are_left(use, choices, left):
    assert [words(o) for o in applicable(use, choices).options] == left


@pytest.mark.parametrize(
    "use, choices, asked, widths",
    [
        (CONV, {"bits": 16}, "16-bit weights", [4, 8]),
        (CONV, {"bits": 5}, "5-bit weights", [4, 8]),
        (CONV, {"bits": 8, "activation_bits": 4}, "4-bit activations", [8, 16]),
        (["g8 w8 g8"], {"bits": 2}, "2-bit weights", [8]),  # not free: its width is the format's
        (["g8 f8 g8"], {"bits": 5}, "5-bit weights", range(1, 17)),  # the platform has no such format
        (["g8 f8 g8"], {"bits": 17}, "17-bit weights", range(1, 17)),
        (["g8 f8 w8"], {"activation_bits": 3}, "3-bit activations", range(1, 17)),
    ],
)
def test_a_width_that_no_option_has_is_refused_with_those_that_may_be_chosen(use, choices, asked, widths):
    with pytest.raises(UnsupportedError, match=f"{asked}.*Allowed: {', '.join(map(str, widths))} bits"):
        applicable(use, choices)


@pytest.mark.parametrize("wanted, other", [("float", "codes"), ("codes", "float")])
def test_a_result_that_no_kernel_outputs_is_refused(wanted, other):
    with pytest.raises(UnsupportedError, match=rf"(?s)have a result in {wanted}.*Allowed: {other}"):
        applicable(["a8 w8 a8" if wanted == "float" else "a8 w8 float"], {"result": wanted})


def test_blocks_that_do_not_divide_a_weight_are_no_option():
    use = ["a8 b8 a8", "a8 w8 a8"]
    left = [applicable(use), applicable(use, op="MatMul", weights="z"), applicable(use, op="Relu")]
    assert [len(r.options) for r in left] == [2, 1, 1]  # a matrix; a vector; no weights at all


ITS_RESULT = "its result 'y' stays float: why"


@pytest.mark.parametrize(
    "given, why",
    [
        ({}, ""),
        ({"choices": {"float": "by hand"}}, "by hand"),
        ({"float_values": {"y": "why"}}, ITS_RESULT),
        ({"float_values": {"y": KEPT_BY_USER}}, ""),
        ({"float_values": {"x": KEPT_BY_USER}}, ""),  # where quantizers belong to writers
        ({"float_values": {"x": "why"}, "at": "both"}, "its input 'x' stays float: why"),
        ({"float_values": {"x": "".join(list(KEPT_BY_USER))}, "at": "inputs"}, "overrides keep its input 'x' in float"),
        ({"float_values": {"x": "why", "y": "why"}, "use": ["d8 w8 float"]}, ""),
        ({"float_values": {"x": "why", "y": "why"}, "use": ["float w8 a8"]}, ""),
        ({"float_values": {"y": "why"}, "use": ["float w8 a8", "a8 w8 a8"]}, ITS_RESULT),
        ({"float_values": {"y": "why"}, "use": ["float float float"]}, ITS_RESULT),  # no option at all
        ({"float_values": {"x": "why"}, "use": ["float w8 a8"], "at": "both"}, ""),
        ({"choices": {"bits": "float"}, "at": "both"}, "overrides keep its weights in float"),
        ({"choices": {"bits": "float"}, "use": ["float w8 a8"], "at": "both"}, "overrides keep its weights in float"),
        ({"choices": {"activation_bits": "float"}, "at": "both"}, "overrides keep its result in float"),
        ({"choices": {"activation_bits": "float"}, "use": ["float w8 a8"], "at": "both"}, ""),
        (
            {"weights": "xw", "use": ["d8 w8 float"]},
            "its data 'x' are a constant, which no kernel quantizes at each call",
        ),
        ({"ints": "y"}, "its result is not a float tensor"),
        ({"weights": ""}, "its weights are computed at run time"),
        ({"op": "Add", "weights": "xz"}, "all its inputs are constant"),
        ({"op": "Add", "weights": "z"}, ""),
        ({"ints": "x"}, "an input is not a float tensor"),
        ({"ints": "x", "use": ["- w8 a8"]}, ""),  # it has no format for its input
        ({"use": [], "exec": "float"}, "'npu' computes Linear in float"),
        ({"use": [], "exec": "float", "choices": {"float": "by hand"}}, "by hand"),
    ],
)
def test_why_an_operator_cannot_run_in_integers(given, why):
    resolved = applicable(**{"use": ["a8 w8 a8"], **given})
    assert (resolved.why, bool(resolved.options)) == (why, why == "")


@pytest.mark.parametrize(
    "have, taken",
    [
        (None, "a8 w8 a8"),
        ("a8", "a8 w8 a8"),
        ("same8", "a8 w8 a8"),  # another name, the same storage
        ("a16", "a16 w8 a16"),
        ("pot8", "float w4 float"),  # stored in another way: only the kernel that reads floats can take it
        ("u8", "float w4 float"),
    ],
)
def test_the_first_option_that_reads_its_input_as_it_is_stored_is_taken(have, taken):
    _, chip, group = group_of(CONV[1:])
    assert words(first_compatible_option(chip, group, {"x": have} if have else {})) == taken


@pytest.mark.parametrize("have, fits", [("a8 a16", True), ("a16 a8", False), ("a8 a8", False)])
def test_every_operand_has_a_format_of_its_own(have, fits):
    _, chip, add = group_of(["a8/a16 - a16"], op="Add")
    assert (first_compatible_option(chip, add, dict(zip("xz", have.split(), strict=True))) is not None) is fits


@pytest.mark.parametrize(
    "in_bits, have, fits",
    [(None, "a16", True), ([8, 16], "a16", True), ([16, 8], "a16", True), ([8], "a16", False), ([8], "a8", True)],
)
def test_a_kernel_that_reads_any_format_may_have_a_widest(in_bits, have, fits):
    _, chip, relu = group_of([{"in": "any", "in_bits": in_bits, "out": "a8"}], op="Relu")
    assert (first_compatible_option(chip, relu, {"x": have}) is not None) is fits
    assert first_compatible_option(chip, relu, {"y": have}) is not None  # another value does not count


BOTH = ["a8 w8 a8", "a8 w8 float"]


@pytest.mark.parametrize(
    "use, choices, can",
    [
        (["a8 w8 a8"], {}, ""),
        (BOTH, {}, "codes float"),
        (["a8 w8 a8", "a16 w8 float"], {}, ""),  # it would read another format
        (["a8 w8 a8", "a8 w4 float"], {}, ""),
        (["a16 w4 a8", "a8 w8 float"], {}, ""),
        (["float float a8", "float float float"], {}, ""),
        (["a8 w8 float", "a8 w8 a8"], {}, "codes float"),
        (["a8 w8 float", "float float float"], {}, ""),
        (["a8 w8 a8", "float float float"], {}, ""),  # in float, products with weights cost too much
        (BOTH, {"float": "by hand"}, ""),
        (BOTH, {"bits": 8}, "codes float"),
        *((BOTH, {k: 8}, "") for k in ("result", "activation_bits", "rule", "method", "range", "signed", "inputs")),
        (BOTH, {"z_threshold": 8}, ""),
    ],
)
def test_modes_of_a_kernel_with_weights(use, choices, can):
    assert " ".join(execution_modes(group_of(use, choices)[2])) == can


@pytest.mark.parametrize(
    "use, how, can",
    [
        (["a8 - a8", "float - float"], "int", "codes whole"),
        (["a8 - a8", "a8 - float"], "int", "codes float"),
        (["a8 - a8", "a8 - float", "float - float"], "int", "codes float whole"),
        (["a8 - a8", "float - float"], "float", ""),
        (["any - a8", "any - none"], "int", "codes whole"),
    ],
)
def test_a_kernel_without_weights_may_run_in_float_as_a_whole(use, how, can):
    assert " ".join(execution_modes(group_of(use, op="Add", exec=how)[2])) == can


@pytest.mark.parametrize("overrides, scale", [({}, 1 / 256), ({"*": {"activation_bits": 16}}, 1 / 65536)])
def test_rules_for_eight_bits_hold_unless_others_are_chosen(overrides, scale):
    model = sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid())
    plan = quantized(model, torch.randn(2, 3, 4, 4), "qnn_htp", overrides=overrides).plan
    assert float(plan["sigmoid"].scale) == scale and "sigmoid" in plan.fixed


# ---------------------------------------------------------------- widths that a platform leaves to the user


def academic(overrides):
    torch.manual_seed(0)
    net = sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return net[2].weight.detach(), quantized(net, torch.randn(32, 6), "mqbench_academic", overrides=overrides).plan


@pytest.mark.parametrize("bits", range(1, 17))
def test_weights_may_have_any_width(bits):
    w, plan = academic({"2": {"bits": bits}})
    assert plan["2.weight"].grid.bits == bits and len(set(plan["2.weight"].round(w)[0].tolist())) <= 2**bits
    assert plan["0.weight"].grid.bits == 8  # the first and last layer, as this platform has it


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_activations_may_have_any_width(bits):
    plan = academic({"Linear": {"activation_bits": bits}})[1]
    grids = [t.stored.grid for t in plan.tensors.values() if t.role == "activation" and t.quantized]
    assert grids and {(g.bits, g.qmax - g.qmin) for g in grids} == {(bits, 2**bits - 1)}


def test_one_bit_of_weights_are_the_two_signs():
    w, plan = academic({"2": {"bits": 1}})
    s = plan["2.weight"]
    assert s.grid.table == (-1.0, 1.0) and torch.equal(torch.sign(s.round(w)), torch.where(w > 0, 1.0, -1.0))
    assert torch.equal(s.dequantize(s.quantize(w)), s.round(w))


@pytest.mark.parametrize("fmt", [{"bits": 4, "range": [-4, 3]}, {"bits": 8, "kind": "lut"}, {"bits": 32}])
def test_widths_are_free_only_of_integers_between_ends_that_follow_from_them(fmt):
    with pytest.raises(ValueError, match="free width"):
        Format(**fmt, free=True)
