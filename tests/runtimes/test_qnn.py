"""Qualcomm's QNN in its own process: what runs on the HTP, by how much it differs, and what it refuses."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import RuntimeUnavailable
from chipfit.registry import lookup

pytest.importorskip("onnxruntime_qnn")


def test_a_whole_network_runs_on_the_htp_and_differs_by_at_most_1(capfd):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*layers, nn.Linear(8, 5)).eval()
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    check = chipfit.quantize(net, data[:2], platform="ort_qnn_ep", progress=False).verify(data[2:], runtime="qnn")
    assert (check.promised, check.verdict in ("unpromised", "exact")) == (False, True)
    assert {name for name in check.executed if name.endswith("CPU")} <= {"QuantizeLinear CPU", "DequantizeLinear CPU"}
    assert check.executed["Conv HTP"] == 2
    assert max(r.op_largest for r in check.rows) <= 1
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(RuntimeUnavailable, match=r"not an ONNX model.*Where: .*m\.onnx"):
        lookup("runtime", "qnn")(tmp_path / "m.onnx")
