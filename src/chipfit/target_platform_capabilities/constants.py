"""Names of weight attributes, under the module name of MCT."""

from chipfit.mct.names import door
from chipfit.mct.target_platform.configs import *  # noqa: F403 -- a door has what its room has

__getattr__ = door(__name__)
