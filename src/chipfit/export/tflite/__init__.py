"""TensorFlow Lite files; the writer loads when the first one is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.registry import register

if TYPE_CHECKING:
    from chipfit.export import InFile
    from chipfit.graph.ir import Graph
    from chipfit.plan.record import Plan


def _stored(path: Path) -> dict[str, InFile]:
    from chipfit.export.tflite.stored import stored

    return stored(path)


@register(
    "format",
    "tflite",
    suffixes=(".tflite",),
    libraries=("flatbuffers", "ai_edge_litert"),
    extra="litert",
    stored=_stored,
)
def export(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write a `.tflite` file; see `chipfit.export.tflite.writer.export_tflite` for the options."""
    from chipfit.export.tflite.writer import export_tflite

    return export_tflite(graph, plan, path, **options)
