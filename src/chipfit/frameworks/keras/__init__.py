"""Keras 3, on any of its backends: the second front door. Nothing else in chipfit imports Keras.

Importing this package registers the classes that a saved quantized model is made of.
"""

from chipfit.frameworks.keras.layers import KerasActivationQuantizationHolder, KerasQuantizationWrapper, KerasQuantizer
from chipfit.frameworks.keras.lowerings import CanonicalOperation
from chipfit.frameworks.keras.models import QuantizedModel

__all__ = [
    "CanonicalOperation",
    "KerasActivationQuantizationHolder",
    "KerasQuantizationWrapper",
    "KerasQuantizer",
    "QuantizedModel",
]
