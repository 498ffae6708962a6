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
    from chipfit.frameworks import capture
    from chipfit.pipeline import Lint, Result, lint, load, quantize
    from chipfit.plan import Plan
    from chipfit.platform.load import load as load_platform
    from chipfit.platform.schema import Platform
    from chipfit.report.rows import Report
    from chipfit.verify import Verification

#: public name -> (module, name there)
_HOMES = {
    **{name: ("chipfit.pipeline", name) for name in ("Lint", "Result", "lint", "load", "quantize")},
    "Plan": ("chipfit.plan", "Plan"),
    "Platform": ("chipfit.platform.schema", "Platform"),
    "Report": ("chipfit.report.rows", "Report"),
    "Verification": ("chipfit.verify", "Verification"),
    "capture": ("chipfit.frameworks", "capture"),
    "load_platform": ("chipfit.platform.load", "load"),
}

__all__ = ["ChipfitError", "Lint", "Plan", "Platform", "Report", "Result", "Verification", "__version__", "capture", "errors", "lint", "load", "load_platform", "quantize"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chipfit' has no attribute '{name}'")
    module, there = _HOMES[name]
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return sorted(__all__)
