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
    "gru": {"aten.gru.input", "aten.zeros.default"},
    "in_place_index": {
        "aten.copy.default",
        "aten.fill.Tensor",
        "aten.select_scatter.default",
        "aten.slice_scatter.default",
    },
    "inverted_residual_hardswish": {"HardSwish"},
    "lstm": {"aten.lstm.input", "aten.zeros.default"},
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


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_integer_equals_the_runtimes(name):
    model, batch = make(name)
    result = chipfit.quantize(model, [batch], platform="ort_cpu", progress=False)
    found = result.verify([unseen(batch)]).require(FLOAT.get(name, ()))
    assert found.float_ops == FLOAT.get(name, set())
    assert found.exact or found.float_ops
    assert not found.not_compared and not found.calibrated
    assert all(h.elements == result.graph.weights[h.tensor].numel() for h in found.held if h.role != "activation")
