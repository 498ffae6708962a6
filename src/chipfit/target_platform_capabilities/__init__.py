"""Describe the target hardware, under the longer names of the Model Compression Toolkit."""

from chipfit import target_platform as target_platform
