"""Readers of Resize and Upsample, in the modes that the engine has.

Other nearest modes become a Gather of each axis, other interpolations a linear layer along each axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.read import reads
from chipfit.frameworks.onnx.runtime import OnnxFunction
from chipfit.frameworks.reading import Unreadable, require


@reads("Resize Upsample")
def _resize(c: OnnxCall) -> Any:
    x, mode = c.operand(0), c.attr("mode")
    mode = {"bilinear": "linear"}.get(mode, mode)
    old = c.node.op_type == "Upsample" or c.opset < 11
    axes = c.attr("axes")
    axes = [a % x.rank for a in axes] if axes else [*range(x.rank)]
    asked = None if old else c.optional(3)
    sizes, scales = (None, c.numbers("scales", 1 if old else 2)) if asked is None else _asked(x, asked, axes)
    require(c.attr("keep_aspect_ratio_policy") in (None, "stretch"))
    shape = [*x.shape]
    factors: list[float] = [1.0] * x.rank
    for k, a in enumerate(axes):
        if sizes:
            factors[a] = 1.0 if shape[a] == sizes[k] else sizes[k] / shape[a] if shape[a] else math.nan
        elif scales:
            factors[a] = scales[k]
    results = [
        sizes[axes.index(a)] if sizes and a in axes else s and _scaled(s, factors[a]) for a, s in enumerate(shape)
    ]
    if not sizes and any(s and r != math.floor(s * f) for s, r, f in zip(shape, results, factors, strict=True)):
        sizes = results  # the engine would round in float64
        factors = [r / s if s and r else f for s, r, f in zip(shape, results, factors, strict=True)]
        scales = None
    changed = [a for a in range(x.rank) if factors[a] != 1]
    grid = "asymmetric" if old else c.attr("coordinate_transformation_mode") or "half_pixel"
    if not changed:
        return x
    if mode == "nearest":
        return _nearest(c, x, factors, results, changed, grid, sizes is None)
    whole = {"align_corners": grid == "align_corners", **_target(factors, results, bool(scales))}
    if min(changed) < 2 or x.rank not in (3, 4, 5) or (found := _mode(c, mode, grid, results)) is None:
        return _by_matrices(c, x, changed, results, bool(scales) and factors)
    return c.emit("Resize", [x], mode=found, **whole)


def _scaled(size: int, factor: float) -> int:
    """Return a size that is multiplied and rounded down in float32, as ONNX Runtime does: 24 for 14 and 24 / 14.

    >>> _scaled(14, 1.7142857)
    24
    """
    return int(np.float32(size) * np.float32(factor))


def _asked(x: Operand, sizes: Operand, axes: Sequence[int]) -> tuple[list[int | None] | None, list[float] | None]:
    """Return the sizes of a result, None where they stay open, or its scales where an open size is multiplied.

    Raises:
        Unreadable: A size depends on data, or is not a multiple of the open one.
    """
    require(sizes.numbers and not sizes.name)
    columns = [[int(n[k]) for n in sizes.numbers] for k in range(len(axes))]
    given = [[int(m.shape[a]) for m in x.metas] for a in axes]
    fixed = [c[0] if len({*c}) == 1 else None for c in columns]
    if all(f is not None or c == g for f, c, g in zip(fixed, columns, given, strict=True)):
        return [x.shape[a] if c == g else f for a, f, c, g in zip(axes, fixed, columns, given, strict=True)], None
    ratios = [{c / g for c, g in zip(*pair, strict=True)} for pair in zip(columns, given, strict=True)]
    require(all(len(r) == 1 and min(r).is_integer() for r in ratios))
    return None, [min(r) for r in ratios]


def _mode(c: OnnxCall, mode: str, grid: str, results: Sequence[Any]) -> str | None:
    """Return the engine's word for an interpolation, None if the engine does not have it."""
    if c.attr("antialias") or c.attr("exclude_outside"):
        return None
    if grid == "asymmetric" and mode == "linear":
        return "linear_corner"
    centres = grid == "half_pixel" or (grid == "pytorch_half_pixel" and 1 not in results[2:])
    if grid != "align_corners" and not centres:
        return None
    cubic = mode == "cubic" and c.operand(0).rank == 4 and c.attr("cubic_coeff_a") == -0.75
    return mode if mode == "linear" or cubic else None


