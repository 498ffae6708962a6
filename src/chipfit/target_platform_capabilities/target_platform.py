"""The same as `chipfit.target_platform`."""

from chipfit.target_platform import *  # noqa: F403 -- a door has what its room has
