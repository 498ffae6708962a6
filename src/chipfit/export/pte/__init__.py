"""ExecuTorch programs; the writer loads when the first one is written."""

from pathlib import Path
from typing import Any

from chipfit.export import FileTensor
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import register


def _read_back(path: Path) -> dict[str, FileTensor]:
    from chipfit.export.pte.read_back import read_back

    return read_back(path)


@register(
    "format",
    "pte",
    suffixes=(".pte",),
    libraries=("executorch", "flatbuffers"),
    extra="executorch",
    options=("batch",),
    batch_size=lambda graph, plan: 1,
    stored=_read_back,
)
def export(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write a `.pte` file; see `chipfit.export.pte.writer.export_pte` for the options."""
    from chipfit.export.pte.writer import export_pte

    return export_pte(graph, plan, path, **options)