def _by_matrices(c: OnnxCall, x: Operand, changed: Sequence[int], results: Sequence[Any], factors: Any) -> Any:
    """Read an interpolation as a linear layer along each axis, whose weights ONNX Runtime computes from unit images."""
    if c.attr("coordinate_transformation_mode") == "tf_crop_and_resize" or any(x.shape[a] is None for a in changed):
        raise Unreadable
    for a in changed:
        size = x.shape[a] or 0
        units = torch.eye(size)[:, None, :, None]
        ends = [ir.Value(name="x"), None, *([] if factors else [None]), ir.Value(name="to")]
        node = ir.Node("", "Resize", ends, [v for k, v in c.node.attributes.items() if k != "axes"])
        to = torch.tensor([1, 1, factors[a], 1.0]) if factors else torch.tensor([size, 1, results[a], 1])
        function = OnnxFunction.of_target(OnnxFunction.target(node, c.opset, 1))
        weights = function(units, to)[:, 0, :, 0].t().contiguous()
        order = [k for k in range(x.rank) if k != a] + [a]
        if a == x.rank - 1:
            put = c.emit if a == changed[-1] else c.step
            x = put("Linear", [x, c.new_weight(weights, f"axis{a}")])
            continue
        y = c.step("Transpose", [x], perm=tuple(order))
        y = c.step("Linear", [y, c.new_weight(weights, f"axis{a}")])
        back = tuple(order.index(k) for k in range(x.rank))
        x = c.emit("Transpose", [y], perm=back) if a == changed[-1] else c.step("Transpose", [y], perm=back)
    return x


def _target(factors: Sequence[float], results: Sequence[Any], by_scale: bool) -> dict[str, Any]:
    """Return size and scale of a Resize: the one that the file has."""
    require(by_scale or None not in results[2:])
    return {"size": None if by_scale else tuple(results[2:]), "scale": tuple(factors[2:]) if by_scale else None}


def _nearest(
    c: OnnxCall,
    x: Operand,
    factors: Sequence[float],
    results: Sequence[Any],
    changed: Sequence[int],
    grid: str,
    by_scale: bool,
) -> Any:
    """Read a nearest mode: as Resize if that picks the same pixels of each axis, else as a Gather of each axis."""
    rounding = c.attr("nearest_mode") or ("floor" if grid == "asymmetric" else "round_prefer_floor")
    spatial = min(changed) >= 2 and x.rank in (3, 4, 5)
    if spatial and (grid, rounding) == ("asymmetric", "floor"):
        return c.emit("Resize", [x], mode="nearest", **_target(factors, results, by_scale), align_corners=False)
    require(all(x.shape[a] is not None for a in changed))
    picked = {a: _picked(x.shape[a] or 0, results[a], factors[a], grid, rounding) for a in changed}
    for mode, offset in (("nearest", 0.0), ("nearest_exact", 0.5)):
        if spatial and all(
            np.array_equal(p, _engine(len(p), factors[a], offset, x.shape[a])) for a, p in picked.items()
        ):
            return c.emit("Resize", [x], mode=mode, **_target(factors, results, by_scale), align_corners=False)
    for a in changed:
        index = c.new_weight(torch.from_numpy(picked[a]), f"index{a}")
        x = c.emit("Gather", [x, index], axis=a) if a == changed[-1] else c.step("Gather", [x, index], axis=a)
    return x


def _engine(size: int, factor: float, offset: float, most: Any) -> np.ndarray:
    """Return the pixels that the engine picks."""
    return np.minimum(np.floor((np.arange(size) + offset) / factor), most - 1).astype(np.int64)


def _picked(old: int, new: int, factor: float, grid: str, rounding: str) -> np.ndarray:
    """Return the pixels of an axis that ONNX picks."""
    k = np.arange(new)
    at: dict[str, Callable[[], np.ndarray]] = {
        "asymmetric": lambda: k / factor,
        "half_pixel": lambda: (k + 0.5) / factor - 0.5,
        "pytorch_half_pixel": lambda: (k + 0.5) / factor - 0.5 if new > 1 else 0.0 * k,
        "align_corners": lambda: k * (old - 1) / max(new - 1, 1),
        "half_pixel_symmetric": lambda: old / 2 * (1 - new / (factor * old)) + (k + 0.5) / factor - 0.5,
    }
    how: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
    }
    require(grid in at and rounding in how)
    return np.clip(how[rounding](at[grid]()), 0, old - 1).astype(np.int64)
