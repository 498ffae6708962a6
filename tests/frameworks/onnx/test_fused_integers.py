"""Fused operators of integers that ONNX Runtime's quantizer makes: their weights are read as floats."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper

import chipfit
from chipfit.engine.run import run
from chipfit.errors import CaptureError
from chipfit.frameworks.onnx.capture import capture

onnxruntime_quantization = pytest.importorskip("onnxruntime.quantization")


def saved(path, nodes, weights, ends, domains=("",)):
    initialisers = [numpy_helper.from_array(w, k) for k, w in weights.items()]
    ins, outs = ([helper.make_tensor_value_info(k, 1, shape) for k, shape in of.items()] for of in ends)
    graph = helper.make_graph(nodes, "net", ins, outs, initialisers)
    opsets = [helper.make_opsetid(d, 17 if not d else 1) for d in domains]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4") / np.float32(np.sqrt(shape[-1]))


def lstm(path, directions):
    weights = {"W": drawn(directions, 32, 6), "R": drawn(directions, 32, 8, seed=1), "B": drawn(directions, 64, seed=2)}
    way = {1: "forward", 2: "bidirectional"}[directions]
    nodes = [helper.make_node("LSTM", ["x", "W", "R", "B"], ["y"], name="lstm", hidden_size=8, direction=way)]
    return saved(path, nodes, weights, ({"x": [10, 1, 6]}, {"y": [10, directions, 1, 8]}))


def attention(path):
    weights = {"w": drawn(16, 48), "b": drawn(48, seed=1)}
    nodes = [helper.make_node("Attention", ["x", "w", "b"], ["y"], name="a", domain="com.microsoft", num_heads=4)]
    return saved(path, nodes, weights, ({"x": [1, 5, 16]}, {"y": [1, 5, 16]}), ("", "com.microsoft"))


def quantized(path, per_channel):
    out = path.with_stem("quantized")
    onnxruntime_quantization.quantize_dynamic(str(path), str(out), per_channel=per_channel)
    return out


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("make", "kind", "shape"),
    [
        (lambda p: lstm(p, 1), "DynamicQuantizeLSTM", (10, 1, 6)),
        (lambda p: lstm(p, 2), "DynamicQuantizeLSTM", (10, 1, 6)),
        (attention, "QAttention", (1, 5, 16)),
    ],
)
def test_a_file_of_onnx_runtimes_quantizer_is_quantized_again(tmp_path, make, kind, shape, per_channel):
    file = quantized(make(tmp_path / "net.onnx"), per_channel)
    assert kind in {n.op_type for n in onnx.load(file).graph.node}
    with pytest.raises(CaptureError, match=rf"{kind} has no reader.*--requantize"):
        chipfit.verify_file(file, [torch.zeros(shape)])
    model, x = chipfit.load_model(file, requantize=True), 2 * drawn(*shape, seed=5)
    want = ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    exact = ort.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    graph = capture(model, [torch.from_numpy(x)])
    got = run(graph, [torch.from_numpy(x)], keep=graph.outputs)[graph.outputs[0]].detach().numpy()
    noise = [float(np.sqrt(((y - want) ** 2).mean() / (want**2).mean())) for y in (got, exact)]
    assert noise[0] < 0.02 and noise[0] < 1.5 * noise[1]
    data = [torch.from_numpy(drawn(*shape, seed=k)) for k in range(4)]
    result = chipfit.quantize(model, data, platform="tflite_int8", progress=False)
    assert result.verify(data[:1]).exact
