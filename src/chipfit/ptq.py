"""Post-training quantization under the names of the Model Compression Toolkit."""

from chipfit.mct.names import door
from chipfit.mct.ptq import *  # noqa: F403 -- a door has what its room has

__getattr__ = door(__name__)
