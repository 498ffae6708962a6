"""TensorFlow Lite Micro in its own process: what it refuses, and the sizes of its files."""

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import RuntimeUnavailable
from chipfit.registry import lookup
from tests.build import model_of, quantized, sequential

pytest.importorskip("tflite_micro")


def test_sizes_of_a_file_are_fixed(tmp_path):
    net = sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    path = quantized(net, [torch.randn(8, 3, 6, 6)], "tflite_int8").export(tmp_path / "net.tflite")
    device = lookup("runtime", "tflm")(path)
    (y,) = device.run([np.zeros((5, 3, 6, 6), np.float32)]).values()
    assert y.shape[0] == 5 and device.part == 1  # sample by sample
    with pytest.raises(RuntimeUnavailable, match="does not fit the file"):
        device.run([np.zeros((5, 3, 7, 6), np.float32)])


def test_more_operands_than_it_concatenates_are_concatenated_in_parts(tmp_path):
    def forward(m, x):
        parts = [x[:, k : k + 2] for k in range(23)]
        return m.linear(torch.cat(parts[::-1], 1))

    data = [torch.randn(8, 46) for _ in range(2)]
    result = quantized(model_of(forward, linear=nn.Linear(46, 5)), data, "tflm_cmsis_nn")
    found = result.verify(data)
    assert found.exact and found.executed["CONCATENATION"] == 4  # 10, 10 and 3 of them, and these


def test_a_file_that_is_not_one_is_refused(tmp_path):
    (tmp_path / "bad.tflite").write_bytes(b"not a network at all")
    with pytest.raises(RuntimeUnavailable, match="identifier TFL3 is missing"):
        lookup("runtime", "tflm")(tmp_path / "bad.tflite")


def test_a_network_is_verified_integer_by_integer():
    torch.manual_seed(0)
    net = sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(72, 10), nn.Sigmoid()
    )
    data = [torch.randn(8, 3, 10, 10) for _ in range(2)]
    found = chipfit.quantize(net, data, platform="tflite_int8", progress=False).verify(data, runtime="tflm")
    assert found.exact and len(found.compared) == len(found.rows), found.summary()
    assert dict(found.executed)["FULLY_CONNECTED"] == 1
