"""Hardware-aware training settings under the names of MQBench: qconfigs, quantizers, observers, prepare_qat_fx."""

# ruff: noqa: F403 -- a door has what its rooms have
from typing import Any

from chipfit.errors import UnknownNameError
from chipfit.mqbench import by_platform, deployment, observers, prepare, quantizers, reconstruction, settings
from chipfit.mqbench.by_platform import *
from chipfit.mqbench.deployment import *
from chipfit.mqbench.observers import *
from chipfit.mqbench.prepare import *
from chipfit.mqbench.quantizers import *
from chipfit.mqbench.reconstruction import *
from chipfit.mqbench.settings import *

__all__ = [
    *by_platform.__all__,
    *deployment.__all__,
    *observers.__all__,
    *prepare.__all__,
    *quantizers.__all__,
    *reconstruction.__all__,
    *settings.__all__,
]


def __getattr__(name: str) -> Any:
    """Raise an error that names the equivalent of a name of MQBench which is not here."""
    replaced = by_platform.tables()["replaced"]
    if name in replaced:
        raise UnknownNameError("name of MQBench in chipfit.quantize_fx", name, __all__, hint=f"use {replaced[name]}")
    raise AttributeError(f"module 'chipfit.quantize_fx' has no attribute '{name}'")
