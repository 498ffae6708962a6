"""Fit a trained neural network to a chip.

`import chipfit` is quick: torch and everything else loads with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from chipfit import errors
from chipfit._version import __version__
from chipfit.errors import ChipfitError

if TYPE_CHECKING:
    from chipfit.facade.framework_info import FrameworkInfo
    from chipfit.facade.hardware_representation import get_model
    from chipfit.facade.ptq import keras_post_training_quantization, pytorch_post_training_quantization
    from chipfit.facade.target_platform.capabilities import DefaultDict
    from chipfit.facade.target_platform.targets import get_target_platform_capabilities
    from chipfit.frameworks import capture
    from chipfit.pipeline import Lint, Result, lint, load, quantize
    from chipfit.plan.record import Plan
    from chipfit.platform.load import load as load_platform
    from chipfit.platform.schema import Platform
    from chipfit.report.report import Report
    from chipfit.settings import Settings
    from chipfit.verify import Verification

#: public name -> (module, name there)
_HOMES = {
    **{name: ("chipfit.pipeline", name) for name in ("Lint", "Result", "lint", "load", "quantize")},
    "Plan": ("chipfit.plan.record", "Plan"),
    "Platform": ("chipfit.platform.schema", "Platform"),
    "Report": ("chipfit.report.report", "Report"),
    "Verification": ("chipfit.verify", "Verification"),
    "FrameworkInfo": ("chipfit.facade.framework_info", "FrameworkInfo"),
    "DefaultDict": ("chipfit.facade.target_platform.capabilities", "DefaultDict"),
    "Settings": ("chipfit.settings", "Settings"),
    **{
        name: ("chipfit.facade.ptq", name)
        for name in ("keras_post_training_quantization", "pytorch_post_training_quantization")
    },
    "capture": ("chipfit.frameworks", "capture"),
    "get_model": ("chipfit.facade.hardware_representation", "get_model"),
    "get_target_platform_capabilities": ("chipfit.facade.target_platform.targets", "get_target_platform_capabilities"),
    "load_platform": ("chipfit.platform.load", "load"),
}

#: modules that need no import of their own, as users of the predecessor write `mct.core.QuantizationConfig`
_MODULES = {
    **{
        name: f"chipfit.{name}"
        for name in ("core", "framework_info", "hardware_representation", "ptq", "target_platform")
    },
    "network_editor": "chipfit.core.network_editor",
}

__all__ = [
    "ChipfitError",
    "DefaultDict",
    "FrameworkInfo",
    "Lint",
    "Plan",
    "Platform",
    "Report",
    "Result",
    "Settings",
    "Verification",
    "__version__",
    "capture",
    "errors",
    "get_model",
    "get_target_platform_capabilities",
    "keras_post_training_quantization",
    "lint",
    "load",
    "load_platform",
    "pytorch_post_training_quantization",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'chipfit' has no attribute '{name}'")
    module, there = _HOMES[name]
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return sorted(__all__)
