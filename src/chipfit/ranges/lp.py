"""The least mean |error|^p."""

from dataclasses import dataclass

from chipfit.ranges.search import ErrorRange
from chipfit.registry import register


@register("range", "lp")
@dataclass(frozen=True)
class LpRange(ErrorRange):
    """The least mean |x - q|^p among ranges inside the full range; p = 2 is the mean squared error."""

    p: float = 2.4  # type: ignore[misc]  # an option of this rule alone
