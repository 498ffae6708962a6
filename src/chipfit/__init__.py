"""Fit a trained neural network to a chip.

`import chipfit` is quick: torch and everything else loads with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from chipfit import errors as errors
from chipfit._version import __version__ as __version__
from chipfit.errors import ChipfitError as ChipfitError

if TYPE_CHECKING:
    from chipfit.facade.framework_info import FrameworkInfo as FrameworkInfo
    from chipfit.facade.hardware_representation import get_model as get_model
    from chipfit.facade.ptq import keras_post_training_quantization as keras_post_training_quantization
    from chipfit.facade.ptq import pytorch_post_training_quantization as pytorch_post_training_quantization
    from chipfit.facade.qat import *  # noqa: F403
    from chipfit.facade.target_platform.capabilities import DefaultDict as DefaultDict
    from chipfit.facade.target_platform.targets import (
        get_target_platform_capabilities as get_target_platform_capabilities,
    )
    from chipfit.frameworks import capture as capture
    from chipfit.pipeline import Lint as Lint
    from chipfit.pipeline import Result as Result
    from chipfit.pipeline import lint as lint
    from chipfit.pipeline import load as load
    from chipfit.pipeline import quantize as quantize
    from chipfit.plan.record import Plan as Plan
    from chipfit.platform.load import load as load_platform  # noqa: F401
    from chipfit.platform.schema import Platform as Platform
    from chipfit.report.report import Report as Report
    from chipfit.search.limits import Limits as Limits
    from chipfit.settings import BEST as BEST
    from chipfit.settings import Settings as Settings
    from chipfit.verify import Verification as Verification

_QAT = [
    f"{framework}_quantization_aware_training_{step}{suffix}"
    for framework in ("keras", "pytorch")
    for step in ("finalize", "init")
    for suffix in ("", "_experimental")
]
#: module -> its public names
_HOMES = {
    "facade.qat": " ".join(_QAT),
    "facade.ptq": "keras_post_training_quantization pytorch_post_training_quantization",
    "facade.framework_info": "FrameworkInfo",
    "facade.hardware_representation": "get_model",
    "facade.target_platform.capabilities": "DefaultDict",
    "facade.target_platform.targets": "get_target_platform_capabilities",
    "frameworks": "capture",
    "pipeline": "Lint Result lint load quantize",
    "plan.record": "Plan",
    "platform.load": "load_platform=load",
    "platform.schema": "Platform",
    "report.report": "Report",
    "search.limits": "Limits",
    "settings": "BEST Settings",
    "verify": "Verification",
}
#: public name -> (module, name there)
_NAMES = {
    name: (f"chipfit.{module}", there or name)
    for module, words in _HOMES.items()
    for name, _, there in (word.partition("=") for word in words.split())
}

#: modules that need no import of their own, as users of the predecessor write `mct.core.QuantizationConfig`
_DOORS = (
    *("constants", "core", "framework_info", "hardware_representation", "ptq", "qat", "quantize_fx"),
    *("target_platform", "target_platform_capabilities", "trainable_infrastructure"),
)
_MODULES = {
    **{name: f"chipfit.{name}" for name in (*_DOORS, "training")},
    "network_editor": "chipfit.core.network_editor",
}

__all__ = sorted([*_NAMES, "ChipfitError", "__version__", "errors"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _NAMES:
        raise AttributeError(f"module 'chipfit' has no attribute '{name}'")
    module, there = _NAMES[name]
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return sorted(__all__)
