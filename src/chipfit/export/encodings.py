"""JSON encodings: ranges and integer parameters beside a float ONNX file, for chips whose compiler takes both.

Each dialect is one function `(name, entry) -> JSON` over the activations and weights of a plan; `document` gathers them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipfit.errors import UnknownNameError, UnsupportedError
from chipfit.files import write_atomically
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.registry import register


@dataclass(frozen=True, slots=True)
class _Lists:
    """Per-channel numbers of one tensor as Python lists; one entry when it has a single scale."""

    scale: list[float]
    zero: list[int]
    low: list[float]
    high: list[float]

    @classmethod
    def of(cls, t: TensorPlan) -> _Lists:
        assert (
            t.grid is not None and t.scale is not None and t.zero_point is not None
        )  # asked for quantized tensors only
        scale, zero = t.scale.double().reshape(-1).tolist(), t.zero_point.reshape(-1).tolist()
        if len(zero) != len(scale):
            zero = zero * len(scale)
        low = [(t.grid.qmin - z) * s for s, z in zip(scale, zero, strict=True)]
        high = [(t.grid.qmax - z) * s for s, z in zip(scale, zero, strict=True)]
        return cls(scale, zero, low, high)


def _tensorrt(plan: Plan) -> dict[str, Any]:
    """Dynamic range of each activation: symmetric, max |x|."""
    ranges = {t.name: max(abs(v) for v in (*_Lists.of(t).low, *_Lists.of(t).high)) for t in _of(plan, "activation")}
    return {"tensorrt": {"blob_range": ranges}}


def _qualcomm(plan: Plan) -> dict[str, Any]:
    """Quantization overrides: bit width, min, max, scale, offset (= -zero point); one record per channel."""

    def records(t: TensorPlan) -> list[dict[str, Any]]:
        assert t.grid is not None
        n = _Lists.of(t)
        return [
            {
                "bitwidth": t.grid.bits,
                "min": lo,
                "max": hi,
                "scale": s,
                "offset": -z + t.grid.qmin if t.grid.signed else -z,
                "is_symmetric": str(t.grid.symmetric),
                "dtype": "int",
            }
            for s, z, lo, hi in zip(n.scale, n.zero, n.low, n.high, strict=True)
        ]

    return {
        "version": "0.6.1",
        "activation_encodings": {t.name: records(t) for t in _of(plan, "activation")},
        "param_encodings": {t.name: records(t) for t in _of(plan, "weight", "bias")},
    }


def _ppl_cuda(plan: Plan) -> dict[str, Any]:
    """Min and max of each activation, step of each weight channel."""
    return {
        "ppl-cuda": {
            **{
                t.name: {
                    "bit_width": t.grid.bits,
                    "per_channel": False,
                    "quant_flag": True,
                    "sym": t.grid.symmetric,
                    "max": n.high[0],
                    "min": n.low[0],
                }
                for t in _of(plan, "activation")
                if t.grid and (n := _Lists.of(t))
            },
            **{
                t.name: {
                    "bit_width": t.grid.bits,
                    "per_channel": len(n.scale) > 1,
                    "quant_flag": True,
                    "sym": t.grid.symmetric,
                    "max": n.high,
                    "min": n.low,
                }
                for t in _of(plan, "weight")
                if t.grid and (n := _Lists.of(t))
            },
        }
    }


def _ppl_dsp(plan: Plan) -> dict[str, Any]:
    """Step, zero point, range and type of every tensor."""
    out = {}
    for t in _of(plan, "activation", "weight"):
        assert t.grid is not None
        n = _Lists.of(t)
        kind = "biased" if t.role == "activation" else "weight"
        out[t.name] = {
            "step": _one(n.scale),
            "zero_point": _one(n.zero),
            "min": _one(n.low),
            "max": _one(n.high),
            "bit": t.grid.bits,
            "type": kind,
        }
    return {"ppl": out}


def _vitis(plan: Plan) -> dict[str, Any]:
    """Fix positions: scale = 2^-position."""
    out = {}
    for t in _of(plan, "activation", "weight", "bias"):
        assert t.grid is not None
        places = [-math.log2(s) for s in _Lists.of(t).scale]
        if any(p != round(p) for p in places):
            raise UnsupportedError(
                "Fix positions need power-of-two scales",
                where=t.name,
                got=_Lists.of(t).scale[:4],
                hint="quantize for a platform with such scales, for example vitis_dpu",
            )
        out[t.name] = {
            "bit_width": t.grid.bits,
            "fix_point": int(places[0]) if len(places) == 1 else [int(p) for p in places],
        }
    return {"fix_info": out}


def _nnie(plan: Plan) -> dict[str, Any]:
    """Clip value of each tensor."""
    return {
        "nnie": {
            "gfpq": {
                t.name: max(abs(v) for v in (*_Lists.of(t).low, *_Lists.of(t).high))
                for t in _of(plan, "activation", "weight")
            }
        }
    }


def _stpu(plan: Plan) -> dict[str, Any]:
    """Min and max of every tensor."""
    return {
        t.name: {"min": _one(n.low), "max": _one(n.high)}
        for t in _of(plan, "activation", "weight")
        if (n := _Lists.of(t))
    }


def _ncnn(plan: Plan) -> dict[str, Any]:
    """Reciprocal scales, as the calibration table lists them."""
    return {"scales": {t.name: [1 / s for s in _Lists.of(t).scale] for t in _of(plan, "activation", "weight")}}


def _generic(plan: Plan) -> dict[str, Any]:
    """Everything, one record per tensor."""
    out = {}
    for t in _of(plan, "activation", "weight", "bias"):
        assert t.grid is not None
        n = _Lists.of(t)
        out[t.name] = {
            "role": t.role,
            "layer": t.layer,
            "format": t.format,
            "bits": t.grid.bits,
            "qmin": t.grid.qmin,
            "qmax": t.grid.qmax,
            "axis": t.axis,
            "scale": _one(n.scale),
            "zero_point": _one(n.zero),
            "min": _one(n.low),
            "max": _one(n.high),
        }
        if t.grid.table is not None:  # what each code stands for, in units of the scale
            out[t.name] |= {"kind": t.grid.kind, "table": list(t.grid.table)}
    return {"chipfit_encodings": 1, "platform": plan.platform, "tensors": out}


#: dialect -> writer; a platform names its own (`encodings`)
DIALECTS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "tensorrt": _tensorrt,
    "qualcomm": _qualcomm,
    "ppl_cuda": _ppl_cuda,
    "ppl_dsp": _ppl_dsp,
    "vitis": _vitis,
    "nnie": _nnie,
    "stpu": _stpu,
    "ncnn": _ncnn,
    "generic": _generic,
}


def _of(plan: Plan, *roles: str) -> list[TensorPlan]:
    return [t for t in plan.tensors.values() if t.quantized and t.role in roles]


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def document(plan: Plan, dialect: str = "generic") -> dict[str, Any]:
    """The encodings of a plan.

    Args:
        dialect: one of `DIALECTS`.

    Raises:
        UnknownNameError: no such dialect.
        UnsupportedError: the dialect cannot hold this plan's scales.
    """
    if dialect not in DIALECTS:
        raise UnknownNameError("encodings dialect", dialect, DIALECTS)
    return DIALECTS[dialect](plan)


@register("format", "encodings", suffixes=(".json",), libraries=("onnx",), extra="onnx")
def export(graph: Graph, plan: Plan, path: Path, platform: Platform, *, dialect: str | None = None) -> Path:
    """Exporter of `.json` files: the encodings, with the float model as ONNX beside them under the same name.

    Tensor names are those of the ONNX file's values.
    """
    from chipfit.export.onnx.writer import export_onnx

    text = json.dumps(document(plan, dialect or platform.encodings), indent=1)
    export_onnx(graph, None, path.with_suffix(".onnx"))
    return write_atomically(path, text.encode())
