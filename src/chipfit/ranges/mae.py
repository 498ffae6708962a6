"""Least mean absolute error."""

from chipfit.ranges.search import ErrorRange
from chipfit.registry import register


@register("range", "mae")
class MaeRange(ErrorRange):
    """Least mean absolute error between the values and their codes, searched over ranges inside the full one."""

    p = 1.0
