"""The first-generation names of `chipfit.target_platform`."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.facade.hardware_representation import *
from chipfit.facade.target_platform.capabilities import *
from chipfit.facade.target_platform.configs import QuantizationConfigOptions as QuantizationConfigOptions
from chipfit.facade.target_platform.configs import QuantizationMethod as QuantizationMethod
from chipfit.facade.target_platform.model import *
