"""Helpers for training with few bits: distillation, averages of parameters, damping of oscillations and more.

All are optional: the model of a `Result` trains in any loop. See docs/training.md.
"""

from chipfit.training.averaging import EMA
from chipfit.training.batch_norm import reestimate
from chipfit.training.distillation import Distillation, divergence, teacher
from chipfit.training.gradual import Gradual
from chipfit.training.oscillation import Oscillations, dampening
from chipfit.training.scalars import write_scales, writer

__all__ = ["EMA", "Distillation", "Gradual", "Oscillations", "dampening", "divergence"]
__all__ += ["reestimate", "teacher", "write_scales", "writer"]
