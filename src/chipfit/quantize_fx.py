"""Hardware-aware training settings under the names of MQBench: qconfigs, quantizers, observers, prepare_qat_fx."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.facade.quantize_fx import deployment, observers, prepare, quantizers, settings
from chipfit.facade.quantize_fx.deployment import *
from chipfit.facade.quantize_fx.observers import *
from chipfit.facade.quantize_fx.prepare import *
from chipfit.facade.quantize_fx.quantizers import *
from chipfit.facade.quantize_fx.settings import *

__all__ = [*deployment.__all__, *observers.__all__, *prepare.__all__, *quantizers.__all__, *settings.__all__]
