"""Configurations of the post-training facades, the network editor and bit widths chosen by hand."""

from chipfit.core import network_editor as network_editor
from chipfit.mct.core.config import *  # noqa: F403 -- a door has what its room has
from chipfit.mct.names import door
from chipfit.mct.ptq import keras_resource_utilization_data as keras_resource_utilization_data
from chipfit.mct.ptq import pytorch_resource_utilization_data as pytorch_resource_utilization_data

__getattr__ = door(__name__)
