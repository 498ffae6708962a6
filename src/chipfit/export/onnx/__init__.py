"""ONNX files; the writer loads when the first one is written."""

from pathlib import Path
from typing import Any

from chipfit.export import FileTensor
from chipfit.export.io_spec import OPTIONS
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import register


def _read_back(path: Path) -> dict[str, FileTensor]:
    from chipfit.export.onnx.read_back import read_back

    return read_back(path)


_DECLARED: dict[str, Any] = {"suffixes": (".onnx",), "libraries": ("onnx",), "extra": "onnx", "stored": _read_back}


@register("format", "onnx", **_DECLARED, options=(*OPTIONS, "opset"))
def export(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write a `.onnx` file; see `chipfit.export.onnx.writer.export_onnx` for the options."""
    from chipfit.export.onnx.builder import OnnxBuilder, Unflattened
    from chipfit.export.onnx.writer import export_onnx

    plain = platform is not None and platform.math.kernels == "openvino"
    return export_onnx(graph, plan, path, form=Unflattened if plain else OnnxBuilder, **options)
