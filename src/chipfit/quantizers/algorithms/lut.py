"""Look-up tables: levels and scale train."""

from dataclasses import dataclass
from typing import Any

import torch

from chipfit.quantizers.algorithm import Numbers, Tensors, Weight, require_table
from chipfit.quantizers.algorithms.lsq import Scaled
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp, scale_gradient, ste
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "lut")
@dataclass(frozen=True)
class LUT(Scaled):
    """Look-up tables whose levels and scale train. Source: Han et al. 2016, arXiv:1510.00149, section 3.

    A value is rounded to the nearest level. The gradient of a level is the sum of the gradients of its values; a level
    remains one of the integers that the chip's table can hold, and 0 stays 0. Levels start from the plan's, which
    calibration fitted (one-dimensional k-means, `tables.fit`), and train in the tensor's unit, multiplied by the mean
    of the initial scales. The scale has the gradients of LSQ. With the table -4, 0, 1, 4 and s = 0.5, [0.3, 1.2, 9]
    becomes [0.5, 0.5, 2]; ds = (1 - 0.6) + (1 - 2.4) + 4, and the gradient of level 1, which starts as 0.5, is 2.

    Args:
        use_grad_scaling: multiply the gradient of the scale by the factor of LSQ, and that of a level by the root of
            levels per value.
        learn_levels: train the levels if the chip's table is free; otherwise they only follow the scale.
    """

    vectors = ("levels",)

    learn_levels: bool = True

    def refuses(self, grid: Grid, role: str) -> str:
        if grid.table is None:
            return "the codes of the format are integers; it needs a look-up table"
        return require_table(grid, "lut", least=1)

    def constants(self, stored: Stored, x: Weight) -> Tensors:
        return {**super().constants(stored, x), "unit": torch.full_like(stored.scale, float(stored.scale.mean()))}

    def init(self, stored: Stored, x: Weight) -> Tensors:
        p, grid = super().init(stored, x), stored.grid
        if self.learn_levels and grid.entries and grid.table:
            p["levels"] = torch.tensor(grid.table) * stored.scale.mean()
        return p

    def table(self, ops: Any, p: Numbers, grid: Grid) -> Any:
        if "levels" not in p:
            return None
        v = clamp(ops, p["levels"] / ops.mean(p["unit"]), float(grid.qmin), float(grid.qmax))
        v = ops.where(ops.constant(grid.table or (), v) == 0, ops.zeros_like(v), v)
        return ops.sort(ste(ops, v, ops.round(v)))

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        if "levels" not in p:
            return super().call(ops, x, p, grid)
        s = self.scaled(ops, self.numbers(ops, p, grid)[0], x, grid)
        shares = (ops.size(p["levels"]) / ops.size(x)) ** 0.5 if self.use_grad_scaling else 1.0
        table = self.table(ops, {**p, "levels": scale_gradient(ops, p["levels"], shares)}, grid)
        known = ops.stop_gradient(table)
        v = clamp(ops, x / s, known[0], known[-1])
        level = ops.entry(table, (known[:-1] + known[1:]) / 2, ops.stop_gradient(v))
        return (ste(ops, v, level) + (level - ops.stop_gradient(level))) * s
