"""The first-generation names of `chipfit.target_platform`."""

from chipfit.facade.hardware_representation import *  # noqa: F403 -- a door has what its room has
