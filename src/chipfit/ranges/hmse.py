"""Least squared error weighed by the Hessian."""

from chipfit.ranges.search import ErrorRange
from chipfit.registry import register


@register("range", "hmse")
class HmseRange(ErrorRange):
    """Least sum of h (x - q)^2, searched over ranges inside the full one, where h says how much an error there matters.

    h is the diagonal of the Hessian of the network's own outputs, see `chipfit.rounding.importance`; where there is
    none, every error counts alike, as in `mse`. Source: Gordon et al. 2023, arXiv:2309.11531, metric Hmse.
    """

    p = 2.0
    statistic = "importance"
