"""Random networks in `.tflite`: 8- and 4-bit weights, plain scales and powers of two, on three families of kernels."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import chipfit
from tests.exactness.litert_proof import few_bits, prove
from tests.exactness.test_random_networks import STEPS, Drawn, power_of_two_scales, with_biases


@pytest.mark.parametrize("part", range(20))  # 240 networks in parts, so that workers share them
def test_no_integer_of_a_random_network_differs_from_litert(tmp_path_factory, part):
    @hypothesis.seed(part)
    @settings(
        max_examples=12, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(
        st.sampled_from([1, 2, 3, 4]),
        st.sampled_from([4, 5, 8]),
        STEPS,
        st.integers(0, 999),
        st.booleans(),
        st.sampled_from([8, 4]),
    )
    def drawn(channels, side, steps, seed, ties, bits):
        torch.manual_seed(seed)
        model, x = Drawn(channels, side, steps).eval(), torch.randn(3, channels, side, side)
        rule, overrides = ("mse", "no_clipping")[seed % 2], few_bits(model, x, bits)
        result = chipfit.quantize(model, [x], platform="tflite_int8", rule=rule, overrides=overrides, progress=False)
        plan = with_biases(result.graph, power_of_two_scales(result.plan)) if ties else result.plan
        for found in prove(result.graph, plan, result.platform, [x], tmp_path_factory.mktemp("net")):
            assert found.exact, found.summary()

    drawn()


@pytest.mark.parametrize("part", range(4))
def test_no_integer_of_16_bit_activations_differs_either(tmp_path_factory, part):
    @hypothesis.seed(part)
    @settings(
        max_examples=12, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([4, 5, 8]), STEPS, st.integers(0, 999))
    def drawn(channels, side, steps, seed):
        torch.manual_seed(seed)
        model, x = Drawn(channels, side, steps).eval(), torch.randn(3, channels, side, side)
        result = chipfit.quantize(model, [x], platform="tflite_int16x8", progress=False)
        for found in prove(result.graph, result.plan, result.platform, [x], tmp_path_factory.mktemp("net")):
            assert found.exact, found.summary()

    drawn()
