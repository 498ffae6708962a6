"""NNIE: logarithmic codes, rounded on the logarithm."""

from dataclasses import dataclass, replace
from typing import Any

from chipfit.quantizers.algorithm import FixedGrid, Numbers, Tensors, Weight, require_table, threshold
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import ste
from chipfit.quantizers.stored import Stored
from chipfit.quantizers.tables import log_table
from chipfit.registry import register


@register("training", "nnie_log")
@dataclass(frozen=True)
class NNIE(FixedGrid):
    """Logarithmic quantization of HiSilicon's NNIE. Source: `platform/builtin/nnie.yaml`, [M1].

    Levels are c 2^(-k / 16), one fewer of negative ones, and 0, which magnitudes below half the least become; 16 log2 c
    is a whole number. Every gradient passes, saturated or not. On 8 bits with c = 4, [5, 0.9, 0.02, 0.001] becomes
    [4, 0.917004, 0.020263, 0].

    Args:
        octave: codes for each power of two.
    """

    octave: int = 16

    def refuses(self, grid: Grid, role: str) -> str:
        why = require_table(grid, "log", least=3)
        if not why and 1 << grid.bits - 1 < 4 * self.octave:
            return f"{self.octave} codes for each power of two are too many for {grid.bits} bits"
        if not why and grid.table is not None and not set(self.grid(grid).table or ()) <= set(grid.table):
            return f"it has {self.octave} codes for each power of two, and the chip has others"
        return why

    def grid(self, grid: Grid) -> Grid:
        table = log_table(2.0 ** (1 / self.octave), grid.bits)
        zero = len(table) // 2
        return replace(grid, kind="log", table=table[: zero - 1] + table[zero:], qmin=-1, qmax=1)

    def constants(self, stored: Stored, x: Weight) -> Tensors:
        return {**super().constants(stored, x), "scale": threshold(stored)}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        return ops.power(2.0, ops.round(self.octave * ops.log2(p["scale"])) / self.octave), p["zero_point"]

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        return ste(ops, x, ops.fake_quantize(ops.stop_gradient(x), s, z, grid))
