"""Describe the target hardware, under the longer names of the Model Compression Toolkit."""

from typing import Any

from chipfit import target_platform as target_platform
from chipfit.mct.names import missing_name
from chipfit.target_platform_capabilities import constants as constants


def __getattr__(name: str) -> Any:
    """Raise the error that names the equivalent of a name of MCT."""
    raise missing_name(__name__, name)
