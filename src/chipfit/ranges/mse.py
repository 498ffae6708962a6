"""Least mean squared error."""

from chipfit.ranges.search import ErrorRange
from chipfit.registry import register


@register("range", "mse")
class MseRange(ErrorRange):
    """Least mean squared error between the values and their codes, searched over ranges inside the full one."""

    p = 2.0
