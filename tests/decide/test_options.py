"""Which joint formats a platform leaves for an operator, and which of them is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.groups import find_groups
from chipfit.decide.options import KEPT_BY_USER, execution_modes, first_compatible_option, with_applicable_options
from chipfit.errors import UnsupportedError
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Node, Value
from chipfit.platform.schema import Format, OpRule, Option, Placement, Platform
from tests.steps import captured

A8_W8 = Option(in_="a8", w="w8", out="a8")
A8_W4 = Option(in_="a8", w="w4", out="a8")
A16_W8 = Option(in_="a16", w="w8", out="a16")
W4 = Option(in_="float", w="w4", out="float")  #: only weights are codes
NOTHING = Option(in_="float", w="float", out="float")

CHIP = Platform(
    name="paper",
    formats={
        "a8": Format(bits=8, zero="any"),
        "same8": Format(bits=8, zero="any"),
        "pot8": Format(bits=8, zero="any", scale="pot"),
        "u8": Format(bits=8, zero="any", signed=False),
        "a16": Format(bits=16),
        "w8": Format(bits=8, per="channel"),
        "w4": Format(bits=4, per="channel"),
    },
    ops=(
        OpRule(match=("Conv2D",), use=(NOTHING, A8_W8, A8_W4, A16_W8, W4), src=("M",), conf="V"),
        OpRule(match=("Add",), use=(Option(in_=("a8", "a16"), out="a16"),), src=("M",), conf="V"),
    ),
)


def unit(choices):
    """A convolution about which the user says `choices`."""
    graph = captured(nn.Conv2d(2, 2, 1), torch.randn(1, 2, 3, 3))
    first = find_groups(graph, CHIP, (), {graph.nodes[0].name: choices})[0]
    return with_applicable_options(graph, CHIP, first, {})


@pytest.mark.parametrize(
    "choices, left",
    [
        ({}, [A8_W8, A8_W4, A16_W8, W4]),  # the one without any code is none
        ({"bits": 8}, [A8_W8, A16_W8]),
        ({"bits": 4}, [A8_W4, W4]),
        ({"activation_bits": 16}, [A16_W8, W4]),  # weights alone have no activation bits
        ({"activation_bits": 8, "bits": 4}, [A8_W4, W4]),
        ({"float": "by hand"}, []),
    ],
)
def test_what_the_user_says_about_bits_leaves_the_options_that_have_them(choices, left):
    assert list(unit(choices).resolved.options) == left


@pytest.mark.parametrize(
    "choices, allowed",
    [({"bits": 16}, "4, 8 bits"), ({"bits": 5}, "4, 8 bits"), ({"bits": 8, "activation_bits": 4}, "8, 16 bits")],
)
def test_bits_that_no_option_has_are_refused_with_those_that_some_have(choices, allowed):
    with pytest.raises(UnsupportedError, match=allowed):
        unit(choices)


@pytest.mark.parametrize(
    "have, taken",
    [
        (None, A8_W8),
        ("a8", A8_W8),
        ("same8", A8_W8),  # another name, the same storage
        ("a16", A16_W8),
        ("pot8", W4),  # stored in another way: only the kernel that reads floats can take it
        ("u8", W4),
    ],
)
def test_the_first_option_that_reads_its_input_as_it_is_stored_is_taken(have, taken):
    u = unit({})
    (value,) = u.data
    assert first_compatible_option(CHIP, u, {value: have} if have else {}) == taken


@pytest.mark.parametrize("have, fits", [(("a8", "a16"), True), (("a16", "a8"), False), (("a8", "a8"), False)])
def test_every_operand_has_a_word_of_its_own(have, fits):
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b

    graph = capture(Two().eval(), (torch.randn(1, 2), torch.randn(1, 2)), {})
    (add,) = find_groups(graph, CHIP, (), {})
    assert (first_compatible_option(CHIP, add, dict(zip(graph.inputs, have, strict=True))) is not None) is fits


def test_free_widths_begin_at_one():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 4, 1), torch.nn.Conv2d(4, 4, 1)).eval()
    with pytest.raises(UnsupportedError, match=r"Allowed: 1, 2, 3, .*, 15, 16 bits"):
        chipfit.quantize(
            model, [torch.randn(2, 3, 4, 4)], "mqbench_academic", overrides={"1": {"bits": 17}}, progress=False
        )


@pytest.mark.parametrize("overrides, scale", [({}, 1 / 256), ({"*": {"activation_bits": 16}}, 1 / 65536)])
def test_rules_for_eight_bits_hold_where_nobody_asks_for_others(overrides, scale):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid()).eval(), torch.randn(2, 3, 4, 4)
    plan = chipfit.quantize(model, [x], "qnn_htp", overrides=overrides, progress=False).plan
    assert float(plan["sigmoid"].scale) == scale and "sigmoid" in plan.fixed


# ---------------------------------------------------------------- one operator of every kind, and what is said about it

D8 = Option(in_="d8", w="w8", out="float")  #: rounds its data itself
FLOAT_OUT, FLOAT_IN = Option(in_="a8", w="w8", out="float"), Option(in_="float", w="w8", out="a8")


def found(use, choices=None, *, op="Linear", kept=None, weight=True, place="outputs", integer=False):
    """What `with_applicable_options` leaves of `use` for one operator over x (and z), and the graph's one value y."""
    more = {"d8": Format(bits=8, dynamic=True), "b8": Format(bits=8, per="block", axis="in", block=4)}
    chip = CHIP.model_copy(
        update={
            "formats": CHIP.formats | more | {"t8": Format(bits=8)},
            "ops": (OpRule(match=(op,), use=use, src=("M",), conf="V", exec="int" if use else "float"),),
            "place": Placement(at=place),
        }
    )
    ins = ("x", "w") if op == "Linear" else ("x", "z")
    node = Node("n", op, ins, ("y",), {})
    kinds = {"x": "int64" if integer == "x" else "float32", "y": "int64" if integer == "y" else "float32"}
    values = {v: Value(v, (None, 8), kinds.get(v, "float32")) for v in ("x", "y", "z", *(() if weight else "w"))}
    weights = {"w": torch.ones(6, 8)} if weight is True else {k: torch.ones(8) for k in weight or ()}
    graph = Graph([node], ["x"], ["y"], {k: v for k, v in values.items() if k not in weights}, weights)
    (unit,) = find_groups(graph, chip, (), {"n": choices} if choices else {})
    return with_applicable_options(graph, chip, unit, kept or {}).resolved


