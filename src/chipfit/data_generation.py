"""Data generation under the names of the Model Compression Toolkit."""

from chipfit.mct.data_generation import *  # noqa: F403 -- a door has what its room has
