"""What helps a network train in few bits: distillation, averages of parameters, and what else stands in this folder.

Nothing here is needed: the model of a `Result` trains in any loop. See docs/training.md.
"""

from chipfit.training.averaging import EMA
from chipfit.training.batch_norm import reestimate
from chipfit.training.distillation import Distillation, divergence, teacher
from chipfit.training.gradual import Gradual
from chipfit.training.oscillation import Oscillations, dampening
from chipfit.training.scalars import write_scales, writer

__all__ = [
    "EMA",
    "Distillation",
    "Gradual",
    "Oscillations",
    "dampening",
    "divergence",
    "reestimate",
    "teacher",
    "write_scales",
    "writer",
]
