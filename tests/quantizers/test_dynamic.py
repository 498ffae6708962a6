"""Rounding to ranges of the moment, by hand and beside ONNX Runtime."""

import numpy as np
import onnxruntime
import pytest
import torch

from chipfit.quantizers.dynamic import dynamic_codes, dynamic_quantize
from chipfit.quantizers.ops import TorchOps
from tests.onnx_models import onnx_of

UNSIGNED = {"qmin": 0, "qmax": 255, "affine": True, "block": 1}
SIGNED = {"qmin": -127, "qmax": 127, "affine": False, "block": 1}


def test_a_range_holds_zero_and_is_found_for_what_shares_it():
    x = torch.tensor([[1.0, 3.0], [-2.0, 3.1]])
    q, s, z = dynamic_codes(TorchOps, x, per="tensor", **UNSIGNED)
    assert float(s) == pytest.approx(5.1 / 255) and float(z) == 100 and q.tolist() == [[150, 250], [0, 255]]
    q, s, z = dynamic_codes(TorchOps, x, per="row", **UNSIGNED)
    assert s[:, 0].tolist() == pytest.approx([3 / 255, 5.1 / 255]) and z[:, 0].tolist() == [0, 100]
    q, s, z = dynamic_codes(TorchOps, x, per="row", **SIGNED)
    assert s[:, 0].tolist() == pytest.approx([3 / 127, 3.1 / 127]) and q.tolist() == [[42, 127], [-82, 127]]


def test_blocks_of_a_row_have_a_range_each():
    q, s, _ = dynamic_codes(TorchOps, torch.tensor([[1.0, -2.0, 0.5, 0.25]]), per="block", **{**SIGNED, "block": 2})
    assert s.tolist() == [pytest.approx([2 / 127, 2 / 127, 0.5 / 127, 0.5 / 127])]
    assert q.tolist() == [[64, -127, 127, 64]]  # 63.5 to the even one


@pytest.mark.parametrize("how", [UNSIGNED, SIGNED])
def test_zeros_stay_zeros(how):
    assert dynamic_quantize(TorchOps, torch.zeros(2, 3), per="row", **how).tolist() == [[0] * 3] * 2


def test_the_gradient_is_that_of_a_value_which_is_not_rounded():
    x = torch.randn(3, 4, requires_grad=True)
    (dynamic_quantize(TorchOps, x, per="tensor", **UNSIGNED) * torch.arange(4.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(4.0).expand(3, 4))


def test_codes_are_those_of_onnx_runtime():
    ends = {"inputs": {"x": [None, None]}, "outputs": "qsz", "types": {"q": 2, "z": 2}}
    model = onnx_of("q, s, z = DynamicQuantizeLinear(x)", **ends, opset=21)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    generator = np.random.default_rng(0)
    for kind in range(60):
        x = generator.standard_normal((5, 16)).astype(np.float32) * np.float32(10.0 ** generator.integers(-4, 4))
        x = x if kind % 3 else (generator.integers(-9, 12, (5, 16)) * np.float32(0.37)).astype(np.float32)
        x = abs(x) if kind % 5 == 0 else x
        wanted = session.run(None, {"x": x})
        got = dynamic_codes(TorchOps, torch.from_numpy(x), per="tensor", **UNSIGNED)
        assert float(got[1]) == float(wanted[1]) and int(got[2]) == int(wanted[2])
        assert np.array_equal(got[0].numpy(), wanted[0])


@pytest.mark.parametrize("qmin, qmax", [(0, 255), (-128, 127), (-8, 7)])
@pytest.mark.parametrize("per", ["tensor", "row", "block"])
@pytest.mark.parametrize("affine", [True, False])
def test_codes_of_three_axes_are_those_on_paper(per, affine, qmin, qmax):
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32) * np.float32([[[1], [9], [0.1]]])
    x[0, 1] = 0  # a row without values
    x[1, 0] = abs(x[1, 0])
    block = 4
    how = {"qmin": qmin, "qmax": qmax, "affine": affine, "per": per, "block": block}
    q, s, z = (p.numpy() for p in dynamic_codes(TorchOps, torch.from_numpy(x), **how))
    parts = x.reshape(2, 3, 2, block) if per == "block" else x
    axes = (0, 1, 2) if per == "tensor" else -1
    low, high = parts.min(axes, keepdims=True), parts.max(axes, keepdims=True)
    if affine:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        step = np.where(high > low, (high - low) / np.float32(qmax - qmin), 1)
        zero = np.clip(np.rint(qmin - low / step), qmin, qmax)
        codes = np.clip(np.rint(parts / step) + zero, qmin, qmax)
    else:
        top = np.maximum(high, -low)
        step, zero = np.where(top > 0, top / np.float32(qmax), 1), np.zeros_like(top)
        codes = np.clip(np.rint(parts * np.where(top > 0, np.float32(qmax) / np.where(top > 0, top, 1), 1)), qmin, qmax)
    np.testing.assert_array_equal(q, codes.reshape(x.shape))
    for got, want in ((s, step), (z, zero)):
        want = np.broadcast_to(want, parts.shape).reshape(x.shape)
        np.testing.assert_allclose(np.broadcast_to(got, x.shape), want, rtol=1e-6)
    assert s.shape == (x.shape if per == "block" else low.shape)
