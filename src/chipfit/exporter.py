"""Export of quantized models under the names of the Model Compression Toolkit."""

from chipfit.mct.exporter import *  # noqa: F403 -- a door has what its room has
