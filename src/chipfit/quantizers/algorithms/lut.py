"""Look-up tables: any levels, in units of a scale that trains."""

from dataclasses import dataclass

from chipfit.quantizers.algorithm import of_table
from chipfit.quantizers.algorithms.lsq import Scaled
from chipfit.quantizers.grids import Grid
from chipfit.registry import register


@register("training", "lut")
@dataclass(frozen=True)
class LUT(Scaled):
    """The nearest entry of the plan's table, times a scale that trains, with the gradients of LSQ.

    The levels stay those that calibration fitted to the tensor (one-dimensional k-means, `tables.fit`); they follow the
    scale. With the table -4, 0, 1, 4 and s = 0.5, [0.3, 1.4, 9] becomes [0.5, 0.5, 2]; ds = (1 - 0.6) + (1 - 2.8) + 4
    times g. Source: Han et al. 2016, arXiv:1510.00149, section 3 (shared levels); Esser et al. 2020, arXiv:1902.08153.
    """

    def refuses(self, grid: Grid, role: str) -> str:
        if grid.table is None:
            return "the codes of the format are integers; it needs a look-up table"
        return of_table(grid, "lut", least=1)
