"""Files of float networks compute what torch computes, at another batch size than that of the example."""

import numpy as np
import pytest
import torch

from chipfit.engine.run import run
from chipfit.engine.trees import flatten_inputs
from chipfit.export.onnx.writer import export_onnx
from chipfit.export.tflite.writer import export_tflite
from chipfit.frameworks.torch.capture import capture
from chipfit.runtimes.litert import LiteRt
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.zoo import ZOO, make

FILES = {
    "onnx": (OnnxRuntime, export_onnx, {}, set()),
    "tflite": (LiteRt, export_tflite, {}, {"gru", "lstm", "in_place_index"}),
    "tflite_in_the_models_layout": (LiteRt, export_tflite, {"keep_layout": True}, {"gru", "lstm", "in_place_index"}),
}
CASES = [(name, file) for file, (*_, without_form) in FILES.items() for name in sorted(set(ZOO) - without_form)]


@pytest.mark.parametrize("name, file", CASES)
def test_a_network_of_any_kind_is_computed(name, file, tmp_path):
    runtime, export, options, _ = FILES[file]
    model, batch = make(name)
    batch = batch if isinstance(batch, tuple) else (batch,)
    graph = capture(model, batch)
    path = export(graph, None, tmp_path / f"m.{file[:6]}", **options)
    flat = [torch.cat([x, x[:1]]) for x in flatten_inputs(graph, batch)]
    with torch.no_grad():
        want = run(graph, flat)
    got = runtime(path).run([x.numpy() for x in flat])
    for value, y in zip(graph.outputs, got.values(), strict=True):
        np.testing.assert_allclose(y, want[value].numpy(), atol=2e-5, rtol=1e-4)
