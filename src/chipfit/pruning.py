"""Structured pruning under the names of the Model Compression Toolkit."""

from chipfit.mct.pruning import *  # noqa: F403 -- a door has what its room has
