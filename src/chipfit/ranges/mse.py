"""The least mean squared error."""

from chipfit.ranges.search import ErrorRange
from chipfit.registry import register


@register("range", "mse")
class MseRange(ErrorRange):
    """The least mean squared error between values and quantized values, among ranges inside the full range."""

    p = 2.0
