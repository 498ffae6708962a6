"""Qualcomm's QNN in its own process: what runs on the HTP, by how much it differs, and what it refuses."""

import pytest
import torch
from benchmarks.qnn import OPERATORS, cases, compare
from torch import nn

import chipfit
from chipfit.errors import RuntimeUnavailable
from chipfit.registry import lookup
from tests.build import model_of

pytest.importorskip("onnxruntime_qnn")


def test_a_whole_network_runs_on_the_htp_and_differs_by_at_most_1(capfd):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*layers, nn.Linear(8, 5)).eval()
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    check = chipfit.quantize(net, data[:2], platform="ort_qnn_ep", progress=False).verify(data[2:], runtime="qnn")
    assert (check.promised, check.verdict) == (False, "bounded")
    assert {name for name in check.executed if name.endswith("CPU")} <= {"QuantizeLinear CPU", "DequantizeLinear CPU"}
    assert check.executed["Conv HTP"] == 2
    assert max(r.op_largest for r in check.rows) <= 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", [*OPERATORS])
def test_an_operator_differs_by_no_more_than_is_promised(name):
    found, wrong = {}, []
    for _, network, data in cases(1, 7000, 0, [name]):
        wrong += compare(network, data, found)
    assert not wrong and sum(s.integers for s in found.values()) > 100


@pytest.mark.parametrize("first", [9000, 9100])
def test_a_random_network_differs_by_no_more_than_is_promised(first):
    found = {}
    assert [line for _, n, data in cases(0, first, 2, []) for line in compare(n, data, found)] == []
    assert len(found) > 3


def test_kernels_in_front_of_a_concatenation_saturate_on_its_grid():
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
    net = model_of(lambda m, x: torch.cat((m.a(x).relu(), m.b(x).relu()), 1), a=convs[0], b=convs[1]).eval()
    result = chipfit.quantize(net, [torch.randn(4, 3, 6, 6)], platform="ort_qnn_ep", progress=False)
    check = result.verify([5 * torch.randn(4, 3, 6, 6)], runtime="qnn")  # most of it beyond the calibrated range
    assert check.verdict in ("bounded", "exact") and max(r.op_largest for r in check.rows) <= 1


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(RuntimeUnavailable, match=r"not an ONNX model.*Where: .*m\.onnx"):
        lookup("runtime", "qnn")(tmp_path / "m.onnx")
