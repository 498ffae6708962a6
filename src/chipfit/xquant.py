"""Reports on quantized models under the names of the Model Compression Toolkit's XQuant."""

from chipfit.mct.xquant import *  # noqa: F403 -- a door has what its room has
