"""Every kind of network in `.tflite`: reference kernels, optimised kernels and XNNPACK compute what was simulated."""

from __future__ import annotations

import pytest

from chipfit.errors import NothingQuantizedError, UnsupportedError
from tests.build import quantized
from tests.exactness.litert_proof import few_bits, prove
from tests.zoo import ZOO, make, unseen

#: networks of operators that TensorFlow Lite has no form for here, and one whose operators all run in float
REFUSED = {"gru": UnsupportedError, "lstm": UnsupportedError, "conv3d": NothingQuantizedError}

#: operators that LiteRT computes in float, before codes or an output, by network; no other may be
FLOAT = {
    "attention_fused": {"LayerNorm", "SDPA"},
    "attention_manual": {"LayerNorm"},
    "pixel_shuffle_norms": {"GroupNorm", "InstanceNorm"},
    "residual_elu": {"Elu"},
    "residual_hardsigmoid": {"HardSigmoid"},
    "residual_silu": {"Swish"},
    "split": {"Swish"},
}
#: likewise with activations of 16 bits, for which some kernels are missing
FLOAT_OF_16_BITS = {"inverted_residual_hardswish": {"HardSwish"}, "residual_hardswish": {"HardSwish"}}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", sorted(set(ZOO) - set(REFUSED)))
def test_every_integer_equals_that_of_each_family_of_kernels(tmp_path, name, bits):
    model, batch = make(name)
    result = quantized(model, [batch], "tflite_int8", overrides=few_bits(model, batch, bits))
    new = [unseen(batch)]
    for found in prove(result.graph, result.plan, result.platform, new, tmp_path, float_ops=FLOAT.get(name, ())):
        assert found.float_ops == FLOAT.get(name, set())
        assert found.exact  # of 8 bits not even these operators differ here


@pytest.mark.parametrize("name", sorted(set(ZOO) - set(REFUSED)))
def test_16_bit_activations_depart_only_where_operators_run_in_float(tmp_path, name):
    model, batch = make(name)
    result = quantized(model, [batch], "tflite_int16x8")
    allowed, new = FLOAT.get(name, set()) | FLOAT_OF_16_BITS.get(name, set()), [unseen(batch)]
    for found in prove(result.graph, result.plan, result.platform, new, tmp_path, float_ops=allowed):
        assert found.float_ops == allowed


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_form_is_refused_before_a_file_exists(tmp_path, name):
    model, batch = make(name)
    with pytest.raises(REFUSED[name]) as e:
        quantized(model, [batch], "tflite_int8").export(tmp_path / "m.tflite")
    assert e.value.hint
    assert not list(tmp_path.iterdir())
