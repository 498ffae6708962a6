"""A tensor whose grid the chip dictates does not force it on the tensors that it is joined with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import Constraint
from chipfit.decide.requantize import requantize
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph, Node, Value
from chipfit.platform.load import load
from chipfit.platform.schema import Rule
from chipfit.target_platform import get_target_platform_capabilities
from tests.build import platform_of


class Joined(nn.Module):
    """A sigmoid or two beside a wide tensor."""

    def __init__(self, *functions) -> None:
        super().__init__()
        self.conv, self.functions = nn.Conv2d(3, 4, 1), functions

    def forward(self, x):
        x = 3 * self.conv(x)
        return torch.cat([*(f(x) for f in self.functions), x], 1)


def moved(x):
    return torch.sigmoid(x).reshape(x.shape[0], 4, -1).reshape(x.shape)


DATA = [torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(k)) for k in range(2)]
CHIPS = ["tflite_int8", get_target_platform_capabilities("pytorch", "tflite")]


@pytest.mark.parametrize("chip", CHIPS, ids=["file", "python"])
@pytest.mark.parametrize(
    "functions", [(torch.sigmoid,), (torch.sigmoid, torch.tanh), (moved,)], ids=["one", "two", "behind movers"]
)
def test_what_is_joined_is_not_clipped(chip, functions):
    network = Joined(*functions).eval()
    result = chipfit.quantize(network, DATA, chip, progress=False)
    assert sum(n.op == "Requantize" for n in result.graph.nodes) == len(functions)
    error = (result.model(DATA[0]) - network(DATA[0])).abs().max()
    step = float(result.plan.tensors[result.graph.outputs[0]].scale)
    assert error < 3 * step
    sigmoid = next(n.output for n in result.graph.nodes if n.op == "Sigmoid")
    assert float(result.plan.tensors[sigmoid].scale) == 1 / 256
    assert any("requantized for" in note for note in result.plan.rewrites)


def test_tensors_with_one_dictated_grid_are_joined_as_they_are():
    class Two(nn.Module):
        def forward(self, x):
            return torch.cat([torch.sigmoid(x), torch.sigmoid(2 * x)], 1)

    result = chipfit.quantize(Two(), [torch.randn(4, 3)], "tflite_int8", progress=False)
    assert not any(n.op == "Requantize" for n in result.graph.nodes)
    assert float(result.plan.tensors[result.graph.outputs[0]].scale) == 1 / 256


def test_a_chip_that_cannot_requantize_says_what_contradicts():
    whole = load("tflite_int8")
    chip = whole.model_copy(update={"name": "plain", "ops": tuple(r for r in whole.ops if r.match != ("Requantize",))})
    with pytest.raises(UnsupportedError, match="share"):
        chipfit.quantize(Joined(torch.sigmoid, torch.tanh).eval(), DATA, chip, progress=False)


def test_a_plan_with_requantization_is_saved_edited_and_exported(tmp_path):
    network = Joined(torch.sigmoid).eval()
    result = chipfit.quantize(network, DATA, "tflite_int8", progress=False)
    again = chipfit.load(result.save(tmp_path / "plan"))
    assert torch.equal(again.model(DATA[0]), result.model(DATA[0]))
    edited = result.edit({"conv": "float"})
    assert sum(n.op == "Requantize" for n in edited.graph.nodes) == 1
    assert not edited.plan.quantized("conv.weight")
    assert result.export(tmp_path / "m.onnx").is_file()


# ---------------------------------------------------------------- graphs of a few nodes

FIX = {"fix": "out", "scale": 0.125, "zp": 0}
TIE = {"tie": ["ins", "out"]}
MOVE = {"tie": ["in0", "out"]}


def chip(able=True):
    use = [{"in": "a8", "out": "a8"}]
    rules = [{"match": ["Requantize"], "use": use if able else [{"in": "float", "out": "float"}]}]
    formats = {"a8": {"bits": 8, "zero": "any"}}
    return platform_of(*rules, formats=formats)


def joined(*operators, able=True):
    """The graph and notes that come of operators (name, operator, inputs, rules), each of which writes its name."""
    nodes = [Node(name, op, tuple(ins), (name,), layer=f"of.{name}") for name, op, ins, _ in operators]
    values = {v: Value(v, (None, 4)) for v in ("x", "z", *(n.name for n in nodes))}
    graph = Graph(nodes, ["x", "z"], [nodes[-1].name], values, {})
    constraints = []
    for name, op, ins, rules in operators:
        slots = {f"in{k}": (i,) for k, i in enumerate(ins)} | {"ins": tuple(ins), "out": (name,), "outs": (name,)}
        constraints.append(Constraint(op=op, rules=tuple(Rule(**r) for r in rules), slots=slots))
    out, notes = requantize(graph, chip(able), Assignment(constraints=tuple(constraints)))
    return graph, out, notes


def added(out):
    return [(n.data, n.output) for n in out.nodes if n.op == "Requantize"]


def test_a_dictated_operand_is_requantized_in_front_of_what_joins_it():
    graph, out, notes = joined(("s", "Sigmoid", ["x"], [FIX]), ("c", "Concat", ["s", "z", "s"], [TIE]))
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
    other = {"fix": "out", "scale": 0.5, "zp": 0}
    operands = ("s", "Sigmoid", ["x"], [FIX]), ("t", "Tanh", ["x"], [other])
    _, out, notes = joined(*operands, ("a", "Add", ["s", "t"], [rule]))
    assert added(out) == [("s", "s_for_a"), ("t", "t_for_a")] and len(notes) == 2
    assert out.nodes[-1].inputs == ("s_for_a", "t_for_a")


@pytest.mark.parametrize(
    "rules", [[], [{**TIE, "hard": False}], [MOVE], [{"tie": ["in1", "out"]}, {"dtype": ["ins", "out"]}]], ids=str
)
def test_what_ties_no_operands_with_each_other_joins_nothing(rules):
    graph, out, notes = joined(("s", "Sigmoid", ["x"], [FIX]), ("a", "Add", ["s", "z"], rules))
    assert out is graph and notes == []


def test_operands_with_one_dictated_grid_do_not_clash():
    two = ("s", "Sigmoid", ["x"], [FIX]), ("t", "Sigmoid", ["z"], [FIX])
    graph, out, _ = joined(*two, ("c", "Concat", ["s", "t"], [TIE]))
    assert out is graph
    graph, out, _ = joined(two[0], ("c", "Concat", ["s", "s"], [TIE]))
    assert out is graph
    graph, out, _ = joined(("r", "Relu", ["x"], []), ("c", "Concat", ["r", "z"], [TIE]))
    assert out is graph


def test_a_grid_is_dictated_through_what_moves_codes():
    moved = ("s", "Sigmoid", ["x"], [FIX]), ("m", "Reshape", ["s"], [MOVE]), ("n", "Reshape", ["z"], [MOVE])
    _, out, _ = joined(*moved, ("c", "Concat", ["m", "n"], [TIE]))
    assert added(out) == [("m", "m_for_c")]


def test_each_join_has_its_own():
    nodes = (
        ("s", "Sigmoid", ["x"], [FIX]),
        ("c", "Concat", ["s", "z"], [TIE]),
        ("d", "Concat", ["x", "s"], [TIE]),
    )
    _, out, notes = joined(*nodes)
    assert added(out) == [("s", "s_for_c"), ("s", "s_for_d")] and len(notes) == 2
    assert [n.inputs for n in out.nodes if n.op == "Concat"] == [("s_for_c", "z"), ("x", "s_for_d")]


def test_names_that_are_taken_are_left_alone():
    nodes = (
        ("s", "Sigmoid", ["x"], [FIX]),
        ("s_for_c", "Relu", ["x"], []),
        ("c", "Concat", ["s", "s_for_c"], [TIE]),
    )
    _, out, _ = joined(*nodes)
    ((_, name),) = added(out)
    assert name != "s_for_c" and out.nodes[-1].inputs == (name, "s_for_c")


def test_a_chip_without_a_kernel_for_it_inserts_nothing():
    graph, out, notes = joined(("s", "Sigmoid", ["x"], [FIX]), ("c", "Concat", ["s", "z"], [TIE]), able=False)
    assert out is graph and notes == []
