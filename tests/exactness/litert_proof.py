"""Simulator against LiteRT's three families of kernels, for any graph, plan and platform."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import chipfit
from chipfit.export.tflite.writer import export_tflite
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.verify import Verification, verify

#: operators whose weights may have 4 bits
PACKED = {"Conv1D", "Conv2D", "DepthwiseConv2D", "Linear"}
RUNTIMES = ("litert_reference", "litert_optimized", "litert")
WITHOUT_REFERENCE = {"Elu"}  #: operators that have no reference kernel


def prove(
    graph: Graph,
    plan: Plan,
    platform: Platform,
    data: Any,
    folder: Path,
    runtimes: tuple[str, ...] = RUNTIMES,
    float_ops: Collection[str] | None = None,
) -> list[Verification]:
    """Write the file once, run it with each family and demand the simulator's integers on every tensor.

    Args:
        data: that calibration has not seen.
        float_ops: operators that may be computed in float between quantizers; by default whatever is.
    """
    path = export_tflite(graph, plan, folder / "model.tflite")
    if any(n.op in WITHOUT_REFERENCE for n in graph.nodes):
        runtimes = tuple(r for r in runtimes if r != "litert_reference")
    found = [verify(graph, plan, platform, data, runtime=r, path=path) for r in runtimes]
    for f in found:
        f.require(f.float_ops if float_ops is None else float_ops)
        assert f.exact or f.float_operators, f.summary()
        assert float_ops is None or not f.calibrated
        assert set(f.not_compared) <= {"elided by the runtime"}, f.summary()
        assert all(h.elements >= graph.weights[h.tensor].numel() for h in f.held if h.role != "activation")
    return found


def few_bits(model: Any, batch: Any, bits: int) -> dict[str, Any]:
    """Overrides that give every weight so many bits that LiteRT can hold in as many."""
    ops = {n.op for n in chipfit.lint(model, batch, "tflite_int8").graph.nodes}
    return {op: {"bits": bits} for op in sorted(ops & PACKED)} if bits != 8 else {}
