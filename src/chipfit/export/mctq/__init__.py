"""Files for the converter of Sony's IMX500: float networks with quantizers of the package mct_quantizers."""

from pathlib import Path
from typing import Any

from chipfit.export.io_spec import OPTIONS
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import register

_OPTIONS = *(o for o in OPTIONS if o != "io"), "opset"


@register("format", "mctq", named=True, suffixes=(".onnx",), libraries=("onnx",), extra="onnx", options=_OPTIONS)
def export_mctq(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write a `.onnx` file with quantizers as operators of the domain mct_quantizers.

    ONNX Runtime runs it with the session options of `mct_quantizers.get_ort_session_options()`.

    Args:
        options: those of `.onnx` files without `format`, except `io`.

    Raises:
        UnsupportedError: the package has no quantizer like that of some tensor.
    """
    from chipfit.export.mctq.builder import MctqBuilder
    from chipfit.export.onnx.writer import export_onnx

    return export_onnx(graph, plan, path, form=MctqBuilder, **options)
