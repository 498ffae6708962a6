"""Learned weight rounding under the names of MCT: configurations, and functions that quantize and learn in one call."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import Field, InstanceOf

from chipfit import pipeline
from chipfit.calibration.progress import Progress
from chipfit.calibration.source import CalibrationData
from chipfit.errors import ConfigError, UnsupportedError
from chipfit.mct.core.config import AtLeast0, CoreConfig, ResourceUtilization, or_new
from chipfit.mct.input_scaling import ScaledInput
from chipfit.mct.ptq import (
    DataGenerator,
    UserInformation,
    attach_result,
    checked,
    first_batch_of,
    quantize_model,
    say_without_effect,
)
from chipfit.request import Request
from chipfit.result import Result
from chipfit.rounding.methods.learned import OPTIMIZERS, REJECTED
from chipfit.settings import Settings
from chipfit.validation import Fraction, PositiveInt, arguments, by_name, record, without_effect

__all__ = ["keras_gradient_post_training_quantization", "pytorch_gradient_post_training_quantization"]
__all__ += ["GradientPTQConfig", "RoundingType", "get_keras_gptq_config", "get_pytorch_gptq_config"]
__all__ += ["GPTQHessianScoresConfig", "GradualActivationQuantizationConfig", "QFractionLinearAnnealingConfig"]

_NAME = "gradient_post_training_quantization"
Count = Annotated[int, Field(ge=0)]


class RoundingType(Enum):
    """Methods of learned rounding."""

    STE = 0  #: weights are rounded in every step, and gradients pass through
    SoftQuantizer = 1  #: weights lie between two quantized values, and move to one of them


@record(ConfigError)
class GPTQHessianScoresConfig:
    """Options of weighting errors by their effect on the network's outputs, which is always by sample and channel.

    None of them has an effect; a warning names those that are set.
    """

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "hessians_num_samples": "all samples are used",
        "norm_scores": "errors are relative to those before training",
        "log_norm": "errors are relative to those before training",
        "scale_log_norm": "errors are relative to those before training",
        "hessian_batch_size": "gradients are those of whole batches",
        "per_sample": "errors are always weighted by sample",
    }

    hessians_num_samples: PositiveInt | None = 16
    norm_scores: bool | None = True
    log_norm: bool | None = True
    scale_log_norm: bool = False
    hessian_batch_size: PositiveInt = 32
    per_sample: bool = True


@record(ConfigError)
class QFractionLinearAnnealingConfig:
    """A linear schedule of the share of quantized values; it must grow to 1 from the first step to the last."""

    initial_q_fraction: Fraction = 0
    target_q_fraction: Fraction = 1
    start_step: Count = 0
    end_step: Count | None = None

    def __post_init__(self) -> None:
        low, high, end = self.initial_q_fraction, self.target_q_fraction, self.end_step
        if low >= high or (end is not None and end <= self.start_step):
            raise ConfigError("The share of quantized values must grow over increasing steps", got=repr(self))


@record(ConfigError)
class GradualActivationQuantizationConfig:
    """Options of gradual activation quantization: a random share of values stays in float, less with every step."""

    q_fraction_scheduler_policy: QFractionLinearAnnealingConfig = field(default_factory=QFractionLinearAnnealingConfig)


@record(ConfigError)
class GradientPTQConfig:
    """Options of learned rounding: all weights are trained together to minimize the error of the network's outputs.

    Args:
        n_epochs: passes over the data.
        optimizer: of PyTorch or Keras, which gives its class and learning rate; None: Adam with 0.2.
        train_bias: train biases as well.
        rounding_type: see `RoundingType`.
        use_hessian_based_weights: weight errors by the Hessian; otherwise equally.
        regularization_factor: of the pull towards quantized values; 1 when omitted.
        hessian_weights_config: options of the Hessian; None: equal weights.
        gradual_activation_quantization_config: a random share of activations stays in float; None: no activation does.
        loss, optimizer_rest, optimizer_quantization_parameter, optimizer_bias, log_function,
            gptq_quantizer_params_override: no effect; a warning names those that are set.
    """

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "loss": "the loss is the squared error of the network's outputs",
        "log_function": "`information.result.plan.rewrites` has the errors before and after",
        "optimizer_rest": "biases have a rate of their own",
        "optimizer_bias": "biases have a rate of their own",
        "optimizer_quantization_parameter": "scales stay",
        "gptq_quantizer_params_override": "scales stay, and codes move by one step at most",
    }

    n_epochs: PositiveInt
    optimizer: Any = None
    optimizer_rest: Any = None
    loss: Any = None
    log_function: Any = None
    train_bias: bool = True
    rounding_type: Annotated[RoundingType, by_name(RoundingType)] = RoundingType.SoftQuantizer
    use_hessian_based_weights: bool = True
    optimizer_quantization_parameter: Any = None
    optimizer_bias: Any = None
    regularization_factor: AtLeast0 | None = None
    hessian_weights_config: GPTQHessianScoresConfig | None = field(default_factory=GPTQHessianScoresConfig)
    gptq_quantizer_params_override: Annotated[InstanceOf[dict[str, Any]], or_new(dict)] = field(default_factory=dict)
    gradual_activation_quantization_config: GradualActivationQuantizationConfig | None = field(
        default_factory=GradualActivationQuantizationConfig
    )

    def to_steps(self, batches: int) -> dict[str, Any]:
        """Return the equivalent settings of `chipfit.quantize` for a number of batches.

        Raises:
            UnsupportedError: an option is not supported.
        """
        gradual = self.gradual_activation_quantization_config
        policy = gradual.q_fraction_scheduler_policy if gradual else None
        if policy and (policy.target_q_fraction, policy.start_step, policy.end_step) != (1, 0, None):
            what = "The share of quantized values must grow to 1 from the first step to the last"
            raise UnsupportedError(what, got=repr(policy), allowed="another initial_q_fraction")
        pull = self.regularization_factor
        return {
            "reconstruct": "network",
            "reconstruct_steps": self.n_epochs * batches,
            "reconstruct_biases": self.train_bias,
            "reconstruct_fisher": self.use_hessian_based_weights and self.hessian_weights_config is not None,
            "reconstruct_straight_through": self.rounding_type is RoundingType.STE,
            "reconstruct_float": 1.0 - policy.initial_q_fraction if policy else 0.0,
            "reconstruct_anneal": policy is not None,
            **_optimizer(self.optimizer),
            **({} if pull is None else {"reconstruct_pull": float(pull)}),
        }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    """Return class and learning rate of an optimizer as settings; none without one.

    Raises:
        UnsupportedError: it is of another class.
    """
    if optimizer is None:
        return {}
    known = {name.lower(): name for name in OPTIMIZERS}  # Keras writes "Nadam"
    name = type(optimizer).__name__
    if name.lower() not in known:
        hint = "omit 'optimizer', or pass one of these"
        raise UnsupportedError(
            "Learned rounding does not know this optimizer", got=name, allowed=", ".join(OPTIMIZERS), hint=hint
        )
    groups = getattr(optimizer, "param_groups", None)
    rate = float(groups[0]["lr"] if groups else optimizer.learning_rate)
    return {"reconstruct_rate": rate, "reconstruct_optimizer": known[name.lower()]}


@arguments(ConfigError)
def get_pytorch_gptq_config(
    n_epochs: PositiveInt,
    optimizer: Any = None,
    optimizer_rest: Any = None,
    loss: Any = None,
    log_function: Any = None,
    use_hessian_based_weights: bool = True,
    regularization_factor: AtLeast0 | None = None,
    hessian_batch_size: PositiveInt = 32,
    use_hessian_sample_attention: bool | None = None,
    gradual_activation_quantization: bool | GradualActivationQuantizationConfig = True,
) -> GradientPTQConfig:
    """Return a configuration with MCT's defaults.

    Args:
        use_hessian_sample_attention: no effect; errors that are weighted are weighted by sample.
        others: see `GradientPTQConfig`.

    Raises:
        ConfigError: an option has the wrong type, or attention lacks Hessian-based weights.
    """
    if use_hessian_sample_attention and not use_hessian_based_weights:
        hint = "leave use_hessian_sample_attention out"
        raise ConfigError("use_hessian_sample_attention requires use_hessian_based_weights", hint=hint)
    scores = GPTQHessianScoresConfig(hessian_batch_size=hessian_batch_size)
    if use_hessian_sample_attention is not None:
        scores.per_sample = use_hessian_sample_attention
    given = gradual_activation_quantization
    gradual = GradualActivationQuantizationConfig() if given is True else given or None
    options = n_epochs, optimizer, optimizer_rest, loss, log_function
    return GradientPTQConfig(
        *options,
        use_hessian_based_weights=use_hessian_based_weights,
        regularization_factor=regularization_factor,
        hessian_weights_config=scores,
        gradual_activation_quantization_config=gradual,
    )


get_keras_gptq_config = get_pytorch_gptq_config


def pytorch_gradient_post_training_quantization(
    model: Any,
    representative_data_gen: DataGenerator,
    target_resource_utilization: ResourceUtilization | None = None,
    core_config: CoreConfig | None = None,
    gptq_config: GradientPTQConfig | None = None,
    gptq_representative_data_gen: Callable[..., Any] | None = None,
    target_platform_capabilities: Any = None,
) -> tuple[Any, UserInformation]:
    """Quantize a trained PyTorch module with learned weight rounding; kept only if held-out data do not get worse.

    Args:
        gptq_config: options of learned rounding; 5 epochs when omitted.
        gptq_representative_data_gen: data on which rounding is learned; None: those of representative_data_gen.
        others: see `pytorch_post_training_quantization`, also for the result and the errors.

    Raises:
        UnsupportedError: an option is not supported.
    """
    options = target_resource_utilization, core_config, target_platform_capabilities
    return _learn(model, representative_data_gen, gptq_config, gptq_representative_data_gen, *options)


def keras_gradient_post_training_quantization(
    in_model: Any,
    representative_data_gen: DataGenerator,
    gptq_config: GradientPTQConfig | None = None,
    gptq_representative_data_gen: Callable[..., Any] | None = None,
    target_resource_utilization: ResourceUtilization | None = None,
    core_config: CoreConfig | None = None,
    target_platform_capabilities: Any = None,
) -> tuple[Any, UserInformation]:
    """Quantize a Keras 3 model with learned rounding; see `pytorch_gradient_post_training_quantization`."""
    options = target_resource_utilization, core_config, target_platform_capabilities
    return _learn(in_model, representative_data_gen, gptq_config, gptq_representative_data_gen, *options)


def _learn(
    model: Any, generator: Any, gptq_config: Any, own_generator: Any, limits: Any, core_config: Any, platform: Any
) -> tuple[Any, UserInformation]:
    config = checked(GradientPTQConfig, gptq_config, "gptq_config", _NAME, model) or GradientPTQConfig(5)
    hessian = config.hessian_weights_config
    say_without_effect([*without_effect(config), *(without_effect(hessian) if hessian else ())], stacklevel=4)
    own = generator if own_generator is None else own_generator
    first_batch_of(own)  # raises if there is none
    steps = config.to_steps(sum(1 for _ in own()))
    options = limits, core_config, platform
    if own_generator is None:
        quantized, information = quantize_model(_NAME, model, generator, *options, steps=steps)
    else:
        quantized, information = quantize_model(_NAME, model, generator, *options)
        if information.quantizes:
            scaled = ScaledInput(information.input_scale).data(own_generator)
            result = _learned_on(scaled, information.result, steps)
            quantized = attach_result(result, quantized)
            information = replace(information, result=result, gptq_info_dict=steps)
    notes = information.result.plan.rewrites if information.result is not None else ()
    if rejected := [n.removeprefix("warning: ") for n in notes if REJECTED in n]:
        warnings.warn(f"Learned rounding was not taken: {'; '.join(rejected)}", stacklevel=3)
    return quantized, information


def _learned_on(generator: Any, result: Any, steps: Mapping[str, Any]) -> Result:
    """Return a result with corrections that other data than those of calibration give."""
    d = result.decision
    settings = Settings.from_record({**d.settings.to_record(), **steps})
    data = CalibrationData(generator, first_batch_of(generator))
    request = Request(model=None, data=data, limits=None, training=None, progress=Progress(False))
    return pipeline.correct(request, Result(d.graph, result.uncorrected or result.plan, d, result.timings), settings)
