"""Names of quantization parameters, and the least threshold, as users of the Model Compression Toolkit import them."""

from chipfit.mct.names import door
from chipfit.mct.target_platform.configs import FLOAT_BITWIDTH as FLOAT_BITWIDTH
from chipfit.mct.trainable.constants import *  # noqa: F403 -- a door has what its room has

__getattr__ = door(__name__)