@pytest.mark.parametrize(
    "use, choices, left",
    [
        ((A8_W8, D8), {}, (A8_W8,)),  # nobody asks a kernel to round its data itself
        ((D8, A8_W8), {}, (D8, A8_W8)),
        ((A8_W8, D8), {"inputs": "dynamic"}, (D8,)),
        ((D8, A8_W8), {"inputs": "codes"}, (A8_W8,)),
        ((A8_W8, FLOAT_IN), {"inputs": "float"}, (FLOAT_IN,)),
        ((A8_W8, A8_W4), {"inputs": "dynamic"}, (A8_W8, A8_W4)),  # no such kernel: seen by who asks
        ((A8_W8, FLOAT_OUT), {}, (A8_W8, FLOAT_OUT)),
        ((A8_W8, FLOAT_OUT), {"result": "float"}, (FLOAT_OUT,)),
        ((FLOAT_OUT, A8_W8), {"result": "codes"}, (A8_W8,)),
        ((A8_W8, Option(in_="a8", w="t8", out="a8")), {"per": "tensor"}, (Option(in_="a8", w="t8", out="a8"),)),
        ((A8_W8, Option(in_="a8", w="t8", out="a8")), {"per": "channel"}, (A8_W8,)),
        ((A8_W8, A8_W4), {"per": "row"}, (A8_W8, A8_W4)),
        ((Option(in_="a8", w="b8", out="a8"), A8_W8), {}, (Option(in_="a8", w="b8", out="a8"), A8_W8)),  # 2 x 4 of 8
        ((A8_W8,), {"bits": "float"}, (Option(in_="a8", w="float", out="a8"),)),
        (
            (Option(in_="a8", w="w8", b="a16", out="a8"),),
            {"bits": "float", "activation_bits": 8},
            (Option(in_="a8", w="float", b="float", out="a8"),),
        ),
        ((A8_W8, A16_W8), {"bits": "float", "activation_bits": 16}, (Option(in_="a16", w="float", out="a16"),)),
        ((A8_W8,), {"activation_bits": "float"}, (FLOAT_OUT,)),
    ],
)
def test_which_options_are_left(use, choices, left):
    got = found(use, choices).options
    marked = tuple(o.with_dynamic("d8") if o.in_ == "d8" else o for o in left)
    assert [(o.in_, o.w, o.b, o.out, o.dynamic) for o in got] == [(o.in_, o.w, o.b, o.out, o.dynamic) for o in marked]


@pytest.mark.parametrize("asked, other", [("float", "codes"), ("codes", "float")])
def test_a_result_that_no_kernel_hands_over_is_refused(asked, other):
    use = (A8_W8 if asked == "float" else FLOAT_OUT,)
    with pytest.raises(UnsupportedError, match=rf"(?s)have a result in {asked}.*Allowed: {other}"):
        found(use, {"result": asked})


