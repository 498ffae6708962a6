"""What is known about a framework's layers, under the names of the Model Compression Toolkit."""

from chipfit.facade.framework_info import *  # noqa: F403 -- a door has what its room has
