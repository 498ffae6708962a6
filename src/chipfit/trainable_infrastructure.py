"""Trainable quantizers for single layers and whole models, under the names of MCT."""

# ruff: noqa: F403 -- a door re-exports all names of its modules
from typing import Any

from chipfit.frameworks import part
from chipfit.frameworks.torch.modules import PytorchActivationQuantizationHolder as PytorchActivationQuantizationHolder
from chipfit.frameworks.torch.modules import PytorchQuantizationWrapper as PytorchQuantizationWrapper
from chipfit.mct.names import missing_name
from chipfit.mct.trainable.algorithm_quantizers import *
from chipfit.mct.trainable.algorithm_quantizers import keras_layers
from chipfit.mct.trainable.base import *
from chipfit.mct.trainable.configs import *
from chipfit.quantizers import inferable as pytorch_inferable_quantizers  # noqa: F401
from chipfit.quantizers.inferable import BaseInferableQuantizer as BaseInferableQuantizer


def __getattr__(name: str) -> Any:
    """Load names that need Keras when they are first used."""
    if name == "keras_inferable_quantizers":
        return part("keras", "inferable")
    if name in ("KerasActivationQuantizationHolder", "KerasQuantizationWrapper", "KerasTrainableQuantizationWrapper"):
        return getattr(keras_layers(), name.replace("Trainable", ""))
    if name == "keras_load_quantized_model":
        return part("keras", "loading").load_quantized
    raise missing_name(__name__, name)
