"""Simulator against LiteRT's three families of kernels, for any graph, plan and platform."""

from __future__ import annotations

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


def prove(
    graph: Graph, plan: Plan, platform: Platform, data: Any, folder: Path, runtimes: tuple[str, ...] = RUNTIMES
) -> list[Verification]:
    """Write the file once, run it with each family and demand the simulator's integers on every tensor.

    One unit is allowed only to operators that are computed in float between quantizers, given the device's operands.
    """
    path = export_tflite(graph, plan, folder / "model.tflite")
    found = [verify(graph, plan, platform, data, runtime=r, path=path) for r in runtimes]
    for f in found:
        assert f.integers > 0
        assert f.sound, f.summary()
        assert f.exact or f.float_operators, f.summary()
    return found


def few_bits(model: Any, batch: Any, bits: int) -> dict[str, Any]:
    """Overrides that give every weight so many bits that LiteRT can hold in as many."""
    ops = {n.op for n in chipfit.lint(model, batch, "tflite_int8").graph.nodes}
    return {op: {"bits": bits} for op in sorted(ops & PACKED)} if bits != 8 else {}
