"""Names of the Model Compression Toolkit that are called otherwise here, or do not exist."""

from collections.abc import Callable
from typing import Any

from chipfit.errors import ChipfitError

_SEARCH, _LIMITS = "core.MixedPrecisionQuantizationConfig", "core.ResourceUtilization"
_EDITOR = "core.network_editor.Change"
_INTERNAL = "none: a Result has `graph`, `plan` and `report`"

#: name of any release of MCT -> what to use, as a path below `chipfit` or, after "none: ", in words
EQUIVALENTS: dict[str, str] = {
    "BaseKerasInferableQuantizer": "trainable_infrastructure.BaseInferableQuantizer",
    "BasePyTorchInferableQuantizer": "trainable_infrastructure.BaseInferableQuantizer",
    "ChangeActivationQuantConfigAttr": f"{_EDITOR}CandidatesActivationQuantConfigAttr",
    "ChangeActivationQuantizationMethod": f"{_EDITOR}CandidatesActivationQuantizationMethod",
    "ChangeCandidtaesWeightsQuantizationMethod": f"{_EDITOR}CandidatesWeightsQuantizationMethod",
    "ChangeWeightsQuantConfigAttr": f"{_EDITOR}CandidatesWeightsQuantConfigAttr",
    "ChannelAxis": "none: chipfit knows the axis of channels",
    "CustomOpsetLayers": "core.QuantizationConfig(custom_tpc_opset_to_layer={set: layers})",
    "FolderImageLoader": "none: a function that yields lists of arrays, or any iterable of batches",
    "FrameworkInfo": "framework_info.FrameworkInfo",
    "GPTQHessianWeightsConfig": "gptq.GPTQHessianScoresConfig",
    "GPTQQuantizerConfig": "gptq.GradientPTQConfig",
    "GradientPTQConfigV2": "gptq.GradientPTQConfig",
    "Graph": _INTERNAL,
    "GumbelConfig": "gptq.GradientPTQConfig",
    "KerasExportMode": "none: `Result.export(path, format)`",
    "KnowledgeDistillationConfig": "gptq.GradientPTQConfig",
    "Logger": "none: the logger 'chipfit' of `logging`, and set_log_folder",
    "MixedPrecisionQuantizationConfigV2": _SEARCH,
    "MpMetricNormalization": "none: losses are always normalized",
    "OperatorSetNames": "none: an operator set is named by text, such as 'Conv'",
    "PyTorchExportMode": "none: `Result.export(path, format)`",
    "SoftQuantizerConfig": "gptq.GradientPTQConfig",
    "TFLiteExportMode": "none: `Result.export(path, format)`",
    "ThresholdSelectionMethod": "core.QuantizationErrorMethod",
    "get_fully_quantized_keras_model": "none: `Result.model`",
    "keras_gradient_post_training_quantization_experimental": "gptq.keras_gradient_post_training_quantization",
    "keras_kpi_data": "core.keras_resource_utilization_data",
    "keras_kpi_data_experimental": "core.keras_resource_utilization_data",
    "keras_post_training_quantization_experimental": "ptq.keras_post_training_quantization",
    "keras_post_training_quantization_mixed_precision": f"ptq.keras_post_training_quantization with {_LIMITS}",
    "mixed_precision_quantization_config": _SEARCH,
    "power_of_two_constraint": "target_platform.QuantizationMethod.POWER_OF_TWO",
    "pytorch_gradient_post_training_quantization_experimental": "gptq.pytorch_gradient_post_training_quantization",
    "pytorch_kpi_data": "core.pytorch_resource_utilization_data",
    "pytorch_kpi_data_experimental": "core.pytorch_resource_utilization_data",
    "pytorch_post_training_quantization_experimental": "ptq.pytorch_post_training_quantization",
    "pytorch_post_training_quantization_mixed_precision": f"ptq.pytorch_post_training_quantization with {_LIMITS}",
    "quantization_config": "core.QuantizationConfig",
}


class OtherNameError(ChipfitError, ImportError):
    """A name of MCT is another one here; the message has it. An ImportError, so that `from` imports show it."""


def missing_name(module: str, name: str) -> Exception:
    """Return the error about a name that a module lacks.

    Args:
        module: full name of the module.
    """
    to = EQUIVALENTS.get(name)
    if to is None:
        return AttributeError(f"module '{module}' has no attribute '{name}'")
    none, _, words = to.partition("none: ")
    hint = words if none == "" else f"chipfit.{to}"
    return OtherNameError(f"'{name}' of MCT has another name in chipfit", where=module, hint=hint)


def door(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of MCT's names, which raises the error about a name that it lacks."""

    def missing(name: str) -> Any:
        raise missing_name(module, name)

    return missing
