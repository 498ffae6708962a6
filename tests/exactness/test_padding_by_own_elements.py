"""Padding that wraps around, as on panoramas and rings, or repeats the ends, runs in integers on all runtimes."""

import pytest
import torch
from torch import nn

from tests.build import quantized, sequential

NETWORKS = {
    "a ring": (sequential(nn.Conv1d(4, 8, 5, padding=2, padding_mode="circular"), nn.ReLU()), (2, 4, 12)),
    "a torus": (sequential(nn.CircularPad2d(1), nn.Conv2d(3, 8, 3), nn.ReLU()), (2, 3, 9, 12)),
    "repeated ends": (sequential(nn.ReplicationPad2d((2, 1, 1, 0)), nn.Conv2d(3, 8, 3), nn.ReLU()), (2, 3, 9, 12)),
    "a panorama": (sequential(nn.CircularPad2d((1, 1, 0, 0)), nn.Conv2d(3, 8, 3), nn.ReLU()), (2, 3, 9, 12)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "platform, file", [("ort_cpu", "m.onnx"), ("tflite_int8", "m.tflite"), ("tflm_cmsis_nn", "m.tflite")]
)
def test_padding_by_own_elements_stays_in_integers(name, platform, file, tmp_path):
    model, shape = NETWORKS[name]
    data = [torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    result = quantized(model, data[:2], platform)
    assert all(result.plan.nodes[n.name].exec != "float" for n in result.graph.nodes)
    path = result.export(tmp_path / file)
    assert result.verify(data[2:], path=path).exact
    assert (result.model(data[2]) - model(data[2])).abs().max() < 0.05
