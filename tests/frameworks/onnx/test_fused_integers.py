"""Fused operators of integers that ONNX Runtime's quantizer makes."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import chipfit
from chipfit.engine.run import run
from chipfit.frameworks.onnx.capture import capture
from chipfit.runtimes import onnxruntime
from chipfit.verify import verify
from chipfit.verify.file import read_quantized
from tests.build import precise_session
from tests.onnx_models import onnx_node, onnx_of

onnxruntime_quantization = pytest.importorskip("onnxruntime.quantization")


def saved(path, nodes, weights, x, outputs):
    inputs = x if isinstance(x, dict) else {"x": x}
    onnx.save(onnx_of(*nodes, inputs=inputs, outputs=outputs, constants=weights), path)
    return path


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4") / np.float32(np.sqrt(shape[-1]))


def lstm(path, directions):
    weights = {"W": drawn(directions, 32, 6), "R": drawn(directions, 32, 8, seed=1), "B": drawn(directions, 64, seed=2)}
    way = {1: "forward", 2: "bidirectional"}[directions]
    node = onnx_node("y = LSTM(x, W, R, B)", name="lstm", hidden_size=8, direction=way)
    return saved(path, [node], weights, [10, 1, 6], {"y": [10, directions, 1, 8]})


def attention(path):
    weights = {"w": drawn(16, 48), "b": drawn(48, seed=1)}
    node = onnx_node("y = com.microsoft::Attention(x, w, b)", name="a", num_heads=4)
    return saved(path, [node], weights, [1, 5, 16], {"y": [1, 5, 16]})


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
    model, x = chipfit.load_model(file, requantize=True), 2 * drawn(*shape, seed=5)
    want = precise_session(file).run(None, {"x": x})[0]
    exact = ort.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    graph = capture(model, [torch.from_numpy(x)])
    got = run(graph, [torch.from_numpy(x)], keep=graph.outputs)[graph.outputs[0]].detach().numpy()
    noise = [float(np.sqrt(((y - want) ** 2).mean() / (want**2).mean())) for y in (got, exact)]
    assert noise[0] < 0.02 and noise[0] < 1.5 * noise[1]
    data = [torch.from_numpy(drawn(*shape, seed=k)) for k in range(4)]
    result = chipfit.quantize(model, data, platform="tflite_int8", progress=False)
    assert result.verify(data[:1]).exact


def test_layers_in_a_row_that_quantize_at_run_time_are_compared(tmp_path):
    weights = {f"{k}{n}": drawn(2, *size, seed=n) for n in (6, 16) for k, size in (("W", (32, n)), ("R", (32, 8)))}
    lstms, how = [("x", "6", "a"), ("c", "16", "y")], {"hidden_size": 8, "direction": "bidirectional"}
    first, second = (onnx_node(f"{o} = LSTM({i}, W{n}, R{n})", name=o, **how) for i, n, o in lstms)
    turn = onnx_node("b = Transpose(a)", perm=(0, 2, 1, 3))
    merge = onnx_node("c = Reshape(b, sizes)")
    weights["sizes"] = np.array([10, 1, 16])
    nodes = [first, turn, merge, second]
    file = saved(tmp_path / "net.onnx", nodes, weights, [10, 1, 6], {"y": [10, 2, 1, 8]})
    check = chipfit.verify_file(quantized(file, False), [torch.from_numpy(drawn(10, 1, 6))])
    assert check.exact and [o.name for o in check.outputs if o.inner] == ["x/turned", "a_stack"], str(check)


def test_a_mean_that_is_read_as_a_pool_and_a_reshape_is_compared(tmp_path):
    nodes = ["a = Conv(x, w)", onnx_node("b = ReduceMean(a)", axes=[2, 3], keepdims=0), "y = MatMul(b, v)"]
    weights = {"w": drawn(8, 3, 3, 3), "v": drawn(8, 4, seed=1)}
    file = saved(tmp_path / "net.onnx", nodes, weights, [1, 3, 9, 9], {"y": [1, 4]})
    check = chipfit.verify_file(quantized(file, False), [torch.from_numpy(drawn(1, 3, 9, 9))])
    assert check.exact and [o.name for o in check.outputs if o.inner] == ["b"], str(check)


def test_an_output_of_indices_stays_one_without_quantizers(tmp_path):
    nodes = ["a = MatMul(x, w)", onnx_node("y = ArgMax(a)", axis=1, keepdims=0)]
    file = saved(tmp_path / "net.onnx", nodes, {"w": drawn(6, 8)}, [10, 6], {"y": [10]})
    model = onnx.load(file)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(model, file)
    again = chipfit.load_model(quantized(file, False), requantize=True)
    graph, x = capture(again, [torch.from_numpy(drawn(10, 6))]), torch.from_numpy(drawn(10, 6, seed=1))
    assert run(graph, [x])[graph.outputs[0]].tolist() == (x.numpy() @ drawn(6, 8)).argmax(1).tolist()


def embedding(path):
    rows = {"words": drawn(20, 16), "places": drawn(8, 16, seed=1), "kinds": drawn(2, 16, seed=2)}
    weights = rows | {"gamma": np.ones(16, "f4"), "beta": drawn(16, seed=3), "w": drawn(16, 48), "b": drawn(48, seed=4)}
    operands = ", ".join(["ids", "kind", *[*weights][:5], "mask"])
    first = onnx_node(f"e, counts = com.microsoft::EmbedLayerNormalization({operands})", name="e")
    second = onnx_node("y = com.microsoft::Attention(e, w, b, counts)", name="a", num_heads=4)
    ins = dict.fromkeys(("ids", "kind", "mask"), ("batch", 5))
    saved(path, [first, second], weights, ins, {"y": ("batch", 5, 16)})
    model = onnx.load(path)
    for v in model.graph.input:
        v.type.tensor_type.elem_type = onnx.TensorProto.INT32
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("make", [attention, embedding])
def test_attention_of_integers_is_shown_and_computes_the_simulated_numbers(tmp_path, make, kind):
    out = tmp_path / "quantized.onnx"
    kind = getattr(onnxruntime_quantization.QuantType, kind)
    onnxruntime_quantization.quantize_dynamic(str(make(tmp_path / "net.onnx")), str(out), weight_type=kind)
    ids = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(0)).int()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).int()
    tokens = {"ids": ids, "kind": torch.zeros_like(ids), "mask": mask}
    x = {"x": torch.from_numpy(drawn(1, 5, 16))} if make is attention else tokens
    plan = read_quantized(out)[0].plan
    held = [t.stored.format for t in plan.tensors.values()]  # tables are uint8 in any case
    assert held[-1] == ("int8" if "QInt8" in str(kind) else "uint8") and len(held) == (1 if make is attention else 5)
    check = chipfit.verify_file(out, [x])
    assert check.exact and not check.warnings and len(check.held) == len(plan.tensors), str(check)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("directions", [1, 2])
def test_an_lstm_that_quantizes_its_state_computes_the_simulated_numbers(
    tmp_path, monkeypatch, directions, per_channel
):
    file = quantized(lstm(tmp_path / "net.onnx", directions), per_channel)
    plan = read_quantized(file)[0].plan
    assert [t.stored.format for t in plan.tensors.values()] == ["int8"] * 2 * directions
    data = [torch.from_numpy(3 * drawn(10, 1, 6, seed=k)) for k in range(2)]
    check = chipfit.verify_file(file, data)
    assert check.exact and len(check.held) == 2 * directions, str(check)
    assert [o.fault for o in check.outputs if o.inner] == [""]
    other = not onnxruntime.saturates()
    monkeypatch.setattr(onnxruntime, "saturates", lambda: other)
    assert chipfit.verify_file(file, data).verdict == "departs"  # weights of 8 bits saturate as on this processor


@pytest.mark.parametrize("directions", [1, 2])
def test_the_parts_of_one_constant_that_an_lstm_reads_are_compared(tmp_path, directions):
    """A bias of both products, and weights of both directions, are one constant of the file each."""
    file, x = lstm(tmp_path / "net.onnx", directions), [drawn(10, 1, 6, seed=k) for k in range(3)]

    class Reader(onnxruntime_quantization.CalibrationDataReader):
        rows = iter([{"x": r} for r in x])

        def get_next(self):
            return next(self.rows, None)

    out = tmp_path / "qdq.onnx"
    options = {"op_types_to_quantize": ["LSTM"], "quant_format": onnxruntime_quantization.QuantFormat.QDQ}
    onnxruntime_quantization.quantize_static(str(file), str(out), Reader(), **options)
    check = chipfit.verify_file(out, [torch.from_numpy(x[0])])
    assert check.exact and sum(h.elements > 0 for h in check.held) == 4 * directions, str(check)
    found, platform = read_quantized(out)  # a negative control: the simulation holds what the file does not
    bias = next(k for k, t in found.plan.tensors.items() if t.role == "bias")
    found.graph.weights[bias][3] += 10 * float(found.plan.tensors[bias].scale.max())
    out.write_bytes(found.content)
    check = verify(found.graph, found.plan, platform, [torch.from_numpy(x[0])], path=out)
    assert any(bias in d for d in check.departures)
