"""The predecessor's `core`: configurations of the post-training facades, the network editor and bit widths chosen by hand."""

from __future__ import annotations

from chipfit.core import network_editor
from chipfit.core.config import (
    DEFAULTCONFIG,
    BitWidthConfig,
    CoreConfig,
    DebugConfig,
    MixedPrecisionQuantizationConfig,
    QuantizationConfig,
    QuantizationErrorMethod,
    ResourceUtilization,
)

__all__ = [
    "DEFAULTCONFIG",
    "BitWidthConfig",
    "CoreConfig",
    "DebugConfig",
    "MixedPrecisionQuantizationConfig",
    "QuantizationConfig",
    "QuantizationErrorMethod",
    "ResourceUtilization",
    "network_editor",
]
