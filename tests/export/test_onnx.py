"""ONNX files of whole networks: opsets, names, open axes, and composites that have no form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from chipfit.errors import UnsupportedError
from chipfit.export.onnx.writer import export_onnx
from chipfit.frameworks.torch.capture import capture
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.build import model_of, platform_file, quantized
from tests.export.operators import alone
from tests.zoo import make


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
