"""Overrides: the layers that a pattern names, the choices about them, and formats that choices make narrower."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.decide import overrides as ov
from chipfit.errors import PlanError, UnknownNameError, UnsupportedError
from chipfit.graph.ir import Node
from chipfit.platform.schema import Format
from tests.build import graph_of, images, model_of, quantized


def layers(*rows):
    """A graph of rows (node, operator, layer, type of the layer)."""
    return graph_of(*(Node(name, op, (), (name,), {}, layer, kind) for name, op, layer, kind in rows))


GRAPH = layers(
    ("conv2d", "Conv2D", "stem.conv", "Conv2d"),
    ("conv2d_1", "Conv2D", "blocks.0.conv", "Conv2d"),
    ("relu", "Relu", "blocks.0.act", "ReLU"),
    ("conv2d_2", "Conv2D", "blocks.10.conv", "Conv2d"),
    ("linear", "Linear", "head", "Linear"),
)


@pytest.mark.parametrize(
    "pattern, nodes",
    [
        ("head", "linear"),
        ("conv2d_1", "conv2d_1"),
        ("blocks.0", "conv2d_1 relu"),
        ("stem", "conv2d"),
        ("blocks", "conv2d_1 relu conv2d_2"),
        ("*", "conv2d conv2d_1 relu conv2d_2 linear"),
        ("blocks.*.conv", "conv2d_1 conv2d_2"),
        ("blocks.?.conv", "conv2d_1"),
        ("blocks.[01]*.conv", "conv2d_1 conv2d_2"),
        ("Conv2D", "conv2d conv2d_1 conv2d_2"),
        ("Conv2d", "conv2d conv2d_1 conv2d_2"),
        ("ReLU", "relu"),
        ("relu", "relu"),
        ("Relu", "relu"),
    ],
)
def test_a_pattern_names_a_layer_a_path_a_glob_an_operator_or_a_type(pattern, nodes):
    assert [n.name for n in ov.match_layers(GRAPH, pattern)] == nodes.split()


@pytest.mark.parametrize("pattern", ["blocks.1", "ste", "stem.con", "b*.CONV", ""])  # not blocks.10, stem.conv ...
def test_names_are_whole_and_globs_are_about_paths(pattern):
    with pytest.raises(UnknownNameError):
        ov.match_layers(GRAPH, pattern)


def test_an_unknown_layer_lists_near_names():
    with pytest.raises(UnknownNameError, match=r"named 'stem\.cnv'.*Try: 'stem\.conv'"):
        ov.match_layers(GRAPH, "stem.cnv")


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
def test_every_name_that_sensitivity_prints_names_a_layer(platform):
    """Also those of functions, concatenations and sums, and of the parts of a layer norm that the chip divides."""

    def forward(m, x):
        q = m.q(x)
        y = m.norm(F.softmax(q @ x.transpose(1, 2), -1) @ x + x)
        return m.out(torch.cat([F.gelu(y), F.linear(x, m.out.weight[:, :8].T @ m.out.weight[:, 8:])], -1))

    torch.manual_seed(0)
    net = model_of(forward, q=nn.Linear(8, 8), norm=nn.LayerNorm(8), out=nn.Linear(16, 4)).eval()
    data = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    result = quantized(net, data, platform)
    found = result.sensitivity(data)
    names = {t for t, _ in found.ranked()} | {row["layer"] for row in found.rows()}
    assert any("/" in n for n in names) == (platform == "tflite_int8")
    for name in names:
        left = result.edit({name: "float"}).plan.tensors  # a name that is no layer's is refused
        whole = name.rpartition("/")[0]
        assert not whole or not any(n.startswith(f"{whole}/") for n in left)


@pytest.mark.parametrize("name", ["layer_norm/add", "layer_norm/mul_2"])
def test_a_part_of_a_divided_node_stands_for_the_node(name):
    graph = graph_of("layer_norm = LayerNorm(x)", "y = Relu(layer_norm)")
    assert [n.op for n in ov.match_layers(graph, name)] == ["LayerNorm"]
    for wrong in (name.replace("norm", "form"), "layer_norm/kernel", "layer_norm/add_x", "/add"):
        with pytest.raises(UnknownNameError):
            ov.match_layers(graph, wrong)


def test_a_later_override_wins_and_bits_add_up():
    found = ov.resolve_overrides(GRAPH, {"Conv2D": {"bits": 4, "activation_bits": 16}, "stem": {"bits": 8}})
    assert found["conv2d"] == {"bits": 8, "activation_bits": 16}
    assert found["conv2d_1"] == {"bits": 4, "activation_bits": 16}
    assert "'head'" in ov.resolve_overrides(GRAPH, {"head": "float"})["linear"]["float"]  # a reason


@pytest.mark.parametrize("wrong", ["int8", 4, {}, {"bit": 4}, {"bits": "4"}, None])
def test_anything_else_is_refused_with_what_is_allowed(wrong):
    with pytest.raises(PlanError, match=r"(is not allowed|has an unknown form).*Allowed"):
        ov.resolve_overrides(GRAPH, {"head": wrong})


@pytest.mark.parametrize("overrides", [[("head", "float", "besides")], [("head",)], ["ab"], "ab", 3, {"head", "relu"}])
def test_what_is_neither_a_table_nor_pairs_is_refused(overrides):
    with pytest.raises(PlanError, match="Overrides must be a table or a list of pairs"):
        ov.resolve_overrides(GRAPH, overrides)


def test_of_two_meanings_the_nearer_one_counts():
    graph = layers(
        ("a1", "Linear", "a", "Linear"),
        ("b1", "Linear", "a.b", "Linear"),
        ("c1", "Tanh", "Relu", "Tanh"),
        ("d1", "Relu", "x.d", "ReLU"),
        ("e1", "Add", "Tanh.e", "Relu6"),
        ("f1", "Relu6", "f", "Relu6"),
    )
    means = {p: [n.name for n in ov.match_layers(graph, p)] for p in ("a", "a1", "Relu", "Tanh", "Relu6", "x")}
    assert means == {
        "a": ["a1"],  # the layer itself, not what is inside
        "a1": ["a1"],
        "Relu": ["c1"],  # a layer's path, not the operator
        "Tanh": ["e1"],  # what is inside a layer of that path, not the operator
        "Relu6": ["f1"],  # the operator, not the layer type
        "x": ["d1"],
    }


class OfOp:
    """A filter."""

    def __init__(self, op, **facts):
        self.op = op
        vars(self).update(facts)

    def match(self, node):
        return node.op == self.op

    def __repr__(self):
        return f"OfOp({self.op})"


def test_a_filter_means_what_it_matches():
    assert [n.name for n in ov.match_layers(GRAPH, OfOp("Conv2D"))] == ["conv2d", "conv2d_1", "conv2d_2"]
    assert ov.match_layers(GRAPH, OfOp("Tanh", optional=True)) == []
    assert list(ov.resolve_overrides(GRAPH, {OfOp("Relu"): "float"})) == ["relu"]
    assert ov.resolve_overrides(GRAPH, {OfOp("Tanh", optional=True): {"bits": 4}}) == {}  # without a word about weights


@pytest.mark.parametrize("more", [{}, {"optional": False}])
def test_a_filter_that_matches_nothing_is_unknown_by_its_name_or_text(more):
    with pytest.raises(UnknownNameError, match=r"layer for the filter.*OfOp\(Tanh\)"):
        ov.match_layers(GRAPH, OfOp("Tanh", **more))
    with pytest.raises(UnknownNameError, match=r"'conv2d_3'.*Try: 'conv2d_2'"):  # a node's name as well
        ov.match_layers(GRAPH, OfOp("Tanh", name="conv2d_3", **more))


def test_a_filter_that_fails_is_named():
    with pytest.raises(PlanError, match=r"key of an override fails.*no such thing.*OfOp\(Relu\)") as e:
        ov.match_layers(GRAPH, OfOp("Relu", match=lambda node: int("no such thing")))
    assert isinstance(e.value.__cause__, ValueError)


def test_an_error_of_chipfit_inside_a_filter_comes_out_unchanged():
    with pytest.raises(UnknownNameError, match="'haed'"):
        ov.match_layers(GRAPH, OfOp("Relu", match=lambda node: ov.match_layers(GRAPH, "haed")))


@pytest.mark.parametrize("key", [OfOp, 5, None, ("head",), Path("x"), re.compile("conv")], ids=str)
def test_a_key_is_a_name_or_a_filter(key):
    with pytest.raises(PlanError, match="[Kk]ey of an override (does not name layers|fails)"):
        ov.resolve_overrides(GRAPH, [(key, "float")])


def test_pairs_keep_their_order_and_nothing_has_none():
    assert ov.override_entries(None) == [] and ov.override_entries({}) == [] and ov.override_entries(()) == []
    assert ov.override_entries({"b": "float", "a": {"bits": 4}}) == [("b", "float"), ("a", {"bits": 4})]
    assert ov.override_entries((["b", "float"], ("b", {"bits": 4}))) == [("b", "float"), ("b", {"bits": 4})]


# ---------------------------------------------------------------- choices

LARGEST = torch.finfo(torch.float32).max


def our_rule(sample, grid):
    """A range rule of the user's."""


