"""The least squared error weighted by the Hessian."""

from chipfit.ranges.search import ErrorRange
from chipfit.registry import register


@register("range", "hmse")
class HmseRange(ErrorRange):
    """The least sum of h (x - q)^2 among ranges inside the full range, where h is the importance of each error.

    h is the diagonal of the Hessian of the network's outputs, see `chipfit.rounding.fisher`; without it, all errors
    count equally, as in `mse`. Source: Gordon et al. 2023, arXiv:2309.11531, metric Hmse.
    """

    p = 2.0
    statistic = "importance"
