"""Files for the converter of Sony's IMX500: float networks with quantizers of the package mct_quantizers."""

from pathlib import Path
from typing import Any

from chipfit.errors import ConfigError
from chipfit.export import format_of
from chipfit.export.io_spec import OPTIONS
from chipfit.frameworks import adapter_of
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import register

_OPTIONS = *(o for o in OPTIONS if o != "io"), "opset"


@register("format", "mctq", named=True, suffixes=(".onnx", ".keras"), options=_OPTIONS)
def export_mctq(graph: Graph, plan: Plan, path: Path, platform: Any = None, **options: Any) -> Path:
    """Write an `.onnx` file with operators of the domain mct_quantizers, or a `.keras` file with that package's layers.

    ONNX Runtime runs the former with the session options of `mct_quantizers.get_ort_session_options()`; the latter,
    of a Keras model, is a file of Keras 2 for `mct_quantizers.keras_load_quantized_model`.

    Args:
        options: those of `.onnx` files without `format`, except `io`.

    Raises:
        UnsupportedError: the package has no quantizer like that of some tensor, or Keras 2 no layer for an operator.
        ConfigError: an option of another file.
    """
    if path.suffix == ".keras":
        for name, value in options.items():
            raise ConfigError(f"A .keras file has no option `{name}`", got=value, allowed=".onnx")
        return adapter_of(graph.framework).save(graph, plan, path, "mctq")
    format_of(path.suffix)  # which asks for its libraries
    from chipfit.export.mctq.builder import MctqBuilder
    from chipfit.export.onnx.writer import export_onnx

    return export_onnx(graph, plan, path, form=MctqBuilder, **options)
