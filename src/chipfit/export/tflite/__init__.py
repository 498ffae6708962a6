"""TensorFlow Lite files; the writer loads when the first one is written."""

from pathlib import Path
from typing import Any

from chipfit.export import InFile
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import register


def _stored(path: Path) -> dict[str, InFile]:
    from chipfit.export.tflite.stored import stored

    return stored(path)


_LIBRARIES = ("flatbuffers", "ai_edge_litert")


@register("format", "tflite", suffixes=(".tflite",), libraries=_LIBRARIES, extra="litert", stored=_stored)
def export(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write a `.tflite` file; see `chipfit.export.tflite.writer.export_tflite` for the options."""
    from chipfit.export.tflite.writer import export_tflite

    return export_tflite(graph, plan, path, **options)
