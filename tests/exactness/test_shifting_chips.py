"""Chips that requantize by shifts: what they compute is simulated, and other runtimes are told apart from them."""

import onnxruntime
import pytest
import torch
from torch import nn

from chipfit.verify.comparisons import TensorComparison
from chipfit.verify.verification import Verification
from tests.build import quantized, sequential

DATA = [torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(k)) for k in range(3)]


def network():
    torch.manual_seed(0)
    return sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


@pytest.mark.parametrize("platform", ["vitis_dpu", "esp_dl"])
def test_the_simulation_of_a_shifting_chip_is_as_near_to_float_as_the_trainable_model(platform, tmp_path):
    """Biases of `vitis_dpu` have 8 bits and a scale of their own, which accumulators are not in."""
    model = network()
    result, want = quantized(model, DATA[:2], platform), model(DATA[2])
    with pytest.warns(UserWarning, match="No runtime proves"):
        device = result.device_model
    assert (device(DATA[2]) - want).norm() < 1.2 * (result.model(DATA[2]) - want).norm()


def test_a_runtime_reads_a_narrow_bias_at_its_own_scale(tmp_path):
    model = network()
    result, want = quantized(model, DATA[:2], "vitis_dpu"), model(DATA[2])
    session = onnxruntime.InferenceSession(str(result.export(tmp_path / "m.onnx")))
    (got,) = session.run(None, {session.get_inputs()[0].name: DATA[2].numpy()})
    assert (torch.from_numpy(got) - want).norm() < 1.2 * (result.model(DATA[2]) - want).norm()


def test_other_rounding_is_told_from_a_departure():
    row = TensorComparison(
        "y", "fc", "Linear", elements=100, differing=3, largest=1, op_differing=3, op_largest=1, end_to_end_elements=100
    )
    other = Verification("onnxruntime", promised=False, rows=[row], other_rule=True)
    assert (
        other.verdict == "unpromised" and "the runtime rounds otherwise than this chip: Linear 'fc'" in other.summary()
    )
    row.op_largest = 2
    assert "departs: Linear 'fc'" in other.summary()
    row.op_largest = 1
    assert "departs: Linear 'fc'" in Verification("onnxruntime", promised=True, rows=[row]).summary()
