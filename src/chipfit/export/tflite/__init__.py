"""TensorFlow Lite files; the writer loads when the first one is written."""

from pathlib import Path
from typing import Any

from chipfit.export import FileTensor, format_of
from chipfit.export.io_spec import OPTIONS
from chipfit.export.tflite.batch import fixed_batch_size
from chipfit.files import write_atomically
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import register
from chipfit.search.chip_memory import Footprint


def _read_back(path: Path) -> dict[str, FileTensor]:
    from chipfit.export.tflite.read_back import read_back

    return read_back(path)


_SHARED: dict[str, Any] = {
    "libraries": ("flatbuffers", "ai_edge_litert"),
    "extra": "litert",
    "options": (*OPTIONS, "batch", "keep_layout"),
}


@register("format", "tflite", suffixes=(".tflite",), stored=_read_back, batch_size=fixed_batch_size, **_SHARED)
def export(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write a `.tflite` file; see `chipfit.export.tflite.writer.export_tflite` for the options."""
    from chipfit.export.tflite.writer import export_tflite

    return export_tflite(graph, plan, path, **options)


@register("format", "c", suffixes=(".h",), wraps=".tflite", **_SHARED)
def export_c(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write a `.tflite` file as a C array; see `chipfit.export.tflite.c_array.header`."""
    from chipfit.export.tflite.c_array import header
    from chipfit.export.tflite.writer import content

    return write_atomically(path, header(content(graph, plan, **options), path.stem).encode())


def footprint(graph: Graph, plan: Plan) -> Footprint:
    """Return the memory of a chip that the file takes for one sample; see `chipfit.export.tflite.footprint`.

    Raises:
        ExportError: the libraries of the file are not installed.
        UnsupportedError: the file cannot hold a part of the network.
    """
    format_of(".tflite")
    from chipfit.export.tflite.footprint import measure

    return measure(graph, plan)
