"""The promise for Keras networks: what is simulated is what ONNX Runtime and LiteRT compute, on every tensor."""

import pytest

keras = pytest.importorskip("keras")

import chipfit  # noqa: E402 -- after the import that may skip
from tests.build import quantized  # noqa: E402
from tests.exactness.litert_proof import prove  # noqa: E402
from tests.keras_zoo import ZOO, batch_for, make  # noqa: E402

#: operators that ONNX Runtime computes in float, before codes or an output, by network; no other may be
FLOAT_ON_ORT = {
    "arithmetic": {"Sum"},
    "attention": {"Gelu", "LayerNorm", "Mean", "SDPA"},
    "heads": set("Elu Exp Gelu HardSigmoid HardSwish Mish Selu Softplus Tanh".split()),
    "norms": {"BatchNorm", "GroupNorm", "RMSNorm", "ReduceL2"},
    "recurrent": {"LSTM"},
    "squeeze_excite": {"Tanh"},
    "unet": {"Resize"},
}
PADDED = {"concat_pools"}  #: its file has the padding in a convolution
NOT_ON_LITERT = {"recurrent"}  #: no LSTM in its files


#: what hands over floats to ONNX Runtime besides, where the cheapest islands have it so
ISLANDS = {
    "arithmetic": set(),
    "attention": set(),
    "heads": {"LeakyRelu", "Sigmoid", "Softmax", "Swish"},
    "many_in_and_out": set(),
}


@pytest.mark.parametrize(
    ("name", "results"), [*((name, None) for name in sorted(ZOO)), *((name, "codes") for name in ISLANDS)]
)
def test_every_integer_equals_onnx_runtimes(name, results):
    model, batch = make(name)
    result = quantized(model, [batch], settings=chipfit.Settings(results=results))
    floats = FLOAT_ON_ORT.get(name, set()) | (set() if results else ISLANDS.get(name, set()))
    found = result.verify([batch_for(model, seed=1)]).require(floats)
    assert found.float_ops == floats
    assert found.exact or found.float_ops
    assert set(found.not_compared) == ({"elided by the runtime"} if name in PADDED else set()) and not found.calibrated


@pytest.mark.parametrize("name", sorted(set(ZOO) - NOT_ON_LITERT))
def test_every_integer_equals_litert(name, tmp_path):
    pytest.importorskip("ai_edge_litert")
    model, batch = make(name)
    result = quantized(model, [batch], "tflite_int8")
    new = [batch_for(model, seed=1)]
    for found in prove(result.graph, result.plan, result.platform, new, tmp_path, float_ops=set()):
        assert not found.float_ops
