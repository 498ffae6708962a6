"""APoT: levels that are sums of powers of two."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from chipfit.quantizers.algorithm import Numbers, Tensors, Weight, require_table, threshold
from chipfit.quantizers.algorithms.lsq import Scaled
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


def magnitudes(bits: int) -> tuple[int, ...]:
    """Return the levels of magnitudes of a width, ascending integers; divided by the greatest they lie in [0, 1].

    A term of two bits is 0 or one of three powers of two, an odd bit's term 0 or one power; powers are dealt in turn.
    Source: eqs. 4 and 5 of the paper.

    >>> [magnitudes(b) for b in (2, 3)]
    [(0, 1, 2, 4), (0, 1, 2, 3, 4, 6, 8, 10)]
    """
    n, odd = divmod(bits, 2)
    turns = [*range(n)] * 2 + [n] * odd + [*range(n)]
    terms = [[0, *(1 << len(turns) - k - 1 for k, t in enumerate(turns) if t == term)] for term in range(n + odd)]
    return tuple(sorted(sum(chosen) for chosen in itertools.product(*terms)))


@register("training", "apot")
@dataclass(frozen=True)
class APoT(Scaled):
    """Additive powers of two. Source: Li et al. 2020, arXiv:1909.13144, eqs. 4 to 8.

    x / alpha is rounded to the nearest level and multiplied by alpha, which trains, from 3 for weights and from 6 for
    activations. Weights are standardised before (eq. 8), which a normalization behind each layer must make up for.
    With alpha = 3 and 3 bits of magnitude, levels 0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8 and 1, [0.95, -2, 5] becomes
    [0.9, -1.8, 3].

    Args:
        use_grad_scaling: multiply the gradient of alpha by that factor of LSQ; the paper gives alpha its own rate.
        activations: the form for activations.
    """

    scale_invariant = True

    activations: bool = False

    def grid(self, grid: Grid) -> Grid:
        m = magnitudes(grid.bits - 1 if grid.qmin < 0 else grid.bits)
        table = tuple(float(v) for v in ((*(-v for v in reversed(m[1:])), *m) if grid.qmin < 0 else m))
        if grid.kind == "lut":
            return replace(grid, table=table)
        return replace(grid, kind="lut", table=table, qmin=int(table[0]), qmax=int(table[-1]))

    def refuses(self, grid: Grid, role: str) -> str:
        if why := require_table(grid, "lut", least=2):
            return why
        own = self.grid(grid)
        if grid.kind == "lut" and (len(own.table or ()) > (grid.entries or 0) or (own.table or (0,))[-1] > grid.qmax):
            return "its levels do not fit into the look-up table"
        return ""

    def alpha(self, stored: Stored, x: Weight) -> torch.Tensor:
        """Return the initial alpha, [] or [C]."""
        return torch.full_like(stored.scale, 6.0 if x is None else 3.0)

    def init(self, stored: Stored, x: Weight) -> Tensors:
        return {"scale": self.alpha(stored, x) / (self.grid(stored.grid).table or (1.0,))[-1]}

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        if self.activations:
            return x
        mean, spread = _moments(ops, x)
        return (x - mean) / spread


@register("training", "apot_rescaled")
@dataclass(frozen=True)
class APoTRescaled(APoT):
    """Additive powers of two in the plan's range. Source: Li et al. 2020, arXiv:1909.13144, eqs. 4 to 7.

    Standardised weights get their initial mean and deviation again, and alpha starts from the plan's range: at first
    nothing but the levels changes, and no normalization is needed.
    """

    def constants(self, stored: Stored, x: Weight) -> Tensors:
        given = super().constants(stored, x)
        if x is not None:
            mean, spread = (v.expand_as(stored.scale) for v in _moments(torch, x.detach().float()))
            given |= {"mean": mean, "spread": spread}
        return given

    def alpha(self, stored: Stored, x: Weight) -> torch.Tensor:
        return threshold(stored)

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        return x if self.activations else super().reals(ops, x, p, grid) * p["spread"] + p["mean"]


def _moments(ops: Any, x: Any) -> tuple[Any, Any]:
    """Return the mean and the standard deviation, above 0, of all of x."""
    mean = ops.mean(x)
    return mean, ops.sqrt(ops.mean((x - mean) ** 2) + 1e-10)
