"""The promise for Keras networks: what is simulated is what ONNX Runtime and LiteRT compute, on every tensor."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

import chipfit  # noqa: E402 -- after the import that may skip
from tests.exactness.litert_proof import prove  # noqa: E402
from tests.keras_zoo import ZOO, make  # noqa: E402

#: ONNX Runtime resizes and convolves transposed in float, between codes: one unit per operator is allowed
FLOATS = {"unet"}
#: nothing that ort_cpu runs in integers; no LSTM in the files of LiteRT
NOT_ON_ORT, NOT_ON_LITERT = {"transposed"}, {"recurrent"}


@pytest.mark.parametrize("name", sorted(set(ZOO) - NOT_ON_ORT))
def test_every_integer_equals_onnx_runtimes(name):
    model, batch = make(name)
    found = chipfit.quantize(model, [batch], platform="ort_cpu", progress=False).verify([batch])
    assert found.integers > 0 and found.sound, found.summary()
    assert found.exact or name in FLOATS, found.summary()


@pytest.mark.parametrize("name", sorted(set(ZOO) - NOT_ON_LITERT))
def test_every_integer_equals_litert(name, tmp_path):
    pytest.importorskip("ai_edge_litert")
    model, batch = make(name)
    result = chipfit.quantize(model, [batch], platform="tflite_int8", progress=False)
    prove(result.graph, result.plan, result.platform, [batch], tmp_path)
