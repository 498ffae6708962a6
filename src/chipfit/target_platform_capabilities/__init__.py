"""Describe the target hardware, under the longer names of the Model Compression Toolkit."""

from chipfit import target_platform as target_platform
from chipfit.mct.names import door
from chipfit.target_platform_capabilities import constants as constants

__getattr__ = door(__name__)
