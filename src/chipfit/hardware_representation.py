"""The first-generation names of `chipfit.target_platform`."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.mct import hardware_representation as own
from chipfit.mct.hardware_representation import *
from chipfit.mct.names import door
from chipfit.mct.target_platform import capabilities, model
from chipfit.mct.target_platform.capabilities import *
from chipfit.mct.target_platform.configs import QuantizationConfigOptions, QuantizationMethod
from chipfit.mct.target_platform.model import *

__all__ = [*own.__all__, *capabilities.__all__, *model.__all__, "QuantizationConfigOptions", "QuantizationMethod"]

__getattr__ = door(__name__)
