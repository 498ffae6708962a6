"""What an ONNX file says of itself: opsets, versions, shapes, names, and how values are written into it."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from chipfit.errors import ExportError, UnsupportedError
from chipfit.export.io_spec import QuantizedIO
from chipfit.export.onnx.builder import OnnxBuilder, tensor_type
from chipfit.export.onnx.ops import onnx_attribute
from chipfit.export.onnx.writer import export_onnx, live_nodes, lowest_opset, value_info
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.stored import Stored
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.build import stored


def relu(grid: Stored, shape=(None, 3)) -> tuple[Graph, Plan]:
    values = {n: Value(n, shape) for n in "xy"}
    graph = Graph([Node("n", "Relu", ("x",), ("y",))], ["x"], ["y"], values, {})
    tensors = {n: TensorPlan(name=n, role="activation", stored=grid) for n in "xy"}
    return graph, Plan(tensors=tensors, nodes={"n": NodePlan(name="n", op="Relu", exec="int")}, platform="some chip")


@pytest.mark.parametrize("bits, opset", [(4, 21), (3, 21), (5, 13), (8, 13), (9, 21), (16, 21), (17, 13), (32, 13)])
def test_codes_of_4_and_of_16_bits_need_a_later_opset(bits, opset):
    assert lowest_opset(*relu(stored(bits=bits))) == opset


@pytest.mark.parametrize("opset, version", [(None, 7), (13, 7), (14, 10), (17, 8), (18, 8), (21, 10), (20, 10)])
def test_the_version_of_the_format_came_with_the_opset(tmp_path, opset, version):
    model = onnx.load(export_onnx(*relu(stored()), tmp_path / "m.onnx", opset=opset))
    assert (model.opset_import[0].version, model.ir_version) == (opset or 13, version)
    assert model.opset_import[0].domain == "" and model.graph.name == "chipfit" and model.producer_name == "chipfit"
    notes = {p.key: p.value for p in model.metadata_props}
    assert notes["chipfit.platform"] == "some chip" and "chipfit.io" not in notes
    assert json.loads(notes["chipfit.provenance"]) == {}


def test_an_opset_that_is_too_early_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="needs ONNX opset 13. Got: 12. Allowed: >= 13"):
        export_onnx(*relu(stored()), tmp_path / "m.onnx", opset=12)
    with pytest.raises(UnsupportedError, match="needs ONNX opset 17"):
        export_onnx(capture(nn.LayerNorm(4), (torch.randn(2, 4),)), None, tmp_path / "m.onnx", opset=16)


@pytest.mark.parametrize(
    "bits, signed, low, kinds",
    [
        (8, True, None, {"INT8"}),
        (8, False, None, {"UINT8"}),
        (8, True, -127, {"INT8"}),
        (5, True, None, {"INT8"}),
        (5, False, None, {"UINT8"}),
        (16, True, -32767, {"INT16"}),
        (12, False, None, {"UINT16"}),
    ],
)
def test_a_file_saturates_at_the_ends_of_the_grid(tmp_path, bits, signed, low, kinds):
    """Every code in steps of a half, and reals beyond both ends."""
    grid = stored(bits=bits, low=low, signed=signed)
    path = export_onnx(*relu(grid), tmp_path / "m.onnx")
    x = torch.cat([torch.linspace(-20000.0, 40000.0, 3001), torch.arange(-140, 140) / 2, torch.tensor([9e4, -9e4])])
    x = x[: len(x) // 3 * 3].reshape(-1, 3)
    got = OnnxRuntime(path, ["x_q", "y_q"]).run([x.numpy()])
    assert np.array_equal(got["x_q"].astype(int), grid.quantize(x).long().numpy())
    y = grid.dequantize(grid.quantize(x)).relu()
    assert np.array_equal(got["output"], grid.dequantize(grid.quantize(y)).numpy())
    zeros = {n.input[2] for n in onnx.load(path).graph.node if n.op_type == "QuantizeLinear"}
    held = {i.name: i for i in onnx.load(path).graph.initializer}
    assert {onnx.TensorProto.DataType.Name(held[z].data_type) for z in zeros} == kinds


def test_a_narrow_grid_of_channels_is_clipped_along_its_axis(tmp_path):
    grid = stored([0.5, 1.0, 2.0], bits=12, axis=1)
    path = export_onnx(*relu(grid, (None, 3, 2)), tmp_path / "m.onnx")
    x = torch.tensor([[[9e4, -9e4]] * 3, [[1.0, 2.6], [1.0, -1.0], [1022 * 2.0, 5000.0]]])
    got = OnnxRuntime(path, ["x_q"]).run([x.numpy()])["x_q"]
    assert np.array_equal(got.astype(int), grid.quantize(x).long().numpy())


def test_only_what_an_output_needs_is_in_the_file():
    make = onnx.helper.make_node
    nodes = [make("A", ["x"], ["a"]), make("B", ["x"], ["b"]), make("C", ["a"], ["c", "d"]), make("D", ["d"], ["e"])]
    assert [n.op_type for n in live_nodes(nodes, ["c"])] == ["A", "C"]
    assert [n.op_type for n in live_nodes(nodes, ["e", "b"])] == ["A", "B", "C", "D"] and live_nodes(nodes, []) == []


def test_sizes_that_only_the_run_tells_have_names(tmp_path):
    graph = Graph([Node("n", "Add", ("x", "z"), ("y",))], ["x", "z"], ["y"], {}, {})
    graph.values = {"x": Value("x", (None, 3, None)), "z": Value("z", (1,)), "y": Value("y", (None, 3, None))}
    g = onnx.load(export_onnx(graph, None, tmp_path / "m.onnx")).graph
    shown = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*g.input, *g.output)]
    assert shown == [["batch", 3, "x_2"], [1], ["output_0", 3, "output_2"]]


def test_a_weight_that_is_an_output_is_in_the_file(tmp_path):
    graph, _ = relu(stored())
    graph.weights["w"] = torch.tensor([[1, 2, 3]])
    graph.outputs = ["y", "w"]
    got = OnnxRuntime(export_onnx(graph, None, tmp_path / "m.onnx")).run([np.ones((2, 3), np.float32)])
    assert got["output_1"].tolist() == [[1, 2, 3]] and got["output_1"].dtype == np.int64


@pytest.mark.parametrize(
    "value, theirs",
    [(True, 1), (False, 0), (3, 3), ((1, 2), [1, 2]), (((1, 2), (3, 4)), [1, 3, 2, 4]), ((), []), ([[5, 6]], [5, 6])],
)
def test_an_attribute_as_onnx_has_it(value, theirs):
    found = onnx_attribute(value)
    assert found == theirs and type(found) is type(theirs)


def test_a_type_by_torchs_name():
    names = {"float32": 1, "float64": 11, "int": 7, "int64": 7, "bool": 9, "uint8": 2, "int4": 22, "bfloat16": 16}
    assert {k: tensor_type(k) for k in names} == names


@pytest.fixture
def builder():
    graph, plan = relu(stored())
    builder = OnnxBuilder(graph, plan, 13)
    builder.publish("x", "x")
    return builder


def test_reductions_take_their_axes_as_the_opset_has_them(builder):
    for opset, kind, asked in (
        (13, "ReduceMean", False),
        (13, "ReduceSum", True),
        (18, "ReduceMean", True),
        (17, "ReduceMax", False),
    ):
        builder.opset = opset
        builder.op(kind, ["x"], axes=[1, 2])
        node = builder.nodes[-1]
        assert (len(node.input) == 2) is asked and (len(node.attribute) == 0) is asked
        if asked:
            assert numpy_helper.to_array(builder.initialisers[node.input[1]]).tolist() == [1, 2]


def test_operands_that_are_left_out_at_the_end_are_not_named(builder):
    builder.op("Clip", ["x", None, None])
    assert list(builder.nodes[-1].input) == ["x"]
    builder.op("Clip", ["x", None, "x"])
    assert list(builder.nodes[-1].input) == ["x", "", "x"]
    builder.op("MatMulNBits@com.microsoft", ["x"])
    assert (builder.nodes[-1].op_type, builder.nodes[-1].domain) == ("MatMulNBits", "com.microsoft")
    assert len(set(builder.op_many("Split", ["x"], 3))) == 3 and builder.nodes[-1].domain == ""


def test_of_a_reshaped_value_the_last_shape_counts_unless_it_copies_a_size(builder):
    first = builder.op("Reshape", ["x", builder.const(np.array([3, -1]))])
    second = builder.op("Reshape", [first, builder.const(np.array([-1, 2]))])
    assert builder.nodes[-1].input[0] == "x"
    builder.op("Reshape", [second, builder.const(np.array([0, 4]))])
    assert builder.nodes[-1].input[0] == second
    builder.op("Reshape", [second, "computed"])
    assert builder.nodes[-1].input[0] == second


def test_what_an_operator_computes_is_told_from_codes_that_were_moved(builder):
    computed = builder.op("Erf", ["x"])
    moved = builder.op("Transpose", [computed])
    assert builder.computed_in_float(computed) and not builder.computed_in_float(moved)
    assert not builder.computed_in_float("x") and not builder.computed_in_float(None)
    made = []
    for _ in range(2):
        builder.once(("x", "rows"), lambda: made.append(1) or "r")
    assert made == [1] and builder.once(("x", "other"), lambda: "o") == "o"


def test_what_the_checker_says_first_is_said(tmp_path, monkeypatch):
    def refuses(model, full_check):
        raise ValueError("too large\nfor a protobuf")

    monkeypatch.setattr(onnx.checker, "check_model", refuses)
    with pytest.raises(ExportError, match="The ONNX checker refuses the model: too large.$"):
        export_onnx(*relu(stored()), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "x, y, shown",
    [
        ((None, 3), (None, 4), ["batch", 4]),
        ((None, 3), (None, None), ["output_0", "output_1"]),
        ((2, 3), (None, 4), ["output_0", 4]),
        ((), (None,), ["batch"]),
    ],
)
def test_the_first_axis_of_a_result_is_the_batch_where_all_inputs_have_one(x, y, shown):
    graph = Graph([], ["x"], ["y"], {"x": Value("x", x), "y": Value("y", y)}, {})
    info = value_info(graph, "output", "y")
    assert [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim] == shown
    assert info.name == "output" and info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert (
        value_info(graph, "o", "y", QuantizedIO("uint8", 1.0, 0, True)).type.tensor_type.elem_type
        == onnx.TensorProto.UINT8
    )
