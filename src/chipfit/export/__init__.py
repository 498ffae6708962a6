"""Files for the chip: one format a module, chosen by suffix."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chipfit.errors import ConfigError, ExportError, UnknownNameError, UnsupportedError
from chipfit.files import path_of
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.registry import Entry, entries, require


class FileTensor(NamedTuple):
    """A quantized tensor as it stands in a file."""

    values: np.ndarray | None  #: of a constant, in the file's own order of axes
    qparams: list[tuple[np.ndarray, np.ndarray]]  #: scale and zero point, wherever the file states them


def export(graph: Graph, plan: Plan, path: str | Path, platform: Platform, **options: Any) -> Path:
    """Write `plan` in the format that the suffix of `path` names.

    Args:
        options: those that the format declares; None leaves one out.

    Raises:
        UnknownNameError: no exporter for this suffix.
        ConfigError: an option that this format has not.
        ExportError: a library that the format needs is not installed, or the disk refuses the file.
        UnsupportedError: functions of the user quantize some results: no file would compute what the simulation does.
    """
    foreign = plan.provenance.get("foreign_quantizers")
    if foreign:
        what = "A model whose results are quantized by functions of your own cannot be exported"
        raise UnsupportedError(what, got=", ".join(foreign[:8]), hint="leave activation_quantizer_mapping out")
    path = path_of(path, ExportError)
    found, given = format_of(path.suffix), {k: v for k, v in options.items() if v is not None}
    formats = [e.declares for e in entries("format").values()]
    for name in given.keys() & {o for f in formats for o in f.options} - {*found.declares.options}:
        allowed = ", ".join(sorted(s for f in formats if name in f.options for s in f.suffixes))
        raise ConfigError(f"A {path.suffix} file has no option `{name}`", got=given[name], allowed=allowed)
    return found.thing(graph, plan, path, platform, **given)


def format_of(suffix: str) -> Entry:
    """Return the file format that a suffix names.

    Raises:
        UnknownNameError: no format has this suffix.
        ExportError: the format's libraries are not installed.
    """
    found = declared_format(suffix)
    require(found, ExportError)
    return found


def declared_format(suffix: str) -> Entry:
    """Return the file format that a suffix names, whether its libraries are installed or not.

    Raises:
        UnknownNameError: no format has this suffix.
    """
    by_suffix = {s: e for e in entries("format").values() for s in e.declares.suffixes}
    if suffix not in by_suffix:
        raise UnknownNameError("file format", suffix, by_suffix)
    return by_suffix[suffix]
