"""Configurations of trainable quantizers: the grids that they describe, their errors, and their data."""

import numpy as np
import pytest
import torch

from chipfit.constants import LUT_VALUES, RANGE_MAX, RANGE_MIN, SIGNED, THRESHOLD
from chipfit.errors import ConfigError, UnknownNameError
from chipfit.mct.trainable.configs import config_of, stored_of
from chipfit.target_platform_capabilities.target_platform import QuantizationMethod
from chipfit.trainable_infrastructure import TrainableQuantizerCandidateConfig, TrainableQuantizerWeightsConfig
from chipfit.trainable_infrastructure import pytorch_inferable_quantizers as iq
from tests.mct.trainable.quantizers_of_a_user import activation, weights

TABLE = {THRESHOLD: 2.0, LUT_VALUES: [-1.0, 1.0]}


def candidates(bits, threshold=1.0):
    return [TrainableQuantizerCandidateConfig(bits, {THRESHOLD: threshold})]


def test_a_scalar_threshold_applies_to_every_channel():
    stored = stored_of(weights(), (3, 3, 2, 5))
    assert stored.axis == 3 and torch.equal(stored.scale, torch.full((5,), 2 / 128))


@pytest.mark.parametrize(("signed", "low"), [(None, -2.0), (True, -2.0), (False, 0.0)])
def test_a_uniform_grid_from_a_threshold(signed, low):
    params = {THRESHOLD: 2.0} if signed is None else {THRESHOLD: 2.0, SIGNED: signed}
    stored = stored_of(activation(bits=2, params=params))
    q = iq.inferable_for(stored, "activation")
    step = (2 - low) / 3
    assert stored.scale.item() == pytest.approx(step)
    assert q.min_range == pytest.approx(round(low / step) * step, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: weights(params={THRESHOLD: -1.0}), ConfigError, "not positive"),
        (lambda: weights(params={THRESHOLD: np.array([1.0, 0.0])}), ConfigError, "not positive"),
        (lambda: weights(QuantizationMethod.LUT_POT_QUANTIZER, 9, TABLE), ConfigError, "at most 8 bits"),
        (lambda: weights(QuantizationMethod.LUT_POT_QUANTIZER, 4), ConfigError, "lack 'lut_values'"),
        (lambda: weights(axis=None), ConfigError, "weights_channels_axis"),
        (lambda: stored_of(weights(axis=3), (5, 2)), ConfigError, "weights_channels_axis.*axis 3 of shape .5, 2"),
        (lambda: weights(method="SYMMETRIC"), ConfigError, "weights_quantization_method"),
        (lambda: weights(bits=0), ConfigError, "weights_n_bits"),
        (lambda: weights(bits=1), ConfigError, "2 to 16 bits"),
        (lambda: weights(bits=17), ConfigError, "2 to 16 bits"),
        (lambda: weights(QuantizationMethod.UNIFORM, 17), ConfigError, "1 to 16 bits"),
        (lambda: weights(weights_candidates=None), UnknownNameError, "weights_quantization_candidates"),
        (lambda: activation(params={THRESHOLD: [1.0, 2.0]}), ConfigError, "do not fit"),
        (lambda: activation(params={RANGE_MIN: 1.0, RANGE_MAX: 0.0}), ConfigError, "range is empty"),
        (lambda: activation(params={THRESHOLD: "two"}), ConfigError, "'threshold' .* must be numeric.*'two'"),
        (lambda: weights(weights_quantization_candidates=candidates(17)), ConfigError, "2 to 16 bits"),
        (lambda: weights(weights_quantization_candidates=candidates(4, -1.0)), ConfigError, "not positive"),
        (lambda: stored_of(weights(params={}), (1, 1, 1, 2)), ConfigError, "lack 'threshold'"),
        (lambda: stored_of(weights(params={THRESHOLD: [1.0] * 3}), (1, 1, 1, 2)), ConfigError, "do not fit"),
    ],
)
def test_invalid_configurations_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_a_configuration_is_restored_from_its_data():
    other = [TrainableQuantizerCandidateConfig(4, {THRESHOLD: np.array([1.0, 2.0], "float32")})]
    config = weights(params={THRESHOLD: np.array([[1.0, 3.0]], "float32")}, weights_quantization_candidates=other)
    again = TrainableQuantizerWeightsConfig.from_config(config.get_config())
    assert again.get_config() == config.get_config()
    assert again.weights_quantization_method is QuantizationMethod.SYMMETRIC
    assert again.weights_quantization_params[THRESHOLD].tolist() == [[1.0, 3.0]]
    assert again.weights_quantization_candidates[0].n_bits == 4


@pytest.mark.parametrize("role", ["weight", "activation"])
@pytest.mark.parametrize("kind", ["Symmetric", "POT", "Uniform"])
def test_a_stored_tensor_is_restored_from_its_configuration(role, kind):
    how = {"min_range": [-1.5], "max_range": [2.25]} if kind == "Uniform" else {"threshold": [2.0]}
    name = f"{role.capitalize()}{'s' * (role == 'weight')}{kind}InferableQuantizer"
    if role == "weight":
        how |= {"per_channel": False}
    elif kind != "Uniform":
        how |= {"signed": True}
    stored = iq.CLASSES[name](num_bits=5, **how).stored
    again = stored_of(config_of(stored, role, 4), (1, 1, 1, 1))
    assert again.grid == stored.grid and torch.equal(again.scale, stored.scale)
    assert torch.equal(again.zero_point, stored.zero_point)
