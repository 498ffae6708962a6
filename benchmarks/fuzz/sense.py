"""Check accepted plans, platforms and results for impossible values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.fuzz.run import Nonsense

from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.result import Result


def check_result(result: Result) -> None:
    """Check the numbers of the plan and of the weights.

    Raises:
        Nonsense: names the first impossible value.
    """
    check_plan(result.plan)
    for name, w in result.graph.weights.items():
        stored = result.plan.stored(name)
        if bool(w.isnan().any()) or (stored is not None and not bool(torch.isfinite(w).all())):
            raise Nonsense(f"weight '{name}' is not finite")
        if stored is not None and stored.scale.dim() == 1:
            axis = 0 if stored.axis is None else stored.axis
            if not -w.dim() <= axis < w.dim() or w.shape[axis] != len(stored.scale):
                raise Nonsense(f"weight '{name}' {list(w.shape)} has {len(stored.scale)} scales along axis {axis}")


def check_plan(plan: Plan) -> None:
    for t in plan.tensors.values():
        for fault in _faults(t):
            raise Nonsense(f"tensor '{t.name}': {fault}")


def _faults(t: TensorPlan) -> Iterator[str]:
    for name in ("low", "high"):
        x = getattr(t, name)
        if x is not None and not (isinstance(x, (int, float)) and not math.isnan(x)):
            yield f"{name} is {x!r}"
    if t.low is not None and t.high is not None and t.low > t.high:
        yield f"low {t.low} is above high {t.high}"
    if t.stored is None:
        return
    s, z, grid = t.stored.scale, t.stored.zero_point, t.stored.grid
    if s.dtype != torch.float32 or not bool((torch.isfinite(s) & (s > 0)).all()):
        yield f"scale {s.flatten()[:4].tolist()} of {s.dtype}"
    if z.dtype != torch.int32 or z.shape != s.shape:
        yield f"zero point {z.dtype}{list(z.shape)} beside scale {list(s.shape)}"
    if not (isinstance(grid.bits, int) and 1 <= grid.bits <= 64):
        yield f"{grid.bits!r} bits"
    elif not grid.qmin < grid.qmax:
        yield f"codes {grid.qmin}..{grid.qmax}"
    elif (
        grid.kind == "int"
        and grid.bits > 1
        and not (
            -(1 << grid.bits - 1) <= grid.qmin and grid.qmax < 1 << grid.bits and grid.qmax - grid.qmin < 1 << grid.bits
        )
    ):
        yield f"codes {grid.qmin}..{grid.qmax} in {grid.bits} bits"
    if grid.kind == "int" and z.numel() and not grid.qmin <= int(z.min()) <= int(z.max()) <= grid.qmax:
        yield f"zero point {z.flatten()[:4].tolist()} outside of {grid.qmin}..{grid.qmax}"
    if grid.table is not None and (
        not all(math.isfinite(v) for v in grid.table) or list(grid.table) != sorted(grid.table)
    ):
        yield "a table that is not finite and ascending"


def check_platform(platform: Platform) -> None:
    """Check that numbers are finite, bits and scales positive, and attributes not compared with NaN."""
    todo: list[tuple[str, Any]] = [("", platform.model_dump())]
    while todo:
        at, x = todo.pop()
        if isinstance(x, dict):
            todo += [(f"{at}.{k}", v) for k, v in x.items()]
        elif isinstance(x, (list, tuple)):
            todo += [(f"{at}.{k}", v) for k, v in enumerate(x)]
        elif isinstance(x, float) and math.isinf(x) and ".where." in at:
            continue  # layers pad and clamp with infinities
        elif (isinstance(x, float) and not math.isfinite(x)) or (
            at.endswith((".bits", ".scale_min", ".value_bits")) and isinstance(x, (int, float)) and x <= 0
        ):
            raise Nonsense(f"{at} is {x}")


def check_output(y: Any, what: str) -> None:
    if isinstance(y, torch.Tensor) and y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise Nonsense(f"{what} is not finite")
