"""The promise: what is simulated is what ONNX Runtime computes, on every tensor of every kind of network."""

from __future__ import annotations

import pytest

import chipfit
from tests.zoo import ZOO, make

#: networks in which the runtime computes an operator in float that feeds integers: one unit per operator is allowed
FLOATS = {"attention_fused", "attention_manual"}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_integer_equals_the_runtimes(name):
    model, batch = make(name)
    result = chipfit.quantize(model, [batch], platform="ort_cpu", progress=False)
    found = result.verify([batch])
    assert found.integers > 0
    assert found.sound, found.summary()
    if not found.float_operators:
        assert found.exact, found.summary()
