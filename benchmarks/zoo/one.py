"""Quantize, export, run and verify one architecture."""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks.zoo.networks import ENTRIES

import chipfit
from chipfit.errors import ChipfitError
from chipfit.graph.ir import OPAQUE

#: platform -> suffix of its deployed file
PLATFORMS = {"ort_cpu": "m.onnx", "tflite_int8": "m.tflite"}


def tried(name: str) -> dict[str, Any]:
    """Return how far an architecture comes on each platform."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    entry = ENTRIES[name]
    model = entry.model()
    if isinstance(model, torch.nn.Module):
        model = model if entry.source == "keras.applications" else _lively(model.eval())
    torch.manual_seed(1)
    *data, other = (entry.batch() for _ in range(3))
    return {platform: _on(platform, model, data, [other]) for platform in PLATFORMS}


@torch.no_grad()
def _lively(model: torch.nn.Module) -> torch.nn.Module:
    """Set random statistics of batch norms, so that folding changes weights."""
    for m in model.modules():
        if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
            torch.nn.init.uniform_(m.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(m.running_var, 0.5, 1.5)
            if m.weight is not None:
                torch.nn.init.uniform_(m.weight, 0.5, 1.5)
    return model


def _on(platform: str, model: Any, data: list[Any], others: list[Any]) -> dict[str, Any]:
    """Return the last stage reached ("", "quantized", "exported", "run"), counts of integers, and why it ended."""
    out: dict[str, Any] = {"stage": "", "error": "", "why": ""}
    start = time.perf_counter()
    try:
        result = chipfit.quantize(model, data, platform=platform, progress=False)
        opaque = {n.attrs["target"].removeprefix("aten.").partition(".")[0] for n in result.graph if n.op == OPAQUE}
        out |= {"stage": "quantized", "share": round(result.report.integer_share, 4), "opaque": sorted(opaque)}
        with tempfile.TemporaryDirectory() as folder:
            path = result.export(Path(folder) / PLATFORMS[platform])
            out["stage"] = "exported"
            seen = result.verify(others, path=path)
        out |= {
            "stage": "run",
            "integers": seen.integers,
            "differing": sum(r.op_differing for r in seen.rows),
            "outside": sum(r.op_differing for r in seen.rows if not r.float_ops),
            "departures": seen.departures[:3],
            "float_ops": sorted(seen.float_ops),
        }
    except ChipfitError as e:
        out |= {"error": type(e).__name__, "why": str(e)[:1500]}
    except Exception as e:  # an untyped error is a defect, which the table shows
        where = traceback.extract_tb(e.__traceback__)[-1]
        out |= {"error": f"bare {type(e).__name__}", "why": f"{e} ({Path(where.filename).name}:{where.lineno})"[:1500]}
    return out | {"seconds": round(time.perf_counter() - start, 1)}
