"""ONNX files: the float network of torch, the integers of the plan, and what ONNX Runtime makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from chipfit.engine.kernels import execute
from chipfit.engine.run import run
from chipfit.engine.trees import flatten_inputs
from chipfit.errors import UnsupportedError
from chipfit.export.onnx.ops import REFUSED, WRITERS
from chipfit.export.onnx.writer import export_onnx
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Value
from chipfit.graph.ops import OPS
from chipfit.passes.decompose import RULES
from chipfit.quantizers.grids import quantize
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.build import model_of, platform_file, quantized
from tests.graph.test_ops import made
from tests.zoo import ZOO, make


def call(batch):
    return batch if isinstance(batch, tuple) else (batch,)


def alone(op):
    """A graph of one node, inputs for it, and what the engine makes of them."""
    node, tensors = made(op)
    results = [torch.as_tensor(y) for y in execute(node, tensors)]
    node = node.with_(outputs=tuple(f"y{k}" for k in range(len(results))))
    graph = Graph([node], [], list(node.outputs), {}, {})
    for slot, name, x in zip(map(OPS[op].slot, range(len(tensors))), node.inputs, tensors):
        if slot in ("w", "b", "mean", "var"):
            graph.weights[name] = x
        else:
            graph.inputs.append(name)
    values = zip((*node.inputs, *node.outputs), (*tensors, *results))
    graph.values = {
        k: Value(k, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for k, x in values if k not in graph.weights
    }
    return graph, [x for name, x in zip(node.inputs, tensors) if name in graph.inputs], results


@pytest.mark.parametrize("op", OPS)
def test_every_operator_is_written_as_the_engine_computes_it_or_refused_with_a_reason(op, tmp_path):
    graph, inputs, want = alone(op)
    if op in REFUSED:
        assert op not in WRITERS and op not in RULES
        with pytest.raises(UnsupportedError, match=f"no ONNX writer. Got: {op} 'n' .{REFUSED[op]}"):
            export_onnx(graph, None, tmp_path / "m.onnx")
        return
    got = OnnxRuntime(export_onnx(graph, None, tmp_path / "m.onnx")).run([x.numpy() for x in inputs])
    for y, found in zip(want, got.values(), strict=True):
        np.testing.assert_allclose(found, y.numpy(), atol=2e-5, rtol=1e-4)


def test_a_composite_that_cannot_be_written_out_says_why(tmp_path):
    graph = alone("SDPA")[0]
    graph.nodes = [graph.nodes[0].with_(attrs={**graph.nodes[0].attrs, "is_causal": True})]
    graph.values |= {i: replace(graph.values[i], shape=(None, 3, None, 4)) for i in graph.inputs}
    with pytest.raises(UnsupportedError, match="SDPA 'n' cannot be written to ONNX: a causal mask needs a fixed"):
        export_onnx(graph, None, tmp_path / "m.onnx")


@pytest.mark.parametrize("name", sorted(ZOO))
def test_the_float_file_computes_what_torch_computes_at_another_batch_size(name, tmp_path):
    model, batch = make(name)
    graph = capture(model, call(batch))
    file = export_onnx(graph, None, tmp_path / "m.onnx")
    flat = [torch.cat([x, x[:1]]) for x in flatten_inputs(graph, call(batch))]
    with torch.no_grad():
        want = run(graph, flat)
    got = OnnxRuntime(file).run([x.numpy() for x in flat])
    for value, y in zip(graph.outputs, got.values(), strict=True):
        np.testing.assert_allclose(y, want[value].numpy(), atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
    model, batch = make("inverted_residual")
    result = quantized(model, batch)
    file = result.export(tmp_path_factory.mktemp("x") / "m.onnx")
    return result, file, onnx.load(file)


def test_weights_are_stored_as_the_plans_integers(residual):
    result, _, file = residual
    stored = {i.name: numpy_helper.to_array(i) for i in file.graph.initializer}
    weights = [t for t in result.plan.tensors.values() if t.role in ("weight", "bias")]
    assert len(weights) == 8
    for t in weights:
        codes = quantize(result.graph.weights[t.name], t.scale, t.zero_point, t.grid, t.axis)
        assert np.array_equal(stored[f"{t.name}_q"], codes.numpy())
        assert stored[f"{t.name}_q"].dtype == (np.int8 if t.role == "weight" else np.int32)
        assert t.name not in stored  # no float copy beside it


def test_onnx_runtime_runs_every_operator_in_integers(residual):
    executed = OnnxRuntime(residual[1]).executed()
    assert executed["QLinearConv"] == 4 and executed["QLinearAdd"] == 1
    assert not {"Conv", "Add", "Clip", "Relu"} & set(executed)


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
