"""Inserted nodes: Requantize before what joins tensors of other scales, DynamicQuantize before dynamic kernels."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.assignment import Assignment
from chipfit.decide.insertions import requantize, with_dynamic, without_insertions
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import DYNAMIC
from chipfit.platform.load import load
from chipfit.target_platform import get_target_platform_capabilities
from tests.build import graph_of, model_of, node, platform_of, quantized, randn
from tests.decide.test_constraints import constraint

DATA = [randn(8, 3, 4, 4, seed=k) for k in range(2)]


def joined(*functions):
    """A sigmoid or two beside a wide tensor."""

    def forward(m, x):
        x = 2 * m.conv(x)
        return torch.cat([*(f(x) for f in functions), x], 1)

    return model_of(forward, conv=nn.Conv2d(3, 4, 1))


def moved(x):
    return torch.sigmoid(x).reshape(x.shape[0], 4, -1).reshape(x.shape)


CHIPS = ["tflite_int8", get_target_platform_capabilities("pytorch", "tflite")]


@pytest.mark.parametrize("chip", CHIPS, ids=["file", "python"])
@pytest.mark.parametrize(
    "functions", [(torch.sigmoid,), (torch.sigmoid, torch.tanh), (moved,)], ids=["one", "two", "behind moves"]
)
def test_joined_tensors_are_not_clipped(chip, functions):
    network = joined(*functions)
    result = quantized(network, DATA, chip)
    assert sum(n.op == "Requantize" for n in result.graph.nodes) == len(functions)
    error = (result.model(DATA[0]) - network(DATA[0])).abs().max()
    assert error < 3 * float(result.plan.tensors[result.graph.outputs[0]].scale)
    sigmoid = next(n.output for n in result.graph.nodes if n.op == "Sigmoid")
    assert float(result.plan.tensors[sigmoid].scale) == 1 / 256
    assert any("requantized for" in note for note in result.plan.rewrites)


def test_a_chip_that_cannot_requantize_names_the_contradiction():
    whole = load("tflite_int8")
    chip = whole.model_copy(update={"name": "plain", "ops": tuple(r for r in whole.ops if r.match != ("Requantize",))})
    with pytest.raises(UnsupportedError, match="share"):
        quantized(joined(torch.sigmoid, torch.tanh), DATA, chip)


def test_a_plan_with_requantization_is_saved_edited_and_exported(tmp_path):
    result = quantized(joined(torch.sigmoid), DATA, "tflite_int8")
    again = chipfit.load(result.save(tmp_path / "plan"))
    assert torch.equal(again.model(DATA[0]), result.model(DATA[0]))
    edited = result.edit({"conv": "float"})
    assert sum(n.op == "Requantize" for n in edited.graph.nodes) == 1
    assert not edited.plan.quantized("conv.weight")
    assert result.export(tmp_path / "m.onnx").is_file()


# ---------------------------------------------------------------- graphs of a few nodes

FIX = {"fix": "out", "scale": 0.125, "zp": 0}
TIE, MOVE = {"tie": ["ins", "out"]}, {"tie": ["in0", "out"]}
SIGMOID = ("s = Sigmoid(x)", [FIX])


def requantized(*operators, able=True):
    """The graph before and after, and the notes, of operators (text, rules)."""
    nodes = [node(text, layer=f"of.{text[0]}") for text, _ in operators]
    graph = graph_of(*nodes, inputs=["x", "z"])
    constraints = []
    for n, (_, rules) in zip(nodes, operators, strict=True):
        slots = {f"in{k}": i for k, i in enumerate(n.inputs)} | {"ins": n.inputs, "out": n.output, "outs": n.output}
        constraints.append(constraint(*rules, op=n.op, **slots))
    chip = platform_of({"match": ["Requantize"], "use": [dict.fromkeys(("in", "out"), "a8" if able else "float")]})
    return graph, *requantize(graph, chip, Assignment(constraints=tuple(constraints)))


def added(graph):
    return [(n.data, n.output) for n in graph.nodes if n.op == "Requantize"]


def test_a_dictated_operand_is_requantized_before_the_operator_that_joins_it():
    graph, out, notes = requantized(SIGMOID, ("c = Concat(s, z, s)", [TIE]))
    assert [(n.op, n.inputs, n.outputs) for n in out.nodes] == [
        ("Sigmoid", ("x",), ("s",)),
        ("Requantize", ("s",), ("s_for_c",)),
        ("Concat", ("s_for_c", "z", "s_for_c"), ("c",)),
    ]
    assert out.values["s_for_c"].shape == (None, 4) and out.nodes[1].layer == "of.c"
    assert notes == ["'s' keeps the scale that 'npu' dictates and is requantized for 'of.c'"]
    assert len(graph.nodes) == 2 and "s_for_c" not in graph.values


@pytest.mark.parametrize(
    "rule", [TIE, {"tie": ["in0", "in1", "out"]}, {"tie": ["in0", "in1"]}, {"tie": ["in1", "in0", "out"]}]
)
def test_ties_of_all_operands_or_of_the_first_two_join(rule):
    tanh = ("t = Tanh(x)", [{**FIX, "scale": 0.5}])
    _, out, notes = requantized(SIGMOID, tanh, ("a = Add(s, t)", [rule]))
    assert added(out) == [("s", "s_for_a"), ("t", "t_for_a")] and len(notes) == 2
    assert out.nodes[-1].inputs == ("s_for_a", "t_for_a")


@pytest.mark.parametrize(
    "operators",
    [
        # rules that tie no operands with each other
        *((SIGMOID, ("a = Add(s, z)", rules)) for rules in ([], [{**TIE, "hard": False}], [MOVE])),
        (SIGMOID, ("a = Add(s, z)", [{"tie": ["in1", "out"]}, {"dtype": ["ins", "out"]}])),
        # operands with one dictated scale, or none
        (SIGMOID, ("t = Sigmoid(z)", [FIX]), ("c = Concat(s, t)", [TIE])),
        (SIGMOID, ("c = Concat(s, s)", [TIE])),
        (("r = Relu(x)", []), ("c = Concat(r, z)", [TIE])),
    ],
    ids=range(7),
)
def test_operands_that_do_not_clash_are_left_alone(operators):
    graph, out, notes = requantized(*operators)
    assert out is graph and notes == []


def test_a_chip_without_a_kernel_for_it_inserts_nothing():
    graph, out, notes = requantized(SIGMOID, ("c = Concat(s, z)", [TIE]), able=False)
    assert out is graph and notes == []


def test_a_scale_is_dictated_through_operators_that_move_values():
    moves = ("m = Reshape(s)", [MOVE]), ("n = Reshape(z)", [MOVE])
    _, out, _ = requantized(SIGMOID, *moves, ("c = Concat(m, n)", [TIE]))
    assert added(out) == [("m", "m_for_c")]


def test_each_join_has_its_own():
    _, out, notes = requantized(SIGMOID, ("c = Concat(s, z)", [TIE]), ("d = Concat(x, s)", [TIE]))
    assert added(out) == [("s", "s_for_c"), ("s", "s_for_d")] and len(notes) == 2
    assert [n.inputs for n in out.nodes if n.op == "Concat"] == [("s_for_c", "z"), ("x", "s_for_d")]


def test_names_that_are_taken_are_left_alone():
    _, out, _ = requantized(SIGMOID, ("s_for_c = Relu(x)", []), ("c = Concat(s, s_for_c)", [TIE]))
    ((_, name),) = added(out)
    assert name != "s_for_c" and out.nodes[-1].inputs == (name, "s_for_c")


# ---------------------------------------------------------------- kernels that quantize their input at run time

FORMATS = {
    "d8": {"bits": 8, "zero": "any"},
    "s8": {"bits": 8, "per": "row"},
    "b8": {"bits": 8, "per": "block", "axis": "in", "block": [4, 3]},
}


def inserted(last=6, **dynamic):
    """The graph without and with nodes before kernels: `a="d8"` makes a a dynamic one."""
    first, second = node("a = Linear(x, w)", layer="first"), node("b = Linear(x, w, -)", layer="second")
    nodes = first, second, node("c = Add(a, b)", layer="sum")
    graph = graph_of(*nodes, weights={"w": torch.ones(last, last)}, shape=(None, 5, last))
    return graph, with_dynamic(graph, platform_of(formats=FORMATS), Assignment(dynamic=dynamic))


def test_kernels_of_one_format_share_a_node():
    graph, out = inserted(a="d8", b="d8")
    assert [(n.op, n.inputs, n.output) for n in out.nodes] == [
        (DYNAMIC, ("x",), "x_dynamic"),
        ("Linear", ("x_dynamic", "w"), "a"),
        ("Linear", ("x_dynamic", "w", None), "b"),
        ("Add", ("a", "b"), "c"),
    ]
    first = out.nodes[0]
    assert first.attrs == {"qmin": -128, "qmax": 127, "affine": True, "per": "tensor", "block": 1}
    assert first.layer == "first" and out.values["x_dynamic"].shape == (None, 5, 6)
    assert [n.op for n in graph.nodes] == ["Linear", "Linear", "Add"] and "x_dynamic" not in graph.values


def test_kernels_of_two_formats_have_a_node_each():
    _, out = inserted(a="d8", b="s8", c="d8")
    made = [n for n in out.nodes if n.op == DYNAMIC]
    assert [(n.data, n.attrs["affine"], n.attrs["per"], n.layer) for n in made] == [
        ("x", True, "tensor", "first"),
        ("x", False, "row", "second"),
        ("a", True, "tensor", "sum"),
    ]
    assert len({n.output for n in made}) == 3 and out.nodes[-1].inputs == (made[2].output, "b")


@pytest.mark.parametrize("last, block", [(8, 4), (6, 3), (7, 1)])
def test_blocks_divide_the_last_axis(last, block):
    _, out = inserted(last, a="b8")
    assert out.nodes[0].attrs["block"] == block and out.nodes[0].attrs["per"] == "block"


def test_inserted_nodes_come_out_again():
    graph, out = inserted(a="d8", c="s8")
    back = without_insertions(out)
    assert back.nodes == graph.nodes and back.values == graph.values and back.weights.keys() == graph.weights.keys()
    assert without_insertions(graph) is graph
