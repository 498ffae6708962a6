"""The least mean absolute error."""

from chipfit.ranges.search import ErrorRange
from chipfit.registry import register


@register("range", "mae")
class MaeRange(ErrorRange):
    """The least mean absolute error between values and quantized values, among ranges inside the full range."""

    p = 1.0
