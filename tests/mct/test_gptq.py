"""Learned rounding under MCT's names."""

import inspect

import pytest
import torch

import chipfit
from chipfit import gptq
from chipfit.errors import ConfigError, DataError, UnsupportedError
from tests.mct.test_qat import net

X = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def batches():
    yield [X[:16]]
    yield [X[16:]]


def learn(config=None, **options):
    options = {"target_platform_capabilities": "ort_cpu", **options}
    return gptq.pytorch_gradient_post_training_quantization(net(), batches, gptq_config=config, **options)


def test_names_and_defaults_are_those_of_mct():
    function = chipfit.pytorch_gradient_post_training_quantization
    assert function is gptq.pytorch_gradient_post_training_quantization
    assert list(inspect.signature(function).parameters) == [
        *("model", "representative_data_gen", "target_resource_utilization", "core_config", "gptq_config"),
        *("gptq_representative_data_gen", "target_platform_capabilities"),
    ]
    assert {m.name: m.value for m in gptq.RoundingType} == {"STE": 0, "SoftQuantizer": 1}
    config = gptq.get_pytorch_gptq_config(3)
    assert list(vars(config))[:4] == ["n_epochs", "loss", "optimizer", "optimizer_rest"]
    assert config.hessian_weights_config.per_sample and config.train_bias
    policy = config.gradual_activation_quantization_config.q_fraction_scheduler_policy
    assert (policy.initial_q_fraction, policy.target_q_fraction, policy.start_step, policy.end_step) == (0, 1, 0, None)


def test_a_module_with_learned_rounding_is_exact():
    quantized, info = learn(gptq.get_pytorch_gptq_config(2, torch.optim.Adam([torch.zeros(1)], lr=0.03)))
    assert quantized(X).shape == (32, 5) and info.gptq_info_dict["reconstruct_steps"] == 4
    assert info.gptq_info_dict["reconstruct_rate"] == 0.03
    assert any("learned the codes of" in n for n in info.result.plan.rewrites)
    assert info.result.verify([X]).exact


def test_options_are_translated_to_settings():
    make = gptq.get_pytorch_gptq_config
    plain = make(2, use_hessian_based_weights=False, use_hessian_sample_attention=False, regularization_factor=0.1)
    plain.gradual_activation_quantization_config, plain.train_bias = None, False
    off = dict.fromkeys(("reconstruct_biases", "reconstruct_fisher", "reconstruct_anneal"), False)
    numbers = {"reconstruct_steps": 10, "reconstruct_float": 0.0, "reconstruct_pull": 0.1}
    assert plain.to_steps(5) == {"reconstruct": "network", **numbers, **off}
    steps = make(1).to_steps(1)
    assert steps["reconstruct_fisher"] and steps["reconstruct_anneal"] and steps["reconstruct_float"] == 1


@pytest.mark.parametrize(
    "options, says",
    [
        ({"loss": print}, "'loss'"),
        ({"log_function": print}, "'log_function'"),
        ({"optimizer_bias": 1}, "'optimizer_bias'"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "Adam only. Got: SGD"),
        ({"rounding_type": gptq.RoundingType.STE}, "SoftQuantizer"),
        ({"gptq_quantizer_params_override": {"a": 1}}, "gptq_quantizer_params_override"),
    ],
)
def test_unsupported_options_are_refused(options, says):
    with pytest.raises(UnsupportedError, match=says):
        learn(gptq.GradientPTQConfig(1, **options))


annealing = gptq.QFractionLinearAnnealingConfig
LATE = gptq.GradualActivationQuantizationConfig(annealing(0, 1, 3, None))


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: annealing(0.5, 0.5, 0, None), ConfigError, "must grow"),
        (lambda: annealing(0, 1, 5, 5), ConfigError, "must grow"),
        (lambda: annealing(-0.1, 1, 0, None), ConfigError, "initial_q_fraction"),
        (lambda: gptq.get_pytorch_gptq_config(1, use_hessian_based_weights=False), ConfigError, "requires use_hessian"),
        (lambda: gptq.get_pytorch_gptq_config(0), ConfigError, "n_epochs"),
        (
            lambda: learn(gptq.get_pytorch_gptq_config(1, gradual_activation_quantization=LATE)),
            *(UnsupportedError, "from the first step"),
        ),
        (lambda: learn(gptq_representative_data_gen=batches), UnsupportedError, "gptq_representative_data_gen"),
        (lambda: gptq.pytorch_gradient_post_training_quantization(net(), [X]), DataError, "function without arguments"),
    ],
)
def test_invalid_options_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("tuned", [True, False])
def test_hmse_weights_errors_by_the_hessian_with_and_without_tuning(tuned):
    """MCT accepts HMSE for weights with gradient tuning only."""
    method = chipfit.core.QuantizationErrorMethod.HMSE
    config = chipfit.core.CoreConfig(chipfit.core.QuantizationConfig(method, method))
    if tuned:
        _, information = learn(gptq.GradientPTQConfig(1), core_config=config)
    else:
        _, information = chipfit.pytorch_post_training_quantization(net(), batches, core_config=config)
    found = [t for t in information.result.plan.tensors.values() if t.quantized and t.role != "bias"]
    assert found and all(t.origin.startswith("hmse over the weights") for t in found if t.role == "weight")
    assert any(t.origin.startswith("hmse over 2 batches") for t in found)
