"""Configurations of the post-training facades, the network editor and bit widths chosen by hand."""

from chipfit.core import network_editor as network_editor
from chipfit.facade.core.config import *  # noqa: F403 -- a door has what its room has
