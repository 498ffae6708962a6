"""Gradient post-training quantization under the names of the Model Compression Toolkit."""

from chipfit.mct.gptq import *  # noqa: F403 -- a door has what its room has
from chipfit.mct.names import door

__getattr__ = door(__name__)
