"""Nearest quantized values, at the scales with the least error in each operator's outputs."""

from dataclasses import dataclass
from typing import ClassVar

from chipfit.registry import register
from chipfit.rounding.methods.gptq import Gptq


@register("rounding", "nearest", fits=True)
@dataclass(frozen=True, kw_only=True)
class Nearest(Gptq):
    """GPTQ without error feedback: each weight takes its nearest quantized value."""

    name: ClassVar[str] = "nearest"
    feedback: ClassVar[bool] = False
