"""Names of weight attributes, under the module name of MCT."""

from typing import Any

from chipfit.mct.names import missing_name
from chipfit.mct.target_platform.configs import *  # noqa: F403 -- a door has what its room has


def __getattr__(name: str) -> Any:
    """Raise the error that names the equivalent of a name of MCT."""
    raise missing_name(__name__, name)
