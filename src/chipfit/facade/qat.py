"""Quantization-aware training under the names of MCT: quantize a model, train the result, finalize it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from pydantic import InstanceOf

from chipfit.errors import ConfigError, PlanError, UnknownNameError
from chipfit.facade.core.config import CoreConfig, ResourceUtilization
from chipfit.facade.ptq import DataGenerator, UserInformation, framework_prefix, quantize_model
from chipfit.facade.pydantic_messages import check_value, record
from chipfit.facade.trainable import base
from chipfit.facade.trainable.user_quantizers import Hosted
from chipfit.frameworks import framework_of, keras_part
from chipfit.pipeline import Result
from chipfit.plan.training import Training, algorithm_of
from chipfit.quantizers.algorithm import Algorithm
from chipfit.registry import create, registered

_NAMES = [f"{f}_quantization_aware_training_{step}" for f in ("keras", "pytorch") for step in ("init", "finalize")]
__all__ = ["QATConfig", "TrainingMethod", "result_of", *_NAMES, *(f"{name}_experimental" for name in _NAMES)]

_NAME = "quantization_aware_training_init"

#: every registered training algorithm; its value is the name
TrainingMethod = Enum("TrainingMethod", {name.upper(): name for name in registered("training")})  # type: ignore[misc]


@record(ConfigError)
class QATConfig:
    """What trains weights and activations.

    Args:
        weight_training_method: a TrainingMethod or its name, perhaps with options ("lsq(use_grad_scaling=False)"); a
            class of trainable quantizers, or the identifier under which such classes are marked; None leaves numbers
            where calibration put them.
        activation_training_method: the same.
        weight_quantizer_params_override: options of the method, or of the constructor of the class.
        activation_quantizer_params_override: the same.
    """

    weight_training_method: Any = "ste"
    activation_training_method: Any = "ste"
    weight_quantizer_params_override: InstanceOf[Mapping[str, Any]] | None = None
    activation_quantizer_params_override: InstanceOf[Mapping[str, Any]] | None = None

    def to_training(self, framework: str) -> Training:
        """The same for `chipfit.quantize`.

        Raises:
            UnknownNameError: no such method, or no such option of it.
            ConfigError: something that is no method.
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
        return Hosted(found, options)
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
    """Quantize a PyTorch module and return what trains.

    Args:
        qat_config: what trains weights and activations; straight-through rounding when omitted.
        in_model, representative_data_gen, target_resource_utilization, core_config, target_platform_capabilities: as
            of `pytorch_post_training_quantization`.

    Returns:
        The module, in which layers with rounded weights are `PytorchQuantizationWrapper`s and results are stored by
        `PytorchActivationQuantizationHolder`s; train it, then call `..._finalize`. And what there is to know about it.

    Raises:
        UnsupportedError: a method that cannot train a tensor; see also `pytorch_post_training_quantization`.
        UnknownNameError: no such method.
    """
    who = f"{framework_prefix(in_model)}_{_NAME}"
    chosen = check_value(QATConfig | None, qat_config, ConfigError, who, "qat_config") or QATConfig()
    training = chosen.to_training(framework_of(in_model))  # before the work
    options = target_resource_utilization, core_config, target_platform_capabilities
    model, information = quantize_model(_NAME, in_model, representative_data_gen, *options)
    if information.result is None:
        return model, information
    result = information.result.trains(training)
    return _attach_result(result), replace(information, result=result)


@functools.wraps(pytorch_quantization_aware_training_init)
def keras_quantization_aware_training_init(*args: Any, **kwargs: Any) -> tuple[Any, UserInformation, dict[str, type]]:
    """Quantize a Keras 3 model and return what trains; arguments and errors as for PyTorch.

    Returns:
        Also the custom objects with which Keras loads the model when it was saved.
    """
    model, information = pytorch_quantization_aware_training_init(*args, **kwargs)
    layers, training = vars(keras_part("layers")), information.result.training if information.result else None
    hosted = [a for a in (training.weights, training.activations) if isinstance(a, Hosted)] if training else []
    own = {n: c for n, c in layers.items() if n.startswith(("KerasQ", "KerasA"))}
    return model, information, {**own, **{c.__name__: c for a in hosted for c in a.classes}}


def pytorch_quantization_aware_training_finalize(in_model: Any, information: UserInformation | None = None) -> Any:
    """The trained module without what trains: its weights, scales and zero points are those that training left.

    Args:
        in_model: what `..._init` returned, or a copy of it.
        information: what came with it; needed for a model that was loaded from a file.

    Returns:
        A module like that of post-training quantization; `result_of` it exports, verifies and saves.

    Raises:
        PlanError: another model, or training has left a scale that is not positive.
        UnsupportedError: what was trained cannot be deployed.
    """
    origin = _result_behind(in_model, information)
    return _attach_result(replace(origin, _model=in_model).trained())


def result_of(model: Any) -> Result:
    """The result that a model of these facades stands for: plan, report, `export`, `verify`, `save`.

    Raises:
        PlanError: it is of something else, or was trained and not finalized.
    """
    result = _result_behind(model, None)
    result = result if result._model is model else replace(result, _model=model)
    result.refuse_trained("the result of this model")
    return result


keras_quantization_aware_training_finalize = pytorch_quantization_aware_training_finalize  # frameworks differ below
pytorch_quantization_aware_training_init_experimental = pytorch_quantization_aware_training_init
pytorch_quantization_aware_training_finalize_experimental = pytorch_quantization_aware_training_finalize
keras_quantization_aware_training_init_experimental = keras_quantization_aware_training_init
keras_quantization_aware_training_finalize_experimental = keras_quantization_aware_training_finalize


class _ResultLink:
    """Which result a model came from, on the model; copies of the model came from the same one."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def __deepcopy__(self, memo: Any) -> _ResultLink:
        return self


def _attach_result(result: Result) -> Any:
    result.model._chipfit = _ResultLink(result)
    return result.model


def _result_behind(model: Any, information: UserInformation | None) -> Result:
    origin = getattr(model, "_chipfit", None)
    result = origin.result if isinstance(origin, _ResultLink) else information.result if information else None
    if result is None:
        got = type(model).__name__
        allowed = "a model of a facade, or a copy of it"
        hint = "give what came with it: finalize(model, information)"
        raise PlanError("This model does not know which result it came from", got=got, allowed=allowed, hint=hint)
    return result
