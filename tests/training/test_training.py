"""Quantization-aware training from a plan to a plan: what was trained is what the device computes."""

import pytest
import torch

from chipfit.errors import ConfigError, TrainingError, UnknownNameError, UnsupportedError
from chipfit.plan.training import Training
from chipfit.quantizers.algorithms.lsq import LSQ
from tests.build import platform_of, quantized
from tests.training.small import DATA, Net, train


@pytest.fixture(scope="module")
def plain():
    return quantized(Net(), DATA)


def test_scales_train_only_where_it_was_asked(plain):
    def trained(training):
        return {n for n, p in plain.trains(training).model.named_parameters() if p.requires_grad and "quant." in n}

    everything, weights = trained("lsq"), trained({"weights": "lsq"})
    assert {n for n in everything if "weight" in n} == weights != everything
    assert trained(Training(only={"head": "lsq"})) == {n for n in everything if "head" in n or "linear" in n}
    assert trained(LSQ()) == everything
    assert trained({"method": "lsq", "activations": ""}) == weights
    assert trained({"method": "lsq", "only": {"head": None}}) == everything - trained(Training(only={"head": "lsq"}))
    assert not trained("ste")


def test_the_option_of_quantize(plain):
    result = quantized(Net(), DATA, training="lsq")
    assert result.training == Training("lsq")
    assert set(result.model.state_dict()) == set(plain.trains("lsq").model.state_dict())


@pytest.mark.parametrize(
    ("training", "error", "says"),
    [
        ("lsk", UnknownNameError, "lsq"),
        ("lsq(scaling=True)", UnknownNameError, "use_grad_scaling"),
        ("lsq(use_grad_scaling=3)", ConfigError, "True or False"),
        ({"weight": "lsq"}, UnknownNameError, "weights"),
        ({"only": {"stem.9": "lsq"}}, UnknownNameError, "stem.0"),
        (7, ConfigError, "weights"),
        ({"only": "lsq"}, ConfigError, "'only' must be a table"),
        ({"bn_sync": 1}, ConfigError, "'bn_sync' must be True or False"),
    ],
)
def test_what_is_not_understood_is_refused_before_the_work(training, error, says, plain):
    with pytest.raises(error, match=says):
        plain.trains(training)


WIDE = platform_of(
    {"match": ["@conv", "Linear"], "use": [{"in": "a", "w": "w", "b": "b", "out": "a"}]},
    formats={
        "a": {"bits": 17, "zero": "any"},
        "w": {"bits": 8, "range": "narrow", "per": "channel"},
        "b": {"bits": 32},
    },
)


def test_steps_that_float32_loses_do_not_train():
    result = quantized(Net(), DATA, WIDE)
    with pytest.raises(UnsupportedError, match="cannot train activation .*17 bits; at most 16 train"):
        result.trains("lsq")
    wide = result.trains({"weights": "lsq"})
    train(wide.model)
    after = wide.trained()
    assert not torch.equal(after.plan["head.weight"].scale, result.plan["head.weight"].scale)


def test_a_scale_that_training_destroyed_is_no_result(plain):
    result = plain.trains("lsq")
    result.model.quantizer_of("head.weight").scale.data.fill_(float("nan"))
    with pytest.raises(TrainingError, match="scale of .head.weight. is nan.*head"):
        result.trained()


def test_what_trains_is_remembered_by_results_that_follow(plain):
    result = plain.trains({"weights": "lsq"})
    for other in (result.as_calibrated(), result.edit({"body": "float"})):
        assert other.training == result.training
        assert other.model.quantizer_of("head.weight").scale.requires_grad