TAKEN = {
    "bits": [1, 8, None, "float"],
    "activation_bits": [1, 16, None, "float"],
    "weight_method": ["symmetric", "lut_symmetric"],
    "method": ["uniform", "power_of_two"],
    "per": ["tensor", "channel", "block"],
    "inputs": ["codes", "dynamic", "float"],
    "signed": [True, False],
    "result": ["codes", "float"],
    "weight_rule": ["mse", "lp(p=3)"],
    "rule": ["no_clipping", our_rule],
    "range": [(0, 1), [-1.5, -1.5], (-LARGEST, LARGEST)],
    "z_threshold": [0.5, 3],
}
REFUSED = {
    "bits": [0, -1, True, 4.0, "int", "", [4]],
    "activation_bits": [0, True, 8.0, "8"],
    "weight_method": ["asymmetric", 1, ["symmetric"]],
    "method": [None, "Uniform"],
    "per": ["row", 0],
    "inputs": ["int", None],
    "signed": [1, 0, "yes", None],
    "result": ["dynamic", True],
    "range": [(1, 0), (1,), (0, 1, 2), "01", 5, (0, "1"), (0, float("inf")), (float("nan"), 1), (0, 2 * LARGEST), ()],
    "z_threshold": [0, -1, 0.0, "3", float("nan"), None, True],
}


