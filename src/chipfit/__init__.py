"""Fit a trained neural network to a chip.

`import chipfit` is quick: torch and everything else loads with the first name that needs it.
"""

import gc
import importlib
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from chipfit import errors as errors
from chipfit._version import PYTHON, TORCH
from chipfit._version import __version__ as __version__
from chipfit.errors import ChipfitError as ChipfitError


def _installed(package: str) -> str:
    """Return the version of a package by its metadata folder, since importlib.metadata loads slowly; "" if unknown."""
    folders = (folder for place in sys.path for folder in Path(place).glob(f"{package}-*.dist-info"))
    return next((folder.stem.partition("-")[2] for folder in folders), "")


def _check_versions() -> None:
    """Raise ImportError for a Python that is too old; warn if the installed torch is."""
    if sys.version_info < PYTHON:
        found, oldest = (".".join(map(str, v)) for v in (sys.version_info[:3], PYTHON))
        raise ImportError(f"chipfit needs Python {oldest} or newer (this is Python {found})")
    torch = _installed("torch")
    if torch and tuple(map(int, re.findall(r"\d+", torch)[:2])) < TORCH:
        oldest = ".".join(map(str, TORCH))
        what = f"chipfit needs torch {oldest} or newer (torch {torch} is installed). Try: pip install 'torch>={oldest}'"
        warnings.warn(what, RuntimeWarning, stacklevel=3)


_check_versions()

_STUB = Path(f"{__file__}i").read_text(encoding="utf-8")
#: public name -> the module that it is in
_HOMES = {
    name: module
    for module, names in re.findall(r"^from (\S+) import ([^(\n]+|[^)]+)", _STUB, re.MULTILINE)
    for name in re.findall(r"as (\w+)", names)
}
#: modules that need no import of their own: users of MCT write `mct.core.QuantizationConfig`
_DOORS = (
    *("constants", "core", "data_generation", "exporter", "framework_info", "gptq", "hardware_representation"),
    *("pruning", "ptq", "qat", "quantize_fx"),
    *("target_platform", "target_platform_capabilities", "trainable_infrastructure", "xquant"),
)
_MODULES = {
    **{name: f"chipfit.{name}" for name in (*_DOORS, "training")},
    "network_editor": "chipfit.core.network_editor",
}

#: names that MCT has at the top as well
_TOP = {
    "DefaultDict": "chipfit.target_platform",
    "get_target_platform_capabilities": "chipfit.target_platform",
    "keras_load_quantized_model": "chipfit.trainable_infrastructure",
    "set_log_folder": "chipfit.mct.log",
}

__all__ = sorted(_HOMES)


def _load(module: str) -> ModuleType:
    """Import a module with garbage collection paused: it would walk all of torch's objects, and find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collects:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _load(_MODULES[name])
    home = _HOMES.get(name) or _TOP.get(name)
    if home is None:
        raise importlib.import_module("chipfit.mct.names").missing_name("chipfit", name)
    return getattr(_load(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
