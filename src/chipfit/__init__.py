"""Fit a trained neural network to a chip.

`import chipfit` is quick: torch and everything else loads with the first name that needs it.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from chipfit import errors as errors
from chipfit._version import __version__ as __version__
from chipfit.errors import ChipfitError as ChipfitError

_STUB = Path(f"{__file__}i").read_text(encoding="utf-8")
#: public name -> the module that it is in
_HOMES = {
    name: module
    for module, names in re.findall(r"^from (\S+) import ([^(\n]+|[^)]+)", _STUB, re.MULTILINE)
    for name in re.findall(r"as (\w+)", names)
}
#: modules that need no import of their own: users of MCT write `mct.core.QuantizationConfig`
_DOORS = (
    *("constants", "core", "exporter", "framework_info", "gptq", "hardware_representation", "pruning", "ptq"),
    *("qat", "quantize_fx", "target_platform", "target_platform_capabilities", "trainable_infrastructure"),
)
_MODULES = {
    **{name: f"chipfit.{name}" for name in (*_DOORS, "training")},
    "network_editor": "chipfit.core.network_editor",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'chipfit' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
