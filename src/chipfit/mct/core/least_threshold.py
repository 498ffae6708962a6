"""A lower bound on the thresholds that a range rule chooses."""

from dataclasses import dataclass, replace
from typing import Any

from chipfit.quantizers.grids import Grid
from chipfit.ranges import Rule, needs_histogram, rule_of, statistic_of
from chipfit.ranges.qparams import QParams, finish_scale
from chipfit.ranges.search import Sample


@dataclass(frozen=True)
class AtLeast:
    """A range rule whose thresholds on symmetric grids are those of another rule, or `threshold` if that is more."""

    rule: Rule
    threshold: float  #: in the unit of the tensor

    @property
    def statistic(self) -> str:
        return statistic_of(self.rule)

    @property
    def histogram(self) -> bool:
        return needs_histogram(self.rule)

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for values of C channels."""
        found: Any = rule_of(self.rule)(sample, grid)
        if not grid.symmetric:
            return found  # type: ignore[no-any-return]
        least = self.threshold / (-grid.qmin or grid.qmax + 1)
        return replace(found, scale=finish_scale(found.scale.clamp_min(least), grid))