def test_blocks_that_do_not_divide_a_weight_are_no_option():
    blocks = Option(in_="a8", w="b8", out="a8")
    product = Option(in_="a8", w="b8", out="a8")
    assert found((blocks, A8_W8)).options == (blocks, A8_W8)
    assert found((product, A8_W8), op="MatMul", weight=("z",)).options == (A8_W8,)  # of one axis
    assert found((blocks, A8_W8), op="Relu").options == (A8_W8,)  # no weights at all


NOT_HEARD = "its result 'y' stays float: why"


@pytest.mark.parametrize(
    "given, why",
    [
        ({}, ""),
        ({"choices": {"float": "by hand"}}, "by hand"),
        ({"kept": {"y": "why"}}, NOT_HEARD),
        ({"kept": {"y": KEPT_BY_USER}}, ""),
        ({"kept": {"x": KEPT_BY_USER}}, ""),  # where quantizers belong to writers
        ({"kept": {"x": "why"}, "place": "both"}, "its input 'x' stays float: why"),
        ({"kept": {"x": "".join(list(KEPT_BY_USER))}, "place": "inputs"}, "overrides keep its input 'x' in float"),
        ({"kept": {"x": "why", "y": "why"}, "use": (D8,)}, ""),
        ({"kept": {"x": "why", "y": "why"}, "use": (FLOAT_IN,)}, ""),
        ({"kept": {"y": "why"}, "use": (FLOAT_IN, A8_W8)}, NOT_HEARD),
        ({"kept": {"y": "why"}, "use": (NOTHING,)}, NOT_HEARD),  # no option at all
        ({"kept": {"x": "why"}, "use": (FLOAT_IN,), "place": "both"}, ""),
        ({"choices": {"bits": "float"}, "place": "both"}, "overrides keep its weights in float"),
        ({"choices": {"bits": "float"}, "use": (FLOAT_IN,), "place": "both"}, "overrides keep its weights in float"),
        ({"choices": {"activation_bits": "float"}, "place": "both"}, "overrides keep its result in float"),
        ({"choices": {"activation_bits": "float"}, "use": (FLOAT_IN,), "place": "both"}, ""),
        ({"integer": "y"}, "its result is not a float tensor"),
        ({"weight": False}, "its weights are computed at run time"),
        ({"op": "Add", "weight": ("x", "z")}, "all its inputs are constant"),
        ({"op": "Add", "weight": ("z",)}, ""),
        ({"integer": "x"}, "an input is not a float tensor"),
        ({"integer": "x", "use": (Option(w="w8", out="a8"),)}, ""),  # it takes no format for its input
    ],
)
def test_why_an_operator_cannot_run_in_integers(given, why):
    resolved = found(**{"use": (A8_W8,), **given})
    assert resolved.why == why
    assert bool(resolved.options) is (why == "")


def test_without_formats_the_reason_is_that_of_the_platform():
    assert found(()).why == "'paper' computes Linear in float" and found(()).options == ()
    assert found((), {"float": "by hand"}).why == "by hand"


@pytest.mark.parametrize(
    "use, choices, can",
    [
        ((A8_W8,), {}, ()),
        ((A8_W8, FLOAT_OUT), {}, ("codes", "float")),
        ((A8_W8, Option(in_="a16", w="w8", out="float")), {}, ()),  # it would read other codes
        ((A8_W8, Option(in_="a8", w="w4", out="float")), {}, ()),
        ((Option(in_="a16", w="w4", out="a8"), FLOAT_OUT), {}, ()),
        ((Option(in_="float", w="float", out="a8"), NOTHING), {}, ()),
        ((FLOAT_OUT, A8_W8), {}, ("codes", "float")),
        ((FLOAT_OUT, NOTHING), {}, ()),
        ((A8_W8, NOTHING), {}, ()),  # in float, products with weights cost too much
        ((A8_W8, FLOAT_OUT), {"float": "by hand"}, ()),
        ((A8_W8, FLOAT_OUT), {"bits": 8}, ("codes", "float")),
        *[((A8_W8, FLOAT_OUT), {k: 8}, ()) for k in ("result", "activation_bits", "rule", "method", "range")],
        *[((A8_W8, FLOAT_OUT), {k: 8}, ()) for k in ("signed", "z_threshold", "inputs")],
    ],
)
def test_what_a_kernel_can_hand_over(use, choices, can):
    graph = Graph(
        [Node("n", "Linear", ("x", "w"), ("y",))], ["x"], ["y"], {v: Value(v, (None, 8)) for v in "xy"},
        {"w": torch.ones(6, 8)},
    )  # fmt: skip
    chip = CHIP.model_copy(update={"ops": (OpRule(match=("Linear",), use=use, src=("M",), conf="V"),)})
    (unit,) = find_groups(graph, chip, (), {"n": choices})
    assert execution_modes(unit) == can


