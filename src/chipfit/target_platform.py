"""Describe the target hardware: operator sets, quantization options, fusions, and the layers that they stand for."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.facade.target_platform.capabilities import *
from chipfit.facade.target_platform.configs import *
from chipfit.facade.target_platform.files import *
from chipfit.facade.target_platform.model import *
from chipfit.facade.target_platform.targets import *
