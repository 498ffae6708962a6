"""Hardware-aware training settings under the names of MQBench: qconfigs, quantizers, observers, prepare_qat_fx."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.mqbench import deployment, observers, prepare, quantizers, settings
from chipfit.mqbench.deployment import *
from chipfit.mqbench.observers import *
from chipfit.mqbench.prepare import *
from chipfit.mqbench.quantizers import *
from chipfit.mqbench.settings import *

__all__ = [*deployment.__all__, *observers.__all__, *prepare.__all__, *quantizers.__all__, *settings.__all__]
