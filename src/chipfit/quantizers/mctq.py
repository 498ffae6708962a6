"""Quantizers of the package mct_quantizers, by name and arguments, for the grids of a plan.

They have no zero points and no integers: thresholds t stand for the range [-t, t - s], or [0, t - s] of unsigned ones,
with t = 2^(n-1) s or 2^n s, and a uniform quantizer has the ends of its range. A format with free zero points has
uniform quantizers, whatever its zero points are. Source: mct_quantizers 1.7.0.
"""

from typing import Any, NamedTuple, NoReturn

import numpy as np

from chipfit.errors import UnsupportedError
from chipfit.quantizers.grids import Grid, all_codes
from chipfit.quantizers.stored import Stored

#: version of the package whose definitions these are
VERSION = "1.7.0"
_EPSILON = 1e-8  #: which the package adds to thresholds of tables


class Quantizer(NamedTuple):
    """A quantizer of the package."""

    kind: str  #: "POT", "Symmetric", "Uniform", "LUTPOT" or "LUTSymmetric"
    numbers: dict[str, np.ndarray]  #: thresholds or ends of ranges, [1] or [C]; values of a table
    settings: dict[str, Any]


def weights_quantizer(name: str, stored: Stored, rank: int) -> Quantizer:
    """Return the quantizer of a weight with this number of axes, whose values lie on the grid already.

    Raises:
        UnsupportedError: the package has none.
    """
    grid, zero = stored.grid, stored.zero_point
    if stored.scale.dim() > 1:
        _refuse(name, "has one scale for each block", "one scale for each tensor or channel")
    scale = np.atleast_1d(stored.scale.numpy())
    channel = {"per_channel": int(stored.scale.dim()), "channel_axis": stored.axis if stored.scale.dim() else 0}
    if grid.kind == "lut":
        return _table(name, grid, scale, channel | {"input_rank": rank})
    _check_integers(name, grid)
    settings = {"num_bits": grid.bits, **channel}
    if grid.symmetric and grid.signed and not zero.any():
        return Quantizer("POT" if grid.pot else "Symmetric", {"threshold": scale * 2.0 ** (grid.bits - 1)}, settings)
    return Quantizer("Uniform", _ends(grid, scale, np.atleast_1d(zero.numpy())), settings)


def activation_quantizer(name: str, stored: Stored) -> Quantizer:
    """Return the quantizer of a result.

    Raises:
        UnsupportedError: the package has none.
    """
    grid, zero = stored.grid, stored.zero_point
    _check_integers(name, grid)
    if stored.scale.dim():
        _refuse(name, "has one scale for each channel", "one scale for each result")
    if (grid.qmin, grid.qmax) != all_codes(grid.bits, grid.signed):
        allowed = "all of {}..{}".format(*all_codes(grid.bits, grid.signed))
        _refuse(name, f"has the integers {grid.qmin}..{grid.qmax}", allowed)
    if grid.rounding != "half_even":
        _refuse(name, f"rounds by the rule {grid.rounding}", "half_even")
    scale, settings = np.atleast_1d(stored.scale.numpy()), {"num_bits": grid.bits}
    if zero or not grid.symmetric:
        return Quantizer("Uniform", _ends(grid, scale, zero.numpy()), settings)
    settings["signed"] = int(grid.signed)
    threshold = scale * 2.0 ** (grid.bits - int(grid.signed))
    return Quantizer("POT" if grid.pot else "Symmetric", {"threshold": threshold}, settings)


def _ends(grid: Grid, scale: np.ndarray, zero: np.ndarray) -> dict[str, np.ndarray]:
    """Return the ends of a range with 2^bits steps; a narrow grid leaves some of them unused."""
    low, high = all_codes(grid.bits, grid.signed)
    return {"min_range": (low - zero) * scale, "max_range": (high - zero) * scale}


def _table(name: str, grid: Grid, scale: np.ndarray, settings: dict[str, Any]) -> Quantizer:
    """Return the quantizer of a look-up table of integers, which stand for thresholds' parts of 2^(width-1)."""
    values, width = np.array(grid.table, np.float32), (grid.qmax - grid.qmin).bit_length()
    if (values % 1).any() or len(values) > 1 << grid.bits or not grid.signed:
        _refuse(name, "has a table with other entries", f"at most {1 << grid.bits} integers of {width} bits")
    numbers: dict[str, np.ndarray] = {"lut_values": values, "threshold": scale * 2.0 ** (width - 1)}
    more = {"num_bits": grid.bits, "lut_values_bitwidth": width, "eps": _EPSILON}
    return Quantizer("LUTPOT" if grid.pot else "LUTSymmetric", numbers, {**settings, **more})


def _check_integers(name: str, grid: Grid) -> None:
    if grid.kind != "int":
        _refuse(name, f"has codes of the kind '{grid.kind}'", "integers; for weights also tables of integers")


def _refuse(name: str, what: str, allowed: str) -> NoReturn:
    hint = "export with format='fake', or JSON encodings (`.json`)"
    raise UnsupportedError(f"'{name}' {what}, for which mct_quantizers has no quantizer", allowed=allowed, hint=hint)
