"""Learned weight rounding under the names of MCT: configurations, and functions that quantize and learn in one call."""

from collections.abc import Callable
from dataclasses import field
from enum import Enum
from typing import Annotated, Any

from pydantic import Field, InstanceOf

from chipfit.errors import ConfigError, UnsupportedError
from chipfit.mct.core.config import AtLeast0, CoreConfig, ResourceUtilization
from chipfit.mct.ptq import DataGenerator, UserInformation, checked, first_batch_of, form_for_keras, quantize_model
from chipfit.validation import Fraction, PositiveInt, arguments, by_name, record, refuse_options

__all__ = ["keras_gradient_post_training_quantization", "pytorch_gradient_post_training_quantization"]
__all__ += ["GradientPTQConfig", "RoundingType", "get_keras_gptq_config", "get_pytorch_gptq_config"]
__all__ += ["GPTQHessianScoresConfig", "GradualActivationQuantizationConfig", "QFractionLinearAnnealingConfig"]

_NAME = "gradient_post_training_quantization"
Count = Annotated[int, Field(ge=0)]


class RoundingType(Enum):
    """Methods of learned rounding; STE is not supported."""

    STE = 0
    SoftQuantizer = 1


@record(ConfigError)
class GPTQHessianScoresConfig:
    """Options of weighting errors by their effect on the network's outputs, which is always by sample and channel."""

    per_sample: bool = True  #: no effect: always
    hessians_num_samples: PositiveInt | None = None  #: no effect: all of them
    norm_scores: bool | None = None  #: no effect: errors are relative to those before training
    log_norm: bool | None = None  #: no effect
    scale_log_norm: bool = False  #: no effect
    hessian_batch_size: PositiveInt = 32  #: no effect


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
        optimizer: an Adam of PyTorch or Keras that gives the learning rate; None: 0.2.
        train_bias: train biases as well.
        hessian_weights_config: weights errors by the Hessian; None: equal weights.
        gradual_activation_quantization_config: a random share of activations stays in float; None: no activation does.
        regularization_factor: of the pull towards quantized values; 1 when omitted.
        loss, optimizer_rest, optimizer_quantization_parameter, optimizer_bias, log_function,
            gptq_quantizer_params_override: not supported; the loss is the squared error, biases have their own rate.
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
    regularization_factor: AtLeast0 | None = None
    rounding_type: Annotated[RoundingType, by_name(RoundingType)] = RoundingType.SoftQuantizer
    optimizer_quantization_parameter: Any = None
    optimizer_bias: Any = None
    log_function: Any = None
    gptq_quantizer_params_override: InstanceOf[dict[str, Any]] = field(default_factory=dict)

    def to_steps(self, batches: int) -> dict[str, Any]:
        """Return the equivalent settings of `chipfit.quantize` for a number of batches.

        Raises:
            UnsupportedError: an option is not supported.
        """
        refuse_options(self, "loss log_function gptq_quantizer_params_override", "leave it out")
        refuse_options(self, "optimizer_rest optimizer_quantization_parameter optimizer_bias", "leave it out")
        if self.rounding_type is RoundingType.STE:
            raise UnsupportedError("RoundingType.STE is not supported", hint="RoundingType.SoftQuantizer")
        gradual = self.gradual_activation_quantization_config
        policy = gradual.q_fraction_scheduler_policy if gradual else None
        if policy and (policy.target_q_fraction, policy.start_step, policy.end_step) != (1, 0, None):
            what = "The share of quantized values must grow to 1 from the first step to the last"
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
    """Return the learning rate of an Adam; None without an optimizer."""
    if optimizer is None:
        return None
    if type(optimizer).__name__ != "Adam":
        got = type(optimizer).__name__
        raise UnsupportedError("Learned rounding supports Adam only", got=got, hint="omit 'optimizer', or pass an Adam")
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
    regularization_factor: AtLeast0 | None = None,
    hessian_batch_size: PositiveInt = 32,
    use_hessian_sample_attention: bool = True,
    gradual_activation_quantization: bool | GradualActivationQuantizationConfig = True,
) -> GradientPTQConfig:
    """Return a configuration with MCT's defaults.

    Args:
        use_hessian_sample_attention: requires use_hessian_based_weights; errors are weighted by sample in any case.
        others: see `GradientPTQConfig`.

    Raises:
        ConfigError: an option has the wrong type, or attention lacks Hessian-based weights.
    """
    if use_hessian_sample_attention and not use_hessian_based_weights:
        hint = "turn use_hessian_sample_attention off as well"
        raise ConfigError("use_hessian_sample_attention requires use_hessian_based_weights", hint=hint)
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
    """Quantize a trained PyTorch module with learned weight rounding; kept only if held-out data do not get worse.

    Args:
        gptq_config: options of learned rounding; 5 epochs when omitted.
        gptq_representative_data_gen: not supported; rounding is learned on the calibration data.
        others: see `pytorch_post_training_quantization`, also for the result and the errors.

    Raises:
        UnsupportedError: an option is not supported.
    """
    config = checked(GradientPTQConfig, gptq_config, "gptq_config", _NAME, model)
    if gptq_representative_data_gen is not None:
        hint = "yield those images from representative_data_gen"
        raise UnsupportedError("'gptq_representative_data_gen' is not supported", hint=hint)
    first_batch_of(representative_data_gen)  # raises if there is none
    steps = (config or GradientPTQConfig(5)).to_steps(sum(1 for _ in representative_data_gen()))
    options = target_resource_utilization, core_config, target_platform_capabilities
    return quantize_model(_NAME, model, representative_data_gen, *options, steps=steps)


keras_gradient_post_training_quantization = form_for_keras(
    pytorch_gradient_post_training_quantization, "Quantize a Keras 3 model with learned rounding"
)
