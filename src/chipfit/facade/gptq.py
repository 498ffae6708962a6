"""Learned weight rounding under the names of MCT: configurations, and functions that quantize and learn in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from enum import Enum
from typing import Annotated, Any

from pydantic import Field, InstanceOf

from chipfit.errors import ConfigError, UnsupportedError
from chipfit.facade.core.config import CoreConfig, ResourceUtilization
from chipfit.facade.ptq import (
    DataGenerator,
    UserInformation,
    first_batch_of,
    framework_prefix,
    of_keras,
    quantize_model,
)
from chipfit.facade.pydantic_messages import (
    Fraction,
    Number,
    PositiveInt,
    arguments,
    by_name,
    check_value,
    record,
    refuse_options,
)

__all__ = ["keras_gradient_post_training_quantization", "pytorch_gradient_post_training_quantization"]
__all__ += ["GradientPTQConfig", "RoundingType", "get_keras_gptq_config", "get_pytorch_gptq_config"]
__all__ += ["GPTQHessianScoresConfig", "GradualActivationQuantizationConfig", "QFractionLinearAnnealingConfig"]

_NAME = "gradient_post_training_quantization"
Count = Annotated[int, Field(ge=0)]


class RoundingType(Enum):
    """How codes are learned; STE is refused."""

    STE = 0
    SoftQuantizer = 1


@record(ConfigError)
class GPTQHessianScoresConfig:
    """Errors weigh as much as they change the network's outputs: by sample and channel, whatever the options say."""

    per_sample: bool = True  #: no effect: always
    hessians_num_samples: PositiveInt | None = None  #: no effect: all of them
    norm_scores: bool | None = None  #: no effect: errors count as a share of what they were
    log_norm: bool | None = None  #: no effect
    scale_log_norm: bool = False  #: no effect
    hessian_batch_size: PositiveInt = 32  #: no effect


@record(ConfigError)
class QFractionLinearAnnealingConfig:
    """The share of values that are rounded: from the first step to the last it grows to 1; other ends are refused."""

    initial_q_fraction: Fraction = 0
    target_q_fraction: Fraction = 1
    start_step: Count = 0
    end_step: Count | None = None

    def __post_init__(self) -> None:
        low, high, end = self.initial_q_fraction, self.target_q_fraction, self.end_step
        if low >= high or (end is not None and end <= self.start_step):
            raise ConfigError("The share of rounded values grows, from one step to a later one", got=repr(self))


@record(ConfigError)
class GradualActivationQuantizationConfig:
    """Values stay in float at random, fewer from step to step."""

    q_fraction_scheduler_policy: QFractionLinearAnnealingConfig = field(default_factory=QFractionLinearAnnealingConfig)


@record(ConfigError)
class GradientPTQConfig:
    """How codes are learned: those of the whole network at once, by the error of its outputs.

    Args:
        n_epochs: passes over the data.
        optimizer: an Adam of PyTorch or Keras, of which the rate is taken; None: a rate of 0.2.
        train_bias: biases are learned as well.
        hessian_weights_config: weighs errors; None: all alike.
        gradual_activation_quantization_config: values stay in float at random; None: none does.
        regularization_factor: of the pull towards codes; 1 where it is left out.
        loss, optimizer_rest, optimizer_quantization_parameter, optimizer_bias, log_function,
            gptq_quantizer_params_override: refused; the loss is the squared error, biases have a rate of their own.
    """

    n_epochs: PositiveInt
    loss: Any = None
    optimizer: Any = None
    optimizer_rest: Any = None
    train_bias: bool = True
    hessian_weights_config: GPTQHessianScoresConfig | None = field(default_factory=GPTQHessianScoresConfig)
    gradual_activation_quantization_config: GradualActivationQuantizationConfig | None = field(
        default_factory=GradualActivationQuantizationConfig
    )
    regularization_factor: Annotated[Number, Field(ge=0)] | None = None
    rounding_type: Annotated[RoundingType, by_name(RoundingType)] = RoundingType.SoftQuantizer
    optimizer_quantization_parameter: Any = None
    optimizer_bias: Any = None
    log_function: Any = None
    gptq_quantizer_params_override: InstanceOf[dict[str, Any]] = field(default_factory=dict)

    def to_steps(self, batches: int) -> dict[str, Any]:
        """The same as settings of `chipfit.quantize`, for so many batches.

        Raises:
            UnsupportedError: an option that is not supported.
        """
        refuse_options(self, "loss log_function gptq_quantizer_params_override", "leave it out")
        refuse_options(self, "optimizer_rest optimizer_quantization_parameter optimizer_bias", "leave it out")
        if self.rounding_type is RoundingType.STE:
            raise UnsupportedError("RoundingType.STE is not supported", hint="RoundingType.SoftQuantizer")
        gradual = self.gradual_activation_quantization_config
        policy = gradual.q_fraction_scheduler_policy if gradual else None
        if policy and (policy.target_q_fraction, policy.start_step, policy.end_step) != (1, 0, None):
            what = "The share of rounded values grows to 1, from the first step to the last"
            raise UnsupportedError(what, got=repr(policy), allowed="another initial_q_fraction")
        rate, pull = _rate(self.optimizer), self.regularization_factor
        return {
            "reconstruct": "network",
            "reconstruct_steps": self.n_epochs * batches,
            "reconstruct_biases": self.train_bias,
            "reconstruct_fisher": self.hessian_weights_config is not None,
            "reconstruct_float": 1.0 - policy.initial_q_fraction if policy else 0.0,
            "reconstruct_anneal": policy is not None,
            **({} if rate is None else {"reconstruct_rate": rate}),
            **({} if pull is None else {"reconstruct_pull": float(pull)}),
        }


