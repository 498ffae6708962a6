"""Scales that the file format dictates are those of the plan, on every chip that reads such files."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import ExportError
from chipfit.files import write_atomically
from chipfit.runtimes import write_opened

pytest.importorskip("ai_edge_litert")

from ai_edge_litert.interpreter import Interpreter, OpResolverType

from tests.onnx_models import onnx_of

#: activation -> scale and zero point of an int8 result, from the quantization specification of LiteRT
SPECIFIED = {
    nn.Softmax(1): (1 / 256, -128),
    nn.Sigmoid(): (1 / 256, -128),
    nn.Tanh(): (1 / 128, 0),
    nn.LogSoftmax(1): (16 / 256, 127),
}
DATA = [torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(k)) for k in range(4)]


def network(act):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), act, nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(32, 3)
    return nn.Sequential(*layers).eval()


def opened(path):
    kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(str(path), experimental_op_resolver_type=kernels)
    interpreter.allocate_tensors()
    return interpreter


def outputs(interpreter, data):
    """Results of a file whose inputs and outputs are floats, sample by sample."""
    (given,), (taken,) = interpreter.get_input_details(), interpreter.get_output_details()
    rows = []
    for x in data:
        interpreter.set_tensor(given["index"], x[None].numpy())
        interpreter.invoke()
        rows.append(interpreter.get_tensor(taken["index"]))
    return np.concatenate(rows)


@pytest.mark.parametrize("act", SPECIFIED, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("platform", ["st_edge_ai", "st_neural_art", "nxp_neutron", "tflite_int8"])
def test_a_platform_without_a_rule_for_it_takes_the_scale_of_the_file(platform, act, tmp_path):
    result = chipfit.quantize(network(act), DATA, platform, progress=False)
    path = result.export(tmp_path / "model.tflite", batch=1, keep_layout=True)
    interpreter = opened(path)
    made = {d["index"]: d["quantization"] for d in interpreter.get_tensor_details()}
    ops = {op["op_name"]: (made[op["inputs"][0]], made[op["outputs"][0]]) for op in interpreter._get_ops_details()}
    (found,) = (ops[n][1] for n in ("SOFTMAX", "LOGISTIC", "TANH", "LOG_SOFTMAX") if n in ops)
    in_float = platform == "nxp_neutron" and isinstance(act, nn.LogSoftmax)  # the chip does not list it
    assert found == ((0.0, 0) if in_float else SPECIFIED[act])
    assert in_float or SPECIFIED[act] in {
        (float(t.scale), int(t.zero_point))
        for t in result.plan.tensors.values()
        if t.quantized and t.scale.numel() == 1
    }
    assert ops["MAX_POOL_2D"][0] == ops["MAX_POOL_2D"][1] != (0.0, 0)
    simulated = result.model(DATA[0]).detach().numpy()
    assert np.abs(outputs(interpreter, DATA[0]) - simulated).max() < 0.05 * np.abs(simulated).max()


def test_where_the_chip_has_another_scale_the_operator_stands_between_floats(tmp_path):
    """ESP-DL's scales are powers of two without zero points: no sigmoid of the file has them."""
    result = chipfit.quantize(network(nn.Sigmoid()), DATA, "esp_dl", progress=False)
    interpreter = opened(result.export(tmp_path / "model.tflite", batch=1, keep_layout=True))
    names = [op["op_name"] for op in interpreter._get_ops_details()]
    at = names.index("LOGISTIC")
    assert names[at - 1 : at + 2] == ["DEQUANTIZE", "LOGISTIC", "QUANTIZE"]
    simulated = result.model(DATA[0]).detach().numpy()
    assert np.abs(outputs(interpreter, DATA[0]) - simulated).max() < 0.05 * np.abs(simulated).max()


# ---------------------------------------------------------------- a file is opened once before it is given away


def test_a_file_that_its_runtime_refuses_is_an_error_and_is_not_left_behind(tmp_path):
    path = tmp_path / "new" / "model.tflite"
    with pytest.raises(ExportError, match="not written: LiteRT refuses the file.*Where: .*model.tflite"):
        write_opened(lambda p: write_atomically(p, b"no network"), path, ["litert"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, runtime", [("a.onnx", "onnxruntime"), ("a.onnx", "openvino"), ("a.tflite", "litert")])
def test_an_older_file_outlives_one_that_its_runtime_refuses(name, runtime, tmp_path):
    pytest.importorskip("openvino" if runtime == "openvino" else "onnx")
    path = tmp_path / name
    path.write_bytes(b"of last week")
    with pytest.raises(ExportError, match="not written"):
        write_opened(lambda p: write_atomically(p, b"no network"), path, [runtime])
    assert path.read_bytes() == b"of last week" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("platform", ["tflite_int8", "litert_ai_edge", "tflm_cmsis_nn"])
def test_a_hard_swish_of_mostly_negative_numbers_has_a_scale_that_its_kernel_takes(tmp_path, platform):
    """The kernel refuses an input scale of 128 or more times the result's."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 8)
    with torch.no_grad():
        layer.weight.mul_(40)
        layer.bias.fill_(-200)
    data = [torch.rand(64, 4) for _ in range(2)]
    result = chipfit.quantize(nn.Sequential(layer, nn.Hardswish(), nn.Linear(8, 2)), data, platform, progress=False)
    opened(result.export(tmp_path / "net.tflite"))
    assert any(n.op == "HardSwish" for n in result.graph.nodes) and result.verify(data).exact


def test_files_that_belong_to_a_file_come_with_it(tmp_path):
    def write(path):
        write_atomically(path.with_name("weights.bin"), np.float32(3).tobytes())
        where = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, data_location=onnx.TensorProto.EXTERNAL)
        where.external_data.add(key="location", value="weights.bin")
        model = onnx_of("y = Add(x, w)", inputs={"x": []}, outputs={"y": []}, constants={"w": where}, opset=18)
        return write_atomically(path, model.SerializeToString())

    path = write_opened(write, tmp_path / "a.onnx", ["onnxruntime"])
    session = onnxruntime.InferenceSession(path)
    assert session.run(None, {"x": np.array(2, np.float32)}) == [5]


def test_a_file_without_a_runtime_here_is_written_all_the_same(tmp_path):
    path = tmp_path / "a.onnx"
    write_opened(lambda p: write_atomically(p, b"for another chip"), path, [])
    assert path.read_bytes() == b"for another chip"
