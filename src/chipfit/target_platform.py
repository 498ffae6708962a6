"""Describe the target hardware: operator sets, quantization options, fusions, and the layers that they stand for."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.mct.names import door
from chipfit.mct.target_platform import capabilities, configs, files, model, targets
from chipfit.mct.target_platform.capabilities import *
from chipfit.mct.target_platform.configs import *
from chipfit.mct.target_platform.files import *
from chipfit.mct.target_platform.model import *
from chipfit.mct.target_platform.targets import *

__all__ = [*capabilities.__all__, *configs.__all__, *files.__all__, *model.__all__, *targets.__all__]

__getattr__ = door(__name__)
