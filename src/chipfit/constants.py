"""Names of quantization parameters, and the least threshold, as users of the Model Compression Toolkit import them."""

from chipfit.mct.trainable.constants import *  # noqa: F403 -- a door has what its room has
