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
    assert list(vars(config))[:12] == [
        *("n_epochs", "optimizer", "optimizer_rest", "loss", "log_function", "train_bias", "rounding_type"),
        *("use_hessian_based_weights", "optimizer_quantization_parameter", "optimizer_bias", "regularization_factor"),
        "hessian_weights_config",
    ]
    assert config.use_hessian_based_weights and config.train_bias
    assert list(inspect.signature(gptq.keras_gradient_post_training_quantization).parameters) == [
        *("in_model", "representative_data_gen", "gptq_config", "gptq_representative_data_gen"),
        *("target_resource_utilization", "core_config", "target_platform_capabilities"),
    ]
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
    plain = make(2, use_hessian_based_weights=False, regularization_factor=0.1)
    plain.gradual_activation_quantization_config, plain.train_bias = None, False
    names = "biases fisher anneal straight_through".split()
    off = dict.fromkeys((f"reconstruct_{name}" for name in names), False)
    numbers = {"reconstruct_steps": 10, "reconstruct_float": 0.0, "reconstruct_pull": 0.1}
    assert plain.to_steps(5) == {"reconstruct": "network", **numbers, **off}
    steps = make(1).to_steps(1)
    assert steps["reconstruct_fisher"] and steps["reconstruct_anneal"] and steps["reconstruct_float"] == 1


@pytest.mark.filterwarnings("ignore:Learned rounding was not taken")
@pytest.mark.parametrize("name", ["RMSprop", "SGD", "AdamW"])
def test_an_optimizer_gives_its_class_and_learning_rate(name, monkeypatch):
    made, cls = [], getattr(torch.optim, name)
    monkeypatch.setattr(torch.optim, name, lambda *args, **kwargs: made.append(kwargs) or cls(*args, **kwargs))
    _, info = learn(gptq.GradientPTQConfig(1, optimizer=cls([torch.zeros(1)], lr=0.1)))
    assert made == [{"lr": 0.1}] and info.gptq_info_dict["reconstruct_optimizer"] == name
    assert info.result.verify([X]).exact


def test_an_optimizer_of_another_class_is_refused():
    with pytest.raises(UnsupportedError, match="does not know this optimizer. Got: LBFGS. Allowed: Adam, AdamW"):
        learn(gptq.GradientPTQConfig(1, optimizer=torch.optim.LBFGS([torch.zeros(1)], lr=0.1)))


@pytest.mark.filterwarnings("ignore:Learned rounding was not taken")
def test_rounding_is_learned_on_data_of_its_own():
    read = []

    def own():
        for _ in range(3):
            read.append(1)
            yield [X[:16] * 0.5]

    options = {"gptq_config": gptq.GradientPTQConfig(2), "target_platform_capabilities": "ort_cpu"}
    function = chipfit.gptq.pytorch_gradient_post_training_quantization
    quantized, info = function(net(), batches, gptq_representative_data_gen=own, **options)
    plain = chipfit.pytorch_post_training_quantization(net(), batches, target_platform_capabilities="ort_cpu")[1]
    _, usual = function(net(), batches, **options)
    assert read and info.gptq_info_dict["reconstruct_steps"] == 6 and quantized is info.result.model
    assert torch.equal(
        info.result.plan["input"].scale, plain.result.plan["input"].scale
    )  # ranges are those of calibration
    assert any("codes" in n for n in info.result.plan.rewrites) and info.result.verify([X]).exact
    assert info.result.plan.rewrites != usual.result.plan.rewrites


def test_options_without_effect_are_named_once_and_together():
    scores = gptq.GPTQHessianScoresConfig(hessian_batch_size=4)
    unused = {"loss": print, "optimizer_bias": 1, "gptq_quantizer_params_override": {"a": 1}}
    named = "'loss' of GradientPTQConfig.*'optimizer_bias'.*'gptq_quantizer_params_override'.*'hessian_batch_size'"
    with pytest.warns(UserWarning, match=named) as found:
        learn(gptq.GradientPTQConfig(1, hessian_weights_config=scores, **unused))
    assert len(found) == 1 and found[0].filename == __file__


@pytest.mark.filterwarnings("ignore:Learned rounding was not taken")
def test_straight_through_rounding_moves_codes_by_one_step_at_most():
    steps = gptq.GradientPTQConfig(20, rounding_type=gptq.RoundingType.STE, train_bias=False)
    _, info = learn(steps)
    _, plain = chipfit.pytorch_post_training_quantization(net(), batches, target_platform_capabilities="ort_cpu")
    plan = info.result.plan
    assert info.gptq_info_dict["reconstruct_straight_through"] and info.result.verify([X]).exact
    for name in (t.name for t in plan.tensors.values() if t.role == "weight"):
        codes = [r.plan[name].quantize(r.graph.weights[name]).long() for r in (info.result, plain.result)]
        assert (codes[0] - codes[1]).abs().max() <= 1


def test_learned_weights_that_lose_more_on_held_out_images_are_not_taken_and_the_user_is_told():
    dark = torch.cat([0.02 * X[:28], X[28:]])  # the last eighth is held out
    data = lambda: iter([[dark[:16]], [dark[16:]]])
    with pytest.warns(UserWarning, match="Learned rounding was not taken: weights keep the codes from before"):
        gptq.pytorch_gradient_post_training_quantization(net(), data, target_platform_capabilities="ort_cpu")


annealing = gptq.QFractionLinearAnnealingConfig
LATE = gptq.GradualActivationQuantizationConfig(annealing(0, 1, 3, None))


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: annealing(0.5, 0.5, 0, None), ConfigError, "must grow"),
        (lambda: annealing(0, 1, 5, 5), ConfigError, "must grow"),
        (lambda: annealing(-0.1, 1, 0, None), ConfigError, "initial_q_fraction"),
        (
            lambda: gptq.get_pytorch_gptq_config(1, use_hessian_based_weights=False, use_hessian_sample_attention=True),
            *(ConfigError, "requires use_hessian"),
        ),
        (lambda: gptq.get_pytorch_gptq_config(0), ConfigError, "n_epochs"),
        (
            lambda: learn(gptq.get_pytorch_gptq_config(1, gradual_activation_quantization=LATE)),
            *(UnsupportedError, "from the first step"),
        ),
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
