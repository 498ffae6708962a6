"""Names of quantization parameters, and the least threshold, as users of the Model Compression Toolkit import them."""

from typing import Any

from chipfit.mct.names import missing_name
from chipfit.mct.target_platform.configs import FLOAT_BITWIDTH as FLOAT_BITWIDTH
from chipfit.mct.trainable.constants import *  # noqa: F403 -- a door has what its room has


def __getattr__(name: str) -> Any:
    """Raise the error that names the equivalent of a name of MCT."""
    raise missing_name(__name__, name)
