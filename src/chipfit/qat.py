"""Quantization-aware training under the names of the Model Compression Toolkit."""

from chipfit.mct.names import door
from chipfit.mct.qat import *  # noqa: F403 -- a door has what its room has

__getattr__ = door(__name__)
