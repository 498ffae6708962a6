"""The class that describes the layers of a framework, with the name and place of MCT."""

from typing import Any

from chipfit.mct.framework_info import *  # noqa: F403 -- a door has what its room has
from chipfit.mct.names import missing_name


def __getattr__(name: str) -> Any:
    """Raise the error that names the equivalent of a name of MCT."""
    raise missing_name(__name__, name)
