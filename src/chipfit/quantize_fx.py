"""Hardware-aware training settings under the names of MQBench: qconfigs, quantizers, observers, prepare_qat_fx."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.facade.quantize_fx import handover, observers, prepare, quantizers, settings
from chipfit.facade.quantize_fx.handover import *
from chipfit.facade.quantize_fx.observers import *
from chipfit.facade.quantize_fx.prepare import *
from chipfit.facade.quantize_fx.quantizers import *
from chipfit.facade.quantize_fx.settings import *

__all__ = [*handover.__all__, *observers.__all__, *prepare.__all__, *quantizers.__all__, *settings.__all__]
