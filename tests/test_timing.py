"""The time of the quantized file beside the float one, and the work of each operator."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError, UnknownNameError
from chipfit.verify import timing
from tests.build import model_of


class Counted:
    """A runtime that counts its calls."""

    calls = 0

    def run(self, inputs):
        self.calls += 1
        return {}


@pytest.fixture
def result():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    return chipfit.quantize(model, [torch.randn(8, 3, 8, 8)], platform="ort_cpu", progress=False)


def test_the_work_of_operators_is_what_paper_says(result):
    found = result.time(torch.randn(4, 3, 8, 8), seconds=0)
    conv, *_, linear = found.operators
    assert (conv.op, conv.exec, conv.products) == ("Conv2D", "int", 4 * 27 * 36)
    assert conv.float_bytes == 4 * (3 * 64 + 4 * 27 + 4 + 4 * 36)  # input, weight, bias, result
    assert conv.quantized_bytes == 3 * 64 + 4 * 27 + 4 * 4 + 4 * 4 * 36  # the result stays inside the kernel
    assert linear.products == 144 * 5 and found.batch == 4


def test_files_are_called_in_turns_and_both_sizes_are_those_on_disk(result):
    found = result.time(torch.randn(4, 3, 8, 8), seconds=0)
    assert found.runtime == "onnxruntime" and found.pairs == timing.LEAST_PAIRS
    assert found.quantized_file > 0 < found.float_file and min(found.float_ms, found.quantized_ms) > 0
    assert result.report.speed["ratio"] == found.ratio and "ms quantized" in str(found)
    devices = [Counted(), Counted()]
    used, clock = timing.alternate(devices, [], 0)
    assert result.time(seconds=0).batch == 8  # the calibration data
    assert [d.calls for d in devices] == [timing.WARM_UP_CALLS + timing.LEAST_PAIRS] * 2
    assert {len(t) for t in (*used, *clock)} == {timing.LEAST_PAIRS}


def test_a_file_that_is_not_faster_is_a_warning_of_the_report(result, monkeypatch):
    monkeypatch.setattr(timing, "alternate", lambda *given: ([[1.0, 1.0], [1.5, 1.6]], [[1.0, 1.0], [2.0, 2.0]]))
    found = result.time(torch.randn(4, 3, 8, 8))
    assert found.ratio == pytest.approx(1.55) and (found.float_wall_ms, found.quantized_wall_ms) == (1, 2)
    what = "the quantized file is 1.55 times as slow as the float one on onnxruntime and this processor"
    assert found.warnings == [what] and what in result.report.warnings
    monkeypatch.setattr(timing, "alternate", lambda *given: ([[1.0], [0.5]], [[1.0], [0.5]]))
    assert result.time(torch.randn(4, 3, 8, 8)).warnings == []


def test_a_tflite_file_is_timed_on_litert():
    pytest.importorskip("ai_edge_litert")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    result = chipfit.quantize(model, [torch.randn(8, 3, 8, 8)], platform="tflite_int8", progress=False)
    assert result.time(torch.randn(1, 3, 8, 8), seconds=0).runtime == "litert"


def test_bad_input_has_typed_errors(result, tmp_path):
    for measured, data in ((result, [[]]), (chipfit.load(result.save(tmp_path / "saved")), [])):
        with pytest.raises(DataError, match="no data"):
            measured.time(*data)
    with pytest.raises(UnknownNameError, match="onnxruntimee"):
        result.time(torch.randn(4, 3, 8, 8), runtime="onnxruntimee")


def test_samples_are_counted_in_the_first_input():
    model = model_of(lambda m, x, shift: m.layer(x) + shift, layer=nn.Linear(6, 5))
    data = torch.randn(8, 6), torch.randn(1, 5)
    found = chipfit.quantize(model, [data], platform="ort_cpu", progress=False).time([data], seconds=0)
    assert found.batch == 8