@pytest.mark.parametrize(
    "use, how, can",
    [
        ((Option(in_="a8", out="a8"), Option(in_="float", out="float")), "int", ("codes", "whole")),
        ((Option(in_="a8", out="a8"), Option(in_="a8", out="float")), "int", ("codes", "float")),
        (
            (Option(in_="a8", out="a8"), Option(in_="a8", out="float"), Option(in_="float", out="float")),
            "int",
            ("codes", "float", "whole"),
        ),
        ((Option(in_="a8", out="a8"), Option(in_="float", out="float")), "float", ()),
        ((Option(in_="any", out="a8"), Option(in_="any", out="none")), "int", ("codes", "whole")),
    ],
)
def test_a_kernel_without_weights_may_run_in_float_as_a_whole(use, how, can):
    values = {v: Value(v, (None, 8)) for v in "xyz"}
    graph = Graph([Node("n", "Add", ("x", "z"), ("y",))], ["x", "z"], ["y"], values, {})
    chip = CHIP.model_copy(update={"ops": (OpRule(match=("Add",), use=use, exec=how, src=("M",), conf="V"),)})
    (unit,) = find_groups(graph, chip, (), {})
    assert execution_modes(unit) == can


@pytest.mark.parametrize(
    "in_bits, have, fits",
    [(None, "a16", True), ((8, 16), "a16", True), ((16, 8), "a16", True), ((8,), "a16", False), ((8,), "a8", True)],
)
def test_a_kernel_that_reads_any_codes_may_have_a_widest(in_bits, have, fits):
    values = {v: Value(v, (None, 8)) for v in "xy"}
    graph = Graph([Node("n", "Relu", ("x",), ("y",))], ["x"], ["y"], values, {})
    use = (Option(in_="any", in_bits=in_bits, out="a8"),)
    chip = CHIP.model_copy(update={"ops": (OpRule(match=("Relu",), use=use, src=("M",), conf="V"),)})
    (unit,) = find_groups(graph, chip, (), {})
    assert (first_compatible_option(chip, unit, {"x": have}) is not None) is fits
    assert first_compatible_option(chip, unit, {"y": have}) == use[0]  # another value says nothing


FREE = {
    "f8": Format(bits=8, free=True), "f3": Format(bits=3, free=True), "w8": Format(bits=8), "w2": Format(bits=2),
    "g8": Format(bits=8, zero="any", free=True), "g3": Format(bits=3, zero="any", free=True),
}  # fmt: skip


@pytest.mark.parametrize(
    "use, choices, left",
    [
        ([Option(in_="g8", w="f8", out="g8")], {"bits": 3}, ["g8 f3 g8"]),
        ([Option(in_="g8", w="f8", out="g8")], {"activation_bits": 3}, ["g3 f8 g3"]),
        ([Option(in_=("g8", "f8"), w="f8", out="g8")], {"activation_bits": 3}, ["('g3', 'f3') f8 g3"]),
        ([Option(in_="g8", w="w8", out="g8")], {"bits": 2}, None),  # not free: its width is the format's
        ([Option(in_="g8", w="f8", out="g8")], {"bits": 5}, None),  # nobody has made such a format
        ([Option(in_="g8", w="f8", out="w8")], {"activation_bits": 3}, None),
        ([Option(in_="g8", w="w2", out="g8"), Option(in_="g8", w="f8", out="g8")], {"bits": 2}, ["g8 w2 g8"]),
    ],
)
def test_formats_of_free_width_are_taken_at_the_width_that_is_asked_for(use, choices, left):
    graph = Graph(
        [Node("n", "Linear", ("x", "w"), ("y",))], ["x"], ["y"], {v: Value(v, (None, 8)) for v in "xy"},
        {"w": torch.ones(6, 8)},
    )  # fmt: skip
    rule = OpRule(match=("Linear",), use=tuple(use), src=("M",), conf="V")
    chip = CHIP.model_copy(update={"ops": (rule,), "formats": FREE})
    (unit,) = find_groups(graph, chip, (), {"n": choices})
    if left is None:
        with pytest.raises(UnsupportedError) as e:
            with_applicable_options(graph, chip, unit, {})
        widths = range(1, 17) if use[0].w != "w8" else [8]
        assert f"Allowed: {', '.join(map(str, widths))} bits" in str(e.value)
    else:
        assert [
            f"{o.in_} {o.w} {o.out}" for o in with_applicable_options(graph, chip, unit, {}).resolved.options
        ] == left
