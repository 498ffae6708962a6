"""Quantization-aware training under the names of MCT: quantize a model, train the result, finalize it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from pydantic import InstanceOf

from chipfit.errors import ConfigError, PlanError, UnknownNameError
from chipfit.frameworks import framework_of, part
from chipfit.mct.core.config import CoreConfig, ResourceUtilization
from chipfit.mct.ptq import DataGenerator, UserInformation, attach_result, checked, quantize_model
from chipfit.mct.result_link import ResultLink, unpacked
from chipfit.mct.trainable import base
from chipfit.mct.trainable.user_quantizers import UserQuantizers
from chipfit.plan.training import Training, algorithm_of
from chipfit.quantizers.algorithm import Algorithm
from chipfit.registry import create, registered
from chipfit.result import Result, check_untrained
from chipfit.validation import record

_NAMES = [f"{f}_quantization_aware_training_{step}" for f in ("keras", "pytorch") for step in ("init", "finalize")]
__all__ = ["QATConfig", "TrainingMethod", "result_of", *_NAMES, *(f"{name}_experimental" for name in _NAMES)]

_NAME = "quantization_aware_training_init"

#: every registered training algorithm; the value is its name
TrainingMethod = Enum("TrainingMethod", {name.upper(): name for name in registered("training")})  # type: ignore[misc]


@record(ConfigError)
class QATConfig:
    """Options of quantization-aware training.

    Args:
        weight_training_method, activation_training_method: a TrainingMethod or its name, perhaps with options
            ("lsq(use_grad_scaling=False)"); a class of trainable quantizers, or the identifier of classes that
            `mark_quantizer` marked; None keeps the calibrated quantizers.
        weight_quantizer_params_override, activation_quantizer_params_override: options of the method, or of the class's
            constructor.
    """

    weight_training_method: Any = "ste"
    activation_training_method: Any = "ste"
    weight_quantizer_params_override: InstanceOf[Mapping[str, Any]] | None = None
    activation_quantizer_params_override: InstanceOf[Mapping[str, Any]] | None = None

    def to_training(self, framework: str) -> Training:
        """Return the equivalent `training` of `chipfit.quantize`.

        Raises:
            UnknownNameError: there is no such method, or it has no such option.
            ConfigError: a value is not a method.
        """
        weights, results = self.weight_quantizer_params_override or {}, self.activation_quantizer_params_override or {}
        w = _algorithm(self.weight_training_method, weights, base.QuantizationTarget.Weights, framework)
        a = _algorithm(self.activation_training_method, results, base.QuantizationTarget.Activation, framework)
        return Training(weights=w, activations=a)


def _algorithm(
    method: Any, options: Mapping[str, Any], target: base.QuantizationTarget, framework: str
) -> Algorithm | None:
    method = method.value if isinstance(method, TrainingMethod) else method
    if isinstance(method, type) and issubclass(method, base.BaseTrainableQuantizer):
        return method.hosted(**options)
    ours = [c for c in base.MARKED_QUANTIZERS if (c.framework, c.quantization_target) == (framework, target)]
    if found := tuple(c for c in ours if method is not None and c.identifier == method):
        return UserQuantizers(found, options)
    if not isinstance(method, str):
        return algorithm_of(method)
    if method.partition("(")[0] not in (names := registered("training")):
        identifiers = {c.identifier for c in ours if isinstance(c.identifier, str)}
        raise UnknownNameError("training method", method, {*names, *identifiers})
    return create("training", method, **options)  # type: ignore[no-any-return]


def pytorch_quantization_aware_training_init(
    in_model: Any,
    representative_data_gen: DataGenerator,
    target_resource_utilization: ResourceUtilization | None = None,
    core_config: CoreConfig | None = None,
    qat_config: QATConfig | None = None,
    target_platform_capabilities: Any = None,
) -> tuple[Any, UserInformation]:
    """Quantize a PyTorch module and return a trainable module.

    Args:
        qat_config: training methods; straight-through rounding when omitted.
        in_model, representative_data_gen, target_resource_utilization, core_config, target_platform_capabilities: see
            `pytorch_post_training_quantization`.

    Returns:
        The module, in which `PytorchQuantizationWrapper`s hold layers with quantized weights and
        `PytorchActivationQuantizationHolder`s quantize results; train it, then call `..._finalize`. And information
        about it.

    Raises:
        UnsupportedError: a method cannot train a tensor; see also `pytorch_post_training_quantization`.
        UnknownNameError: there is no such method.
    """
    chosen = checked(QATConfig, qat_config, "qat_config", _NAME, in_model) or QATConfig()
    training = chosen.to_training(framework_of(in_model))  # before the work
    options = target_resource_utilization, core_config, target_platform_capabilities
    model, information = quantize_model(_NAME, in_model, representative_data_gen, *options)
    if information.result is None or not information.quantizes:
        return model, information
    result = information.result.trains(training)
    return attach_result(result, model), replace(information, result=result)


@functools.wraps(pytorch_quantization_aware_training_init)
def keras_quantization_aware_training_init(*args: Any, **kwargs: Any) -> tuple[Any, UserInformation, dict[str, type]]:
    """Quantize a Keras 3 model and return a trainable model, see `pytorch_quantization_aware_training_init`.

    Returns:
        Also the custom objects that Keras requires to load the saved model.
    """
    model, information = pytorch_quantization_aware_training_init(*args, **kwargs)
    layers, training = vars(part("keras", "layers")), information.result.training if information.result else None
    hosted = [a for a in (training.weights, training.activations) if isinstance(a, UserQuantizers)] if training else []
    own = {n: c for n, c in layers.items() if n.startswith(("KerasQ", "KerasA"))}
    return model, information, {**own, **{c.__name__: c for a in hosted for c in a.classes}}


def pytorch_quantization_aware_training_finalize(in_model: Any, information: UserInformation | None = None) -> Any:
    """Return the trained module in its deployed form: with the trained weights, scales and zero points.

    Args:
        in_model: the model that `..._init` returned, or a copy of it.
        information: the information that `..._init` returned; required for a model that does not know its result.

    Returns:
        A module like that of post-training quantization; its `result_of` exports, verifies and saves.

    Raises:
        PlanError: the model does not come from `..._init`, or a trained scale is not positive.
        UnsupportedError: the trained model cannot be deployed.
    """
    origin = _result_behind(in_model, information)
    return attach_result(replace(origin, _model=in_model).trained(), in_model)


def result_of(model: Any) -> Result:
    """Return the result behind a model of these facades: plan, report, `export`, `verify`, `save`.

    Raises:
        PlanError: the model does not come from a facade, or was trained since.
    """
    result = _result_behind(model, None)
    result = result if result._model is model else replace(result, _model=model)
    check_untrained(result, "the result of this model")
    return result


keras_quantization_aware_training_finalize = pytorch_quantization_aware_training_finalize  # for any framework
pytorch_quantization_aware_training_init_experimental = pytorch_quantization_aware_training_init
pytorch_quantization_aware_training_finalize_experimental = pytorch_quantization_aware_training_finalize
keras_quantization_aware_training_init_experimental = keras_quantization_aware_training_init
keras_quantization_aware_training_finalize_experimental = keras_quantization_aware_training_finalize


def _result_behind(model: Any, information: UserInformation | None) -> Result:
    origin = getattr(model, "_chipfit", None)
    result = origin.of(model) if isinstance(origin, ResultLink) else None
    if result is None and isinstance(packed := getattr(model, "origin", None), dict):
        result = unpacked(packed, model)
    result = information.result if result is None and information is not None else result
    if result is None:
        allowed = "a model of a facade, or a copy of it"
        hint = "pass the information as well: finalize(model, information)"
        raise PlanError("Model does not come from a facade", got=type(model).__name__, allowed=allowed, hint=hint)
    return result
