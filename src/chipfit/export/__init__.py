"""Files for the chip: one format a module, chosen by suffix, or by name where formats share one."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chipfit.errors import ConfigError, ExportError, UnknownNameError, UnsupportedError, check_known
from chipfit.files import path_of
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.registry import Entry, entries, entry, require_libraries


class FileTensor(NamedTuple):
    """A quantized tensor as it stands in a file."""

    values: np.ndarray | None  #: of a constant, in the file's own order of axes
    qparams: list[tuple[np.ndarray, np.ndarray]]  #: scale and zero point, wherever the file states them


def export(
    graph: Graph, plan: Plan, path: str | Path, platform: Platform, *, format: str | None = None, **options: Any
) -> Path:
    """Write `plan` in the format that the suffix of `path` names.

    Args:
        format: name of another format that has this suffix.
        options: those that the format declares; None leaves one out.

    Raises:
        UnknownNameError: no exporter for this suffix, or none of this name.
        ConfigError: an option that this format has not, or a format that has not this suffix.
        ExportError: a library that the format needs is not installed, or the disk refuses the file.
        UnsupportedError: functions of the user quantize some results: no file would compute what the simulation does.
    """
    foreign = plan.provenance.get("foreign_quantizers")
    if foreign:
        what = "A model whose results are quantized by functions of your own cannot be exported"
        raise UnsupportedError(what, got=", ".join(foreign[:8]), hint="leave activation_quantizer_mapping out")
    path = path_of(path, ExportError)
    found, given = format_of(path.suffix, format), {k: v for k, v in options.items() if v is not None}
    formats = [e.declares for e in entries("format").values() if not e.declares.named]
    for name in given.keys() & {o for f in formats for o in f.options} - {*found.declares.options}:
        allowed = ", ".join(sorted(s for f in formats if name in f.options for s in f.suffixes))
        form = f"A {path.suffix} file" if format is None else f"A '{format}' file"
        raise ConfigError(f"{form} has no option `{name}`", got=given[name], allowed=allowed)
    known = found.declares.options
    if known and (other := next((name for name in given if name not in known), None)):
        raise UnknownNameError(f"option of {path.suffix} files", other, known)
    if type(batch := given.get("batch", 1)) is not int or batch < 1:
        raise ConfigError("Option 'batch' must be a positive integer", got=repr(batch))
    return found.thing(graph, plan, path, platform, **given)


def format_of(suffix: str, name: str | None = None) -> Entry:
    """Return the file format that a suffix names, or the format of a name.

    Raises:
        UnknownNameError: no format has this suffix or name.
        ConfigError: the format of this name has not this suffix.
        ExportError: the format's libraries are not installed.
    """
    found = declared_format(suffix) if name is None else entry("format", name)
    if suffix not in found.declares.suffixes:
        allowed = ", ".join(found.declares.suffixes)
        raise ConfigError(f"Format '{name}' cannot write this suffix", got=suffix or "no suffix", allowed=allowed)
    require_libraries(found, ExportError)
    return found


def declared_format(suffix: str) -> Entry:
    """Return the file format that a suffix names, whether its libraries are installed or not.

    Raises:
        UnknownNameError: no format has this suffix.
        ConfigError: there is no suffix.
    """
    if not suffix:
        allowed = ", ".join(s for e in entries("format").values() if not e.declares.named for s in e.declares.suffixes)
        raise ConfigError("The name of the file has no suffix, which chooses the format", allowed=allowed)
    by_suffix = {s: e for e in entries("format").values() if not e.declares.named for s in e.declares.suffixes}
    check_known("file format", suffix, by_suffix)
    return by_suffix[suffix]
