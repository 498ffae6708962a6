"""The names of `chipfit.target_platform`, under the module name of later versions of MCT."""

from chipfit.mct.names import door
from chipfit.target_platform import *  # noqa: F403 -- a door has what its room has

__getattr__ = door(__name__)
