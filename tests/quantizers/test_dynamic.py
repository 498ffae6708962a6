"""Rounding to ranges of the moment, by hand and beside ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper

from chipfit.quantizers.dynamic import dynamic_codes, dynamic_quantize
from chipfit.quantizers.ops import TorchOps

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
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    outputs = [helper.make_tensor_value_info(n, t, None) for n, t in (("q", 2), ("s", 1), ("z", 2))]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", 1, [None, None])], outputs)
    opsets = [helper.make_opsetid("", 21)]
    session = onnxruntime.InferenceSession(
        helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    )
    generator = np.random.default_rng(0)
    for kind in range(60):
        x = generator.standard_normal((5, 16)).astype(np.float32) * np.float32(10.0 ** generator.integers(-4, 4))
        x = x if kind % 3 else (generator.integers(-9, 12, (5, 16)) * np.float32(0.37)).astype(np.float32)
        x = abs(x) if kind % 5 == 0 else x
        wanted = session.run(None, {"x": x})
        got = dynamic_codes(TorchOps, torch.from_numpy(x), per="tensor", **UNSIGNED)
        assert float(got[1]) == float(wanted[1]) and int(got[2]) == int(wanted[2])
        assert np.array_equal(got[0].numpy(), wanted[0])