def _rate(optimizer: Any) -> float | None:
    """The rate of an Adam; None where none is given."""
    if optimizer is None:
        return None
    if type(optimizer).__name__ != "Adam":
        got = type(optimizer).__name__
        raise UnsupportedError("Codes are learned by Adam", got=got, hint="leave 'optimizer' out, or give an Adam")
    groups = getattr(optimizer, "param_groups", None)
    return float(groups[0]["lr"] if groups else optimizer.learning_rate)


@arguments(ConfigError)
def get_pytorch_gptq_config(
    n_epochs: PositiveInt,
    optimizer: Any = None,
    optimizer_rest: Any = None,
    loss: Any = None,
    log_function: Any = None,
    use_hessian_based_weights: bool = True,
    regularization_factor: Annotated[Number, Field(ge=0)] | None = None,
    hessian_batch_size: PositiveInt = 32,
    use_hessian_sample_attention: bool = True,
    gradual_activation_quantization: bool | GradualActivationQuantizationConfig = True,
) -> GradientPTQConfig:
    """Return a configuration with MCT's defaults.

    Args:
        use_hessian_sample_attention: needs use_hessian_based_weights; errors are weighted by sample either way.
        others: as of `GradientPTQConfig`.

    Raises:
        ConfigError: an option of the wrong kind, or attention without Hessian-based weights.
    """
    if use_hessian_sample_attention and not use_hessian_based_weights:
        hint = "turn use_hessian_sample_attention off as well"
        raise ConfigError("use_hessian_sample_attention needs use_hessian_based_weights", hint=hint)
    scores = GPTQHessianScoresConfig(use_hessian_sample_attention, hessian_batch_size=hessian_batch_size)
    given = gradual_activation_quantization
    gradual = GradualActivationQuantizationConfig() if given is True else given or None
    weighted = scores if use_hessian_based_weights else None
    options = n_epochs, loss, optimizer, optimizer_rest, True, weighted, gradual, regularization_factor
    return GradientPTQConfig(*options, log_function=log_function)


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
    """Quantize a trained PyTorch module and learn the codes of its weights; never worse than before on held-out data.

    Args:
        gptq_config: how they are learned; 5 epochs when omitted.
        gptq_representative_data_gen: refused; codes are learned on the data of calibration.
        others: as of `pytorch_post_training_quantization`, as are the result and the errors.

    Raises:
        UnsupportedError: an option that is not supported.
    """
    who = f"{framework_prefix(model)}_{_NAME}"
    chosen = check_value(GradientPTQConfig | None, gptq_config, ConfigError, who, "gptq_config") or GradientPTQConfig(5)
    if gptq_representative_data_gen is not None:
        hint = "yield those images from representative_data_gen"
        raise UnsupportedError("'gptq_representative_data_gen' is not supported", hint=hint)
    first_batch_of(representative_data_gen)  # refuses what yields nothing
    steps = chosen.to_steps(sum(1 for _ in representative_data_gen()))
    options = target_resource_utilization, core_config, target_platform_capabilities
    return quantize_model(_NAME, model, representative_data_gen, *options, steps=steps)


keras_gradient_post_training_quantization = of_keras(pytorch_gradient_post_training_quantization)
