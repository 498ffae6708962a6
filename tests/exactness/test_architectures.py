"""The promise: what is simulated is what ONNX Runtime computes, on every tensor of every kind of network."""

from __future__ import annotations

import pytest

import chipfit
from tests.zoo import ZOO, make, unseen

#: operators that the runtime computes in float, before codes or an output, by network; no other may be
FLOAT = {
    "attention_fused": {"Gelu", "LayerNorm", "Mean", "SDPA"},
    "attention_manual": {"Gelu", "LayerNorm", "Mean"},
    "conv1d": {"TransposeConv1D"},
    "gru": {"aten.gru.input"},
    "inverted_residual_hardswish": {"HardSwish"},
    "lstm": {"aten.lstm.input"},
    "pixel_shuffle_norms": {"GroupNorm", "InstanceNorm"},
    "residual_elu": {"Elu"},
    "residual_gelu": {"Gelu"},
    "residual_hardsigmoid": {"HardSigmoid"},
    "residual_hardswish": {"HardSwish"},
    "residual_silu": {"Swish"},
    "residual_tanh": {"Tanh"},
    "split": {"Swish"},
    "unet_bilinear": {"Resize"},
    "unet_transposed": {"TransposeConv2D"},
}


#: what hands over floats besides, where the cheapest islands have it so; with `results="codes"` nothing does
ISLANDS = {
    "attention_manual": {"MatMul", "Softmax"},
    "inverted_residual_hardswish": {"GlobalAvgPool"},
}


@pytest.mark.parametrize(
    ("name", "results"), [*((name, None) for name in sorted(ZOO)), *((name, "codes") for name in ISLANDS)]
)
def test_every_integer_equals_the_runtimes(name, results):
    model, batch = make(name)
    settings = chipfit.Settings(results=results)
    result = chipfit.quantize(model, [batch], platform="ort_cpu", settings=settings, progress=False)
    floats = FLOAT.get(name, set()) | (set() if results else ISLANDS.get(name, set()))
    found = result.verify([unseen(batch)]).require(floats)
    assert found.float_ops == floats
    assert found.exact or found.float_ops
    assert not found.not_compared and not found.calibrated
    assert all(h.elements == result.graph.weights[h.tensor].numel() for h in found.held if h.role != "activation")
