"""Fake-quantized files: the float network with rounded weights, and with arithmetic that rounds its results.

They give the numbers of the simulation on any runtime that computes floats. ONNX and TFLite files are those of the
float writers; `.pt2` and `.pt` files are programs of PyTorch, `.keras` files models of Keras.
"""

from pathlib import Path
from typing import Any

from chipfit.errors import ConfigError
from chipfit.export import export
from chipfit.export.io_spec import OPTIONS
from chipfit.frameworks import adapter_of
from chipfit.graph.ir import Graph
from chipfit.passes.rounded import rounded_network
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.registry import register

_WRITTEN = ".onnx", ".tflite"  #: suffixes of the float writers
_OPTIONS = *(o for o in OPTIONS if o != "io"), "opset", "batch", "keep_layout"


@register("format", "fake", named=True, suffixes=(*_WRITTEN, ".pt2", ".pt", ".keras"), options=_OPTIONS)
def export_fake(graph: Graph, plan: Plan, path: Path, platform: Platform, **options: Any) -> Path:
    """Write a fake-quantized file.

    Args:
        options: those of the `.onnx` and `.tflite` files without `format`, except `io`.

    Raises:
        ConfigError: see `export`.
        UnsupportedError: a tensor is rounded in a way that such arithmetic does not express, or the framework of the
            model has no such file.
    """
    if path.suffix in _WRITTEN:
        float_plan = Plan(platform=plan.platform, provenance=plan.provenance)
        return export(rounded_network(graph, plan), float_plan, path, platform, **options)
    if options:
        name = min(options)
        allowed = ", ".join(_WRITTEN)
        raise ConfigError(f"A {path.suffix} file has no option `{name}`", got=options[name], allowed=allowed)
    return adapter_of(graph.framework).save(graph, plan, path)
