"""JSON encodings: ranges and integer parameters beside a float ONNX file, for chips whose compiler takes both.

Each dialect is one function of a plan; a platform names its dialect (`encodings`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipfit.decide.insertions import without_insertions
from chipfit.errors import UnsupportedError, check_known
from chipfit.files import write_atomically
from chipfit.graph.ir import DYNAMIC, Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@dataclass(frozen=True, slots=True)
class _Entry:
    """A quantized tensor in lists with one number for each scale."""

    tensor: TensorPlan
    grid: Grid
    scale: list[float]
    zero: list[int]
    low: list[float]  #: floats that the lowest integers represent
    high: list[float]

    @classmethod
    def of(cls, tensor: TensorPlan, stored: Stored) -> _Entry:
        grid, scale, zero = stored.grid, stored.scale.double().reshape(-1), stored.zero_point.reshape(-1)
        low, high = ((end - zero.double()) * scale for end in (grid.qmin, grid.qmax))
        return cls(tensor, grid, scale.tolist(), zero.tolist(), low.tolist(), high.tolist())

    @property
    def reach(self) -> float:
        """The greatest magnitude that an integer represents."""
        return max(map(abs, (*self.low, *self.high)))


def _each(plan: Plan, roles: str, record: Callable[[_Entry], Any]) -> dict[str, Any]:
    """Return the record of every quantized tensor of these roles, by name."""
    tensors = [t for t in plan.tensors.values() if t.role in roles.split()]
    return {t.name: record(_Entry.of(t, t.stored)) for t in tensors if t.stored is not None}


def _one(values: list[Any]) -> Any:
    """Return the number of a single scale, or the list of several."""
    return values[0] if len(values) == 1 else values


def _numbers(e: _Entry, keys: str) -> dict[str, Any]:
    """Return numbers of an entry under the keys of a dialect: "step=scale min=low"."""
    return {key: _one(getattr(e, name)) for key, name in (word.split("=") for word in keys.split())}


def _qualcomm(plan: Plan) -> dict[str, Any]:
    """Return quantization overrides: bit width, min, max, scale, offset (= -zero point); one record per channel."""

    def records(e: _Entry) -> list[dict[str, Any]]:
        first = e.grid.qmin if e.grid.signed else 0
        same = {"is_symmetric": str(e.grid.symmetric), "dtype": "int"}
        return [
            {"bitwidth": e.grid.bits, "min": low, "max": high, "scale": scale, "offset": first - zero, **same}
            for scale, zero, low, high in zip(e.scale, e.zero, e.low, e.high, strict=True)
        ]

    parts = {"activation_encodings": "activation", "param_encodings": "weight bias"}
    return {"version": "0.6.1", **{part: _each(plan, roles, records) for part, roles in parts.items()}}


def _ppl_cuda(plan: Plan) -> dict[str, Any]:
    """Return min and max of each activation and of each weight channel."""

    def record(e: _Entry) -> dict[str, Any]:
        weight = e.tensor.role == "weight"
        how = {"per_channel": weight and len(e.scale) > 1, "quant_flag": True, "sym": e.grid.symmetric}
        ends = {"max": e.high, "min": e.low} if weight else {"max": e.high[0], "min": e.low[0]}
        return {"bit_width": e.grid.bits, **how, **ends}

    return {"ppl-cuda": _each(plan, "activation", record) | _each(plan, "weight", record)}


def _ppl_dsp(plan: Plan) -> dict[str, Any]:
    """Return step, zero point, range and type of every tensor."""

    def record(e: _Entry) -> dict[str, Any]:
        kind = "biased" if e.tensor.role == "activation" else "weight"
        return {**_numbers(e, "step=scale zero_point=zero min=low max=high"), "bit": e.grid.bits, "type": kind}

    return {"ppl": _each(plan, "activation weight", record)}


def _vitis(plan: Plan) -> dict[str, Any]:
    """Return fix positions: scale = 2^-position."""

    def record(e: _Entry) -> dict[str, Any]:
        places = [-math.log2(s) for s in e.scale]
        if any(p != round(p) for p in places):
            got = e.scale[:4]
            hint = "quantize for a platform whose formats have such scales"
            raise UnsupportedError("Fix positions need power-of-two scales", where=e.tensor.name, got=got, hint=hint)
        return {"bit_width": e.grid.bits, "fix_point": _one([int(p) for p in places])}

    return {"fix_info": _each(plan, "activation weight bias", record)}


def _generic(plan: Plan) -> dict[str, Any]:
    """Return everything, one record per tensor."""

    def record(e: _Entry) -> dict[str, Any]:
        t, grid = e.tensor, e.grid
        out: dict[str, Any] = {"role": t.role, "layer": t.layer, "format": t.format}
        out |= {"bits": grid.bits, "qmin": grid.qmin, "qmax": grid.qmax, "axis": t.axis}
        out |= _numbers(e, "scale=scale zero_point=zero min=low max=high")
        if grid.table is not None:  # the value of each integer, in units of the scale
            out |= {"kind": grid.kind, "table": list(grid.table)}
        return out

    tensors = _each(plan, "activation weight bias", record)
    return {"chipfit_encodings": 1, "platform": plan.platform, "tensors": tensors}


#: dialect -> writer; a platform names its own (`encodings`)
DIALECTS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    # dynamic range of each activation: symmetric, max |x|
    "tensorrt": lambda plan: {"tensorrt": {"blob_range": _each(plan, "activation", lambda e: e.reach)}},
    "qualcomm": _qualcomm,
    "ppl_cuda": _ppl_cuda,
    "ppl_dsp": _ppl_dsp,
    "vitis": _vitis,
    # clip value of each tensor
    "nnie": lambda plan: {"nnie": {"gfpq": _each(plan, "activation weight", lambda e: e.reach)}},
    # min and max of every tensor
    "stpu": lambda plan: _each(plan, "activation weight", lambda e: _numbers(e, "min=low max=high")),
    # reciprocal scales, as the calibration table lists them
    "ncnn": lambda plan: {"scales": _each(plan, "activation weight", lambda e: [1 / s for s in e.scale])},
    "generic": _generic,
}


def document(plan: Plan, dialect: str = "generic") -> dict[str, Any]:
    """Return the encodings of a plan.

    Args:
        dialect: one of `DIALECTS`.

    Raises:
        UnknownNameError: no such dialect.
        UnsupportedError: the dialect cannot hold this plan's scales.
    """
    check_known("encodings dialect", dialect, DIALECTS)
    return DIALECTS[dialect](plan)


@register("format", "encodings", suffixes=(".json",), libraries=("onnx",), extra="onnx")
def export(graph: Graph, plan: Plan, path: Path, platform: Platform, *, dialect: str | None = None) -> Path:
    """Write a `.json` file of encodings, and the float model as ONNX under the same name.

    Tensor names are those of the ONNX file's values.
    """
    from chipfit.export.onnx.writer import export_onnx

    text = json.dumps(document(plan, dialect or platform.encodings), indent=1)
    export_onnx(without_insertions(graph, (DYNAMIC,)), None, path.with_suffix(".onnx"))
    return write_atomically(path, text.encode())