@pytest.mark.parametrize(
    ("choice", "value"),
    [(c, v) for c, values in TAKEN.items() for v in values],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_choice_is_taken_as_it_is(choice, value):
    assert ov.resolve_overrides(GRAPH, {"head": {choice: value}}) == {"linear": {choice: value}}


@pytest.mark.parametrize(("choice", "value"), [(c, v) for c, values in REFUSED.items() for v in values], ids=str)
def test_a_choice_of_another_kind_is_refused_by_its_name_with_what_it_may_be(choice, value):
    with pytest.raises(PlanError) as e:
        ov.resolve_overrides(GRAPH, {"head": {choice: value}})
    assert f"'{choice}' for 'head' is not allowed" in str(e.value)
    assert ov.CHOICES[choice][0] in str(e.value)


def test_every_choice_is_in_the_tables_above():
    assert TAKEN.keys() == ov.CHOICES.keys() and ov.CHOICES.keys() - REFUSED.keys() == {"rule", "weight_rule"}
    for choice in ("rule", "weight_rule"):
        with pytest.raises(UnknownNameError):
            ov.resolve_overrides(GRAPH, {"head": {choice: "maximum"}})


@pytest.mark.parametrize(
    "choices", [{4: 4}, {"bits": 4, 5: 5}, {"bits": 4, "bitz": 4}, [("bits", 4)], "floats"], ids=str
)
def test_a_table_of_choices_names_known_ones_only(choices):
    with pytest.raises(PlanError, match="Override of 'head' has an unknown form"):
        ov.resolve_overrides(GRAPH, [("relu", "float"), ("head", choices)])


@pytest.mark.parametrize("choice", ov.OF_WEIGHTS)
def test_what_is_about_weights_says_nothing_about_layers_without(choice):
    value = TAKEN[choice][0]
    with pytest.raises(PlanError, match=f"'Relu' has no weights, so that '{choice}'.*Relu 'blocks.0.act'"):
        ov.resolve_overrides(GRAPH, {"Relu": {"activation_bits": 8, choice: value}})
    # beside a layer with weights it is about that one, and the rest about both
    found = ov.resolve_overrides(GRAPH, {"blocks.0": {"activation_bits": 8, choice: value}})
    assert found == {"conv2d_1": {"activation_bits": 8, choice: value}, "relu": {"activation_bits": 8}}


def test_of_many_layers_without_weights_eight_are_named():
    graph = layers(*((f"r{k}", "Relu", f"act.{k}", "ReLU") for k in range(10)))
    with pytest.raises(PlanError) as e:
        ov.resolve_overrides(graph, {"act": {"bits": 4}})
    assert "Relu 'act.7'" in str(e.value) and "act.8" not in str(e.value)
    shared = layers(("r1", "Relu", "act", "ReLU"), ("r2", "Relu", "act", "ReLU"))
    with pytest.raises(PlanError) as e:
        ov.resolve_overrides(shared, {"act": {"bits": 4}})
    assert str(e.value).count("Relu 'act'") == 1


def test_operators_with_weights_are_known_and_others_have_none():
    assert all(map(ov.has_weights, ("Linear", "Conv2D", "Embedding", "MatMul")))
    assert not any(map(ov.has_weights, ("Relu", "Add", "Custom")))


def test_layers_stand_in_the_order_of_the_last_word_about_each():
    found = ov.resolve_overrides(GRAPH, [("head", {"bits": 4}), ("stem", {"bits": 4}), ("head", {"rule": "mse"})])
    assert list(found.items()) == [("conv2d", {"bits": 4}), ("linear", {"bits": 4, "rule": "mse"})]


@pytest.mark.parametrize(
    ("later", "left"),
    [
        ({"bits": 4}, {"bits": 4}),
        ({"activation_bits": 8}, {"activation_bits": 8}),
        ({"bits": None}, {"float": "why", "bits": None}),
        ({"activation_bits": "float"}, {"float": "why", "activation_bits": "float"}),
        ({"rule": "mse"}, {"float": "why", "rule": "mse"}),
        ({"float": "another"}, {"float": "another"}),
    ],
    ids=str,
)
def test_a_number_of_bits_takes_an_earlier_float_back_and_nothing_else_does(later, left):
    assert ov.merge_overrides({"float": "why"}, later) == left
    assert ov.merge_overrides({"bits": 8, "rule": "kl"}, later) == {"bits": 8, "rule": "kl"} | later


def test_what_was_chosen_about_results_gives_way_to_the_user():
    by_hand = {"a": {"bits": 4}, "b": {"rule": "mse"}, "c": {"result": "codes"}}
    out = ov.with_results(by_hand, {"a": "whole", "b": "float", "c": "float", "d": "codes", "e": "whole"})
    assert list(out.items()) == [
        ("d", {"result": "codes"}),
        ("e", {"float": ov.FLOAT_IS_CHEAPER}),
        ("a", {"bits": 4}),
        ("b", {"result": "float", "rule": "mse"}),
        ("c", {"result": "codes"}),
    ]


def test_a_record_holds_names_and_numbers_that_json_knows():
    given = [
        ("a", {"bits": 4, "range": (0, 1)}),
        (OfOp("Relu"), {"rule": our_rule, "z_threshold": float("inf")}),
        ("a", {"bits": 8, "z_threshold": 2.5}),
        ("b", {"bits": 8}),
        ("b", "float"),
        ("c", "float"),
        ("c", {"bits": 2}),
    ]
    assert ov.to_record(given) == {
        "a": {"bits": 8, "range": (0, 1), "z_threshold": 2.5},
        "OfOp(Relu)": {"rule": "our_rule", "z_threshold": "inf"},
        "b": "float",
        "c": {"bits": 2},
    }
    assert ov.to_record(None) == {}


# ---------------------------------------------------------------- narrower formats

AFFINE, LOG = Format(bits=8, zero="any"), Format(bits=8, kind="log", base=2.0)
FORMATS = {
    "uniform": AFFINE,
    "symmetric": Format(bits=8),
    "power_of_two": Format(bits=8, scale="pot"),
    "lut_symmetric": Format(bits=4, kind="lut", lut={"entries": 4}),
    "lut_power_of_two": Format(bits=4, kind="lut", lut={"entries": 4}, scale="pot"),
}
#: zero points and scales may only lose freedom, and a table stays a table
NARROWER = {
    ("uniform", "symmetric"),
    ("uniform", "power_of_two"),
    ("symmetric", "power_of_two"),
    ("lut_symmetric", "lut_power_of_two"),
}


@pytest.mark.parametrize("have", ov.METHODS)
@pytest.mark.parametrize("method", ov.METHODS)
def test_a_format_is_narrowed_to_grids_that_it_holds_and_no_others(have, method):
    fmt = FORMATS[have]
    assert ov.method_of(fmt) == have
    if method != have and (have, method) not in NARROWER:
        with pytest.raises(UnsupportedError, match="method"):
            ov.constrain_format(fmt, layer="conv", method=method)
        return
    made = ov.constrain_format(fmt, layer="conv", method=method)
    assert ov.method_of(made) == method and made.bits == fmt.bits and (made == fmt) is (method == have)


@pytest.mark.parametrize("method", ["symmetric", "power_of_two"])
def test_a_table_with_an_entry_for_each_code_holds_evenly_spaced_values(method):
    table = Format(bits=4, kind="lut", lut={"value_bits": 8})
    made = ov.constrain_format(table, layer="conv", method=method)
    assert (made.kind, made.lut, made.bits, ov.method_of(made)) == ("int", None, 4, method)
    with pytest.raises(UnsupportedError, match="method"):
        ov.constrain_format(table, layer="conv", method="uniform")


@pytest.mark.parametrize("signed, zero", [(True, 0), ("auto", 0), (False, (0, 128))])
def test_zero_is_in_the_middle_of_unsigned_values_or_at_their_end(signed, zero):
    """Of 8 bits 128 stands for 0 where values have both signs."""
    made = ov.constrain_format(Format(bits=8, zero="any", signed=signed), layer="conv", method="symmetric")
    assert made.zero == zero and made.signed == signed


def test_a_sign_that_the_data_decide_may_be_chosen_and_scales_per_channel_become_one():
    auto = Format(bits=8, zero="any", signed="auto", per="channel")
    made = ov.constrain_format(auto, layer="conv", signed=False, per="tensor")
    assert (made.signed, made.per, made.zero) == (False, "tensor", "any") and ov.method_of(LOG) is None
    for fmt in (*FORMATS.values(), auto):
        assert ov.constrain_format(fmt, layer="conv") == fmt
        assert ov.constrain_format(fmt, layer="conv", method=ov.method_of(fmt), signed=fmt.signed, per=fmt.per) == fmt


@pytest.mark.parametrize(
    "fmt, wanted, words",
    [
        (FORMATS["power_of_two"], {"method": "symmetric"}, "this method. Got: symmetric. Allowed: power_of"),
        (FORMATS["symmetric"], {"method": "uniform"}, "Got: uniform. Allowed: symmetric, power_of_two. Try: describe"),
        (LOG, {"method": "symmetric"}, "Got: symmetric. Allowed: nothing else."),
        (Format(bits=8, signed=True), {"signed": False}, "this sign. Got: False. Allowed: True."),
        (Format(bits=8, signed=False), {"signed": True}, "this sign. Got: True. Allowed: False."),
        (Format(bits=8), {"per": "channel"}, "this scale per. Got: channel. Allowed: tensor."),
        (Format(bits=8, per="channel"), {"per": "block"}, "this scale per. Got: block. Allowed: channel."),
        (Format(bits=8, per="row"), {"per": "tensor"}, "this scale per. Got: tensor. Allowed: row."),
    ],
    ids=str,
)
def test_a_format_that_does_not_hold_the_wanted_numbers_is_refused(fmt, wanted, words):
    with pytest.raises(UnsupportedError, match=re.escape(words)) as e:
        ov.constrain_format(fmt, layer="conv", **wanted)
    assert "The chip's format for 'conv' cannot have" in str(e.value)


# ---------------------------------------------------------------- every name that is printed


def functional():
    """Return a network whose operators are functions, with a split, a concatenation and an activation at its root."""

    def forward(m, x):
        a, b = F.conv2d(x, m.w).chunk(2, 1)
        return m.head(torch.cat([F.gelu(a), b.sigmoid() * 40], 1).mean((2, 3)))

    torch.manual_seed(0)
    return model_of(forward, w=torch.randn(8, 3, 3, 3) / 4, head=nn.Linear(8, 3))


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "imx500"])
def test_every_name_that_reports_and_sensitivity_print_is_accepted_by_overrides(platform):
    data = [images(8, 8)]
    result = quantized(functional(), data, platform)
    rows = result.sensitivity(data).rows()
    names = {r[column] for r in rows for column in ("layer", "tensor")}
    names |= {r.name for r in (*result.report.layers, *result.report.inputs)}
    names |= {t.layer for t in result.plan.tensors.values()} | {n.layer for n in result.plan.nodes.values()}
    assert {"x", "cat", "sigmoid", "w", "head.weight"} <= names
    for name in names - {""}:
        edited = result.edit({name: "float"}).plan
        assert any(f"overrides keep '{name}' in float" in n.why for n in edited.nodes.values()) or name == "x"
    assert all(n.layer for n in result.plan.nodes.values())


def test_an_input_has_a_range_of_its_own():
    result = quantized(functional(), [images(8, 8)], "ort_cpu", overrides={"x": {"range": (-8.0, 8.0)}})
    assert float(result.plan["x"].scale) == pytest.approx(16 / 255, rel=1e-6)
    assert result.plan.tensors["x"].origin == "known beforehand"
    kept = quantized(functional(), [images(8, 8)], "ort_cpu", overrides={"x": "float"})
    assert not kept.plan.quantized("x") and kept.plan.nodes["conv2d"].exec == "float"
    with pytest.raises(PlanError, match="'bits' is not a choice for input 'x'.*name the layers that read it"):
        quantized(functional(), [images(8, 8)], "ort_cpu", overrides={"x": {"bits": 4}})
