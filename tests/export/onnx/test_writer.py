"""What an ONNX file says of itself: opsets, versions, shapes, names, and how values are written into it."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from chipfit.errors import ExportError, UnsupportedError
from chipfit.export.io_spec import QuantizedIO
from chipfit.export.onnx.builder import OnnxBuilder
from chipfit.export.onnx.writer import export_onnx, lowest_opset, value_info
from chipfit.frameworks.onnx.live import live_nodes
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Value
from chipfit.plan.record import NodePlan, Plan
from chipfit.quantizers.stored import Stored
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.build import graph_of, model_of, node, plan_of, platform_file, quantized, stored
from tests.export.operators import alone
from tests.zoo import make


def relu(grid: Stored, shape=(None, 3)) -> tuple[Graph, Plan]:
    plan = plan_of(x=grid, y=grid)
    nodes = {"n": NodePlan(name="n", op="Relu", exec="int")}
    return graph_of(node("y = Relu(x)", name="n"), shape=shape), replace(plan, nodes=nodes, platform="some chip")


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
    graph = graph_of("y = Add(x, z)", shape=(None, 3, None), shapes={"z": (1,)})
    g = onnx.load(export_onnx(graph, None, tmp_path / "m.onnx")).graph
    shown = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*g.input, *g.output)]
    assert shown == [["batch", 3, "x_2"], [1], ["output_0", 3, "output_2"]]


@pytest.fixture
def builder():
    graph, plan = relu(stored())
    builder = OnnxBuilder(graph, plan, 13)
    builder.publish("x", "x")
    return builder


def test_reductions_take_their_axes_as_the_opset_has_them(builder):
    kinds = (13, "ReduceMean", 0), (13, "ReduceSum", 1), (18, "ReduceMean", 1), (17, "ReduceMax", 0)
    for builder.opset, kind, as_input in kinds:
        builder.op(kind, ["x"], axes=[1, 2])
        reduction = builder.nodes[-1]
        assert len(reduction.input) - 1 == 1 - len(reduction.attribute) == as_input
        if as_input:
            assert numpy_helper.to_array(builder.initialisers[reduction.input[1]]).tolist() == [1, 2]


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
    codes = value_info(graph, "o", "y", QuantizedIO("uint8", 1.0, 0, True))
    assert codes.type.tensor_type.elem_type == onnx.TensorProto.UINT8


# ---------------------------------------------------------------- whole networks


def test_a_composite_that_cannot_be_written_out_says_why(tmp_path):
    graph = alone("SDPA")[0]
    graph.nodes = [graph.nodes[0].with_(attrs={**graph.nodes[0].attrs, "is_causal": True})]
    graph.values |= {i: replace(graph.values[i], shape=(None, 3, None, 4)) for i in graph.inputs}
    with pytest.raises(UnsupportedError, match="SDPA 'n' cannot be written to ONNX: a causal mask needs a fixed"):
        export_onnx(graph, None, tmp_path / "m.onnx")


def test_four_bit_weights_need_opset_21(tmp_path):
    text = (
        "name: w4\nextends: ort_cpu\nformats: {w4: {bits: 4, per: channel}}\n"
        "ops: [{match: ['@conv'], use: [{in: u8, w: w4, b: b32, out: u8}], "
        "rules: [{mono: {b: 1, in0: -1, w: -1}, eq: 1}], src: [M], conf: I}]\nsources: {M: test}\n"
    )
    model, batch = make("grouped_strided")
    result = quantized(model, batch, platform_file(tmp_path, text, "w4.yaml"))
    file = onnx.load(result.export(tmp_path / "m.onnx"))
    assert file.opset_import[0].version == 21
    assert onnx.TensorProto.INT4 in {i.data_type for i in file.graph.initializer}
    assert OnnxRuntime(tmp_path / "m.onnx").run([batch.numpy()])["output"].shape == result.model(batch).shape


def test_a_dict_keeps_its_names(tmp_path):
    named = model_of(lambda m, x: {"scores": m.l(x), "boxes": x + 1}, l=nn.Linear(4, 4))
    file = export_onnx(capture(named, (torch.randn(2, 4),)), None, tmp_path / "m.onnx")
    assert list(OnnxRuntime(file).run([np.zeros((3, 4), np.float32)])) == ["scores", "boxes"]


def test_a_result_called_like_an_input_or_a_value_of_the_file_has_another_name(tmp_path):
    both = model_of(lambda m, output: {"output": output + 1, "linear": m.l(output)}, l=nn.Linear(4, 4))
    file = export_onnx(capture(both, (torch.randn(2, 4),)), None, tmp_path / "m.onnx")
    assert list(OnnxRuntime(file).run([np.zeros((3, 4), np.float32)])) == ["output_out", "linear_out"]


def test_a_result_may_have_two_open_axes(tmp_path):
    """Every sample against every other: both axes of the result are as long as the batch."""

    def pairs(m, x):
        y = m.linear(x)
        return y @ y.T

    result = quantized(model_of(pairs, linear=nn.Linear(6, 4)), torch.randn(3, 6))
    path = result.export(tmp_path / "m.onnx")
    (out,) = onnx.load(path).graph.output
    assert [d.dim_value for d in out.type.tensor_type.shape.dim] == [0, 0]
    assert result.verify([torch.randn(5, 6)], path=path).departures == []
