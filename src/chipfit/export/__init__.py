"""Files for the chip: one format a module, chosen by suffix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.errors import UnknownNameError, UnsupportedError
from chipfit.registry import lookup, registered

if TYPE_CHECKING:
    from chipfit.graph.ir import Graph
    from chipfit.plan.record import Plan
    from chipfit.platform.schema import Platform

_SUFFIX = {".onnx": "onnx", ".tflite": "tflite", ".json": "encodings"}


def export(graph: Graph, plan: Plan, path: str | Path, platform: Platform, **options: Any) -> Path:
    """Write `plan` in the format that the suffix of `path` names.

    Raises:
        UnknownNameError: no exporter for this suffix.
        UnsupportedError: functions of the user quantize some results: no file would compute what the simulation does.
    """
    foreign = plan.provenance.get("foreign_quantizers")
    if foreign:
        raise UnsupportedError(
            "A model whose results are quantized by functions of your own cannot be exported",
            got=", ".join(foreign[:8]),
            hint="leave activation_quantizer_mapping out",
        )
    path = Path(path)
    if path.suffix not in _SUFFIX or _SUFFIX[path.suffix] not in registered("exporter"):
        raise UnknownNameError("file format", path.suffix, _SUFFIX)
    return lookup("exporter", _SUFFIX[path.suffix])(graph, plan, path, platform, **options)
