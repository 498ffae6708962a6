"""Files of a chip with float biases and unsigned results, in integers that LiteRT and ONNX Runtime compute with."""

import numpy as np
import pytest
import torch
from torch import nn

from chipfit.export.int8 import with_integer_biases, with_signed_results
from chipfit.runtimes.litert import LiteRt
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.build import graph_of, plan_of, precise_session, quantized, randn, sequential, stored

RUNTIMES = {".onnx": OnnxRuntime, ".tflite": LiteRt}
KERNELS = {".onnx": {"QLinearConv": 2, "QGemm": 1}, ".tflite": {"XNNPACK CONV_2D": 1, "XNNPACK DEPTHWISE_CONV_2D": 1}}


@pytest.mark.parametrize("suffix", RUNTIMES)
def test_layers_run_in_integers_and_give_the_numbers_of_the_simulation(suffix, tmp_path):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6()
    model, batch = sequential(*layers, nn.Flatten(), nn.Linear(128, 5)), randn(6, 3, 8, 8)
    result = quantized(model, batch, "imx500")
    file = result.export(tmp_path / f"m{suffix}", format="int8")
    device = RUNTIMES[suffix](file)
    assert {k: n for k, n in device.executed().items() if k in KERNELS[suffix]} == KERNELS[suffix]
    (got, *_), want = device.run([batch.numpy()]).values(), result.model(batch).detach().numpy()
    if suffix == ".onnx":
        (got,) = precise_session(file).run(None, {device.inputs[0]: batch.numpy()})
    steps = np.abs(got - want) / float(result.plan[result.graph.outputs[0]].scale)
    assert steps.max() <= 1.01 and np.mean(steps > 0.5) < 0.1, "a rounded bias moves a sum by half of its step"


def test_an_unsigned_result_keeps_its_numbers():
    plan = plan_of(x=stored(0.5, signed=False), y=stored(0.5, signed=False, bits=4), z=stored(0.5))
    now, x = with_signed_results(plan), torch.tensor([-1.0, 0.0, 0.26, 127.5, 200.0])
    assert (now["x"].grid.qmin, now["x"].grid.qmax, int(now["x"].zero_point)) == (-128, 127, -128)
    assert torch.equal(now["x"].round(x), plan["x"].round(x))
    assert now["y"] is plan["y"] and now["z"] is plan["z"]


def test_a_bias_has_the_scale_of_the_sums_it_is_added_to():
    weights = {"w": torch.ones(4, 4), "b": torch.ones(4), "c": torch.ones(4)}
    graph = graph_of("y = Linear(x, w, b)", "z = Linear(y, w, c)", "v = Linear(x, w, c)", weights=weights)
    plan = plan_of(x=stored(0.5), w=stored([0.1, 0.2, 0.3, 0.4], axis=0), b=None, c=None)
    now = with_integer_biases(graph, plan)
    np.testing.assert_allclose(now["b"].scale.numpy(), [0.05, 0.1, 0.15, 0.2])
    assert now.tensors["b"].role == "bias" and not now.quantized("c"), "two layers share it"
