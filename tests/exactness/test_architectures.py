"""The promise: what is simulated is what the runtimes compute, on every tensor of every kind of network."""

import pytest

import chipfit
from chipfit.errors import NothingQuantizedError
from tests.build import quantized
from tests.exactness.litert_proof import few_bits, prove
from tests.zoo import ZOO, make, unseen

#: operators that ONNX Runtime computes in float, before codes or an output, by network; no other may be
FLOAT = {
    "attention_fused": {"Gelu", "LayerNorm", "Mean", "SDPA"},
    "attention_manual": {"Gelu", "LayerNorm", "Mean"},
    "conv1d": {"TransposeConv1D"},
    "gru": {"GRU"},
    "inverted_residual_hardswish": {"HardSwish"},
    "lstm": {"LSTM"},
    "pixel_shuffle_norms": {"GroupNorm", "InstanceNorm"},
    "residual_elu": {"Elu"},
    "residual_gelu": {"Gelu"},
    "residual_hardsigmoid": {"HardSigmoid"},
    "residual_hardswish": {"HardSwish"},
    "residual_tanh": {"Tanh"},
    "unet_bilinear": {"Resize"},
}


#: networks with padding that the file has in its convolutions
PADDED = {"padding_modes", "shapes"}

#: what hands over floats besides, where the cheapest islands have it so; with `results="codes"` nothing does
ISLANDS = {"inverted_residual_hardswish": {"GlobalAvgPool"}}


@pytest.mark.parametrize(
    ("name", "results"), [*((name, None) for name in sorted(ZOO)), *((name, "codes") for name in ISLANDS)]
)
def test_every_integer_equals_the_runtimes(name, results):
    model, batch = make(name)
    result = quantized(model, [batch], settings=chipfit.Settings(results=results))
    floats = FLOAT.get(name, set()) | (set() if results else ISLANDS.get(name, set()))
    found = result.verify([unseen(batch)]).require(floats)
    assert found.float_ops == floats
    assert found.exact or found.float_ops
    assert set(found.not_compared) == ({"elided by the runtime"} if name in PADDED else set()) and not found.calibrated
    assert all(h.elements == result.graph.weights[h.tensor].numel() for h in found.held if h.role != "activation")


# ---------------------------------------------------------------- LiteRT

#: a network whose operators all run in float
WITHOUT_FORM = {"conv3d": NothingQuantizedError}

#: the same of LiteRT
ON_LITERT = {"pixel_shuffle_norms": {"GroupNorm", "InstanceNorm"}}
#: likewise with activations of 16 bits, for which some kernels are missing
ON_LITERT_OF_16_BITS = {"attention_fused": {"LayerNorm"}, "attention_manual": {"LayerNorm"}}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", sorted(set(ZOO) - set(WITHOUT_FORM)))
def test_every_integer_equals_that_of_each_family_of_kernels(tmp_path, name, bits):
    model, batch = make(name)
    result = quantized(model, [batch], "tflite_int8", overrides=few_bits(model, batch, bits))
    new = [unseen(batch)]
    for found in prove(result.graph, result.plan, result.platform, new, tmp_path, float_ops=ON_LITERT.get(name, ())):
        assert found.float_ops == ON_LITERT.get(name, set())
        assert found.exact  # of 8 bits not even these operators differ here


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", sorted(set(ZOO) - set(WITHOUT_FORM)))
def test_16_bit_activations_depart_only_where_operators_run_in_float(tmp_path, name):
    model, batch = make(name)
    result = quantized(model, [batch], "tflite_int16x8")
    allowed, new = ON_LITERT.get(name, set()) | ON_LITERT_OF_16_BITS.get(name, set()), [unseen(batch)]
    for found in prove(result.graph, result.plan, result.platform, new, tmp_path, float_ops=allowed):
        assert found.float_ops == allowed


@pytest.mark.parametrize("name", sorted(WITHOUT_FORM))
def test_what_has_no_form_is_refused_before_a_file_exists(tmp_path, name):
    model, batch = make(name)
    with pytest.raises(WITHOUT_FORM[name]) as e:
        quantized(model, [batch], "tflite_int8").export(tmp_path / "m.tflite")
    assert e.value.hint
    assert not list(tmp_path.iterdir())
