"""Fake-quantized files give the numbers of the simulation on runtimes that only compute floats."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from chipfit import errors
from chipfit.export import export
from chipfit.passes.rounded import rounded_network
from chipfit.quantizers.rounding import ROUNDINGS
from chipfit.runtimes.litert import LiteRt
from tests.build import graph_of, plan_of, quantized, randn, sequential, stored


def loaded(path):
    """Return a file as a function of an array, run by the tool that it is made for."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(path))
        return lambda x: session.run(None, {session.get_inputs()[0].name: x})[0]
    if path.suffix == ".tflite":
        return lambda x: next(iter(LiteRt(path).run([x]).values()))
    module = torch.export.load(path).module() if path.suffix == ".pt2" else torch.jit.load(str(path))
    return lambda x: module(torch.from_numpy(x)).numpy()


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish()
    return sequential(*layers, nn.Flatten(), nn.Linear(288, 5)), randn(6, 3, 8, 8)


@pytest.mark.parametrize("platform", ["imx500", "ort_cpu", "tflite_int8", "vitis_dpu", "tflite_int16x8"])
@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".pt2", ".pt"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_file_gives_the_numbers_of_the_simulation(net, platform, suffix, tmp_path):
    model, batch = net
    result = quantized(model, batch, platform)
    run = loaded(result.export(tmp_path / f"m{suffix}", format="fake"))
    x = randn(3, 3, 8, 8, seed=5)
    want = result.model(x).detach().numpy()
    # floats are added in another order, which moves few of them over a boundary
    assert np.mean(np.abs(run(x.numpy()) - want) > 1e-5) <= 0.02


def test_an_onnx_file_has_operators_of_floats_alone(net, tmp_path):
    model = onnx.load(quantized(*net, "imx500").export(tmp_path / "m.onnx", format="fake", opset=13))
    rounding = {"Div", "Round", "Clip", "Mul"}
    assert {n.op_type for n in model.graph.node} == rounding | {
        "Conv",
        "Relu",
        "HardSigmoid",
        "Reshape",
        "Gemm",
        "Identity",
    }
    assert {i.data_type for i in model.graph.initializer} <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    kernel = next(i for i in model.graph.initializer if list(i.dims) == [8, 3, 3, 3])
    assert all(len(np.unique(c)) <= 256 for c in onnx.numpy_helper.to_array(kernel))


@pytest.mark.parametrize("rule", sorted(ROUNDINGS))
def test_every_rounding_rule_is_written_exactly(rule, tmp_path):
    x = np.array([-2.5, -1.5, -0.5, -0.49999997, -1e-9, 0, 1e-9, 0.49999997, 0.5, 1.5, 2.5, 1e9], np.float32)
    grid = {"rounding": rule, "bits": 8}
    plan = plan_of(x=stored(1.0, **grid))
    graph = graph_of("y = Identity(x)", shape=(len(x),))
    run = loaded(export(graph, plan, tmp_path / "m.onnx", None, format="fake"))
    assert run(x).tolist() == plan["x"].round(torch.from_numpy(x)).tolist()


def test_a_weight_that_one_operator_reads_unrounded_is_there_twice():
    graph = graph_of("a = Linear(x, w)", "b = Linear(a, w)", weights={"w": torch.full((4, 4), 0.3)})
    out = rounded_network(graph, plan_of({"w": "weight"}, w=stored(0.25), float_edges=[("w", "a")]))
    values = [out.weights[n.inputs[1]] for n in out.nodes]
    assert [float(w[0, 0]) for w in values] == pytest.approx([0.3, 0.25])


@pytest.mark.parametrize(
    "platform, suffix, options, error, message",
    [
        ("graphcore_fp8", ".onnx", {}, errors.UnsupportedError, "is rounded.*table.*`.json`"),
        ("tflite_dynamic", ".onnx", {}, errors.UnsupportedError, "found at each call.*without `format`"),
        ("imx500", ".keras", {}, errors.UnsupportedError, "PyTorch cannot write this suffix.*Allowed: .pt2, .pt"),
        ("imx500", ".json", {}, errors.ConfigError, "Format 'fake' cannot write this suffix.*: .onnx, .tflite"),
        ("imx500", ".pt2", {"opset": 17}, errors.ConfigError, "A .pt2 file has no option `opset`.*Allowed: .onnx"),
        ("imx500", ".onnx", {"io": "int8"}, errors.ConfigError, "A 'fake' file has no option `io`"),
        ("imx500", ".onnx", {"format": "faek"}, errors.UnknownNameError, "file format.*faek.*fake"),
    ],
)
def test_what_no_file_holds_is_refused(net, platform, suffix, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        quantized(*net, platform).export(tmp_path / f"m{suffix}", **{"format": "fake", **options})
