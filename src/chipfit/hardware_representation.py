"""The first-generation names of `chipfit.target_platform`."""

# ruff: noqa: F403 -- a door has what its rooms have
from chipfit.facade.target_platform.capabilities import *
from chipfit.facade.target_platform.configs import *
from chipfit.facade.target_platform.model import *

from chipfit.facade.hardware_representation import *  # isort: skip -- its names come in place of those above
