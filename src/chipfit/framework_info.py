"""The class that describes the layers of a framework, with the name and place of MCT."""

from chipfit.mct.framework_info import *  # noqa: F403 -- a door has what its room has
from chipfit.mct.names import door

__getattr__ = door(__name__)
