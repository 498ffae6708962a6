"""Read platform files: YAML with line numbers, `extends`, and an error for everything that is not understood."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from chipfit.errors import PlatformError, UnknownNameError
from chipfit.graph.ops import ALIASES, OPS
from chipfit.platform.schema import NOT_A_FORMAT, Platform

_BUILTIN = resources.files("chipfit.platform") / "builtin"
#: operators that platform files may name beyond the canonical ones: parts of networks that chipfit does not read yet
_FOREIGN = frozenset(
    {"Attention", "AddN", "BatchToSpace", "DynamicUpdateSlice", "FakeQuant", "Flatten", "GatherND", "GetItem",
     "GRU", "HardTanh", "L2Norm", "LSTM", "MVN", "MirrorPad", "NMS", "Output", "PadV2", "PixelShuffle", "ReluN1To1", "Requantize",
     "Reverse", "SSDPostProcess", "SVDF", "ScatterND", "Shape", "SpaceToBatch", "SquaredDifference", "StridedSlice",
     "TopK", "ArgMin"}
)  # fmt: skip


@lru_cache(maxsize=1)
def groups() -> dict[str, tuple[str, ...]]:
    """The @groups of operators that platform files use."""
    text = (resources.files("chipfit.platform") / "groups.yaml").read_text()
    return {k: tuple(v) for k, v in yaml.safe_load(text).items()}


@lru_cache(maxsize=1)
def names() -> list[str]:
    """The built-in platforms."""
    return sorted(p.name.removesuffix(".yaml") for p in _BUILTIN.iterdir() if p.name.endswith(".yaml"))


def load(what: str | Path | Platform, arch: str | None = None) -> Platform:
    """A platform by built-in name, by file, or as it is.

    Args:
        what: "ort_cpu", "ort_cpu@AVX2" (selects a revision), a path to a YAML file, or a Platform.
        arch: revision tag; the last one of the file when nothing selects one.

    Raises:
        UnknownNameError: no built-in platform and no file of that name, or no such revision.
        PlatformError: the file is malformed; says file, line and key.
    """
    if isinstance(what, Platform):
        return _select(what, arch)
    text = str(what)
    if "@" in Path(text).name:
        text, _, tag = text.rpartition("@")
        arch = arch or tag
    if text in names():
        platform = _read(_BUILTIN / f"{text}.yaml", f"{text}.yaml", ())
    elif text.endswith((".yaml", ".yml")) or Path(text).is_file():
        path = Path(text)
        if not path.is_file():
            raise PlatformError("The platform file does not exist", where=str(path), hint="check the path")
        platform = _read(path, str(path), ())
    else:
        raise UnknownNameError("platform", text, names(), hint="`chipfit platforms list`, or give the path of a YAML file")
    return _select(platform, arch)


def _select(platform: Platform, arch: str | None) -> Platform:
    if arch is None:
        arch = platform.arch_selected or (platform.arch[-1] if platform.arch else None)
    elif arch not in platform.arch:
        raise UnknownNameError(f"revision of '{platform.name}'", arch, platform.arch)
    return platform.model_copy(update={"arch_selected": arch})


class _Lines:
    """Line numbers of a YAML document by key path."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[Any, ...], int] = {}
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            self._walk(node, ())

    def _walk(self, node: yaml.Node, path: tuple[Any, ...]) -> None:
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._lines[(*path, key.value)] = key.start_mark.line + 1
                self._walk(value, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                self._walk(value, (*path, i))

    def at(self, path: tuple[Any, ...]) -> int:
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)


def _read(source: Any, file: str, below: tuple[str, ...]) -> Platform:
    text = source.read_text()
    try:
        data = yaml.safe_load(text)
        lines = _Lines(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise PlatformError(f"This is not valid YAML: {getattr(e, 'problem', e)}", where=f"{file}{line}") from None
    if not isinstance(data, dict):
        raise PlatformError("A platform file is a table of keys", where=file, got=type(data).__name__)

    own_ops, parent_name = data.get("ops") or [], data.get("extends")
    own_fuse = data.get("fuse") or []
    problem = _Problem(file, lines)
    if parent_name:
        if parent_name in below or parent_name == data.get("name"):
            raise problem(("extends",), f"'{parent_name}' extends itself", hint="remove the cycle")
        data = _merge(_parent(source, parent_name, (*below, str(data.get("name"))), problem), data)
    try:
        platform = Platform.model_validate({**data, "file": file})
    except ValidationError as e:
        first = e.errors()[0]
        path = tuple(
            p for p in first["loc"] if not (isinstance(p, str) and p.startswith(("literal", "tuple", "function", "int", "str", "bool")))
        )
        got = first.get("input")
        known = _fields_at(path[:-1]) if first["type"] == "extra_forbidden" else None
        raise problem(
            path,
            f"Key '{path[-1]}' is unknown" if known else first["msg"].removeprefix("Value error, "),
            got=None if known or isinstance(got, dict) else repr(got),
            allowed=", ".join(known) if known else None,
        ) from None
    _check(platform, problem, len(own_ops), len(own_fuse))
    return platform


class _Problem:
    """Makes errors that name file, line and dotted key."""

    def __init__(self, file: str, lines: _Lines) -> None:
        self.file, self.lines = file, lines

    def __call__(self, path: tuple[Any, ...], what: str, **facts: Any) -> PlatformError:
        dotted = ".".join(map(str, path))
        return PlatformError(what, where=f"{self.file}:{self.lines.at(path)}, key {dotted}", **facts)


def _fields_at(path: tuple[Any, ...]) -> list[str]:
    from chipfit.platform import schema

    table: dict[str, Any] = {"formats": schema.Format, "ops": schema.OpRule, "use": schema.Option, "rules": schema.Rule,
                             "fuse": schema.Fuse, "place": schema.Placement, "math": schema.Math}  # fmt: skip
    record = next((table[p] for p in reversed(path) if p in table), Platform)
    return sorted(f.alias or n for n, f in record.model_fields.items() if not f.exclude)


def _parent(source: Any, name: str, below: tuple[str, ...], problem: _Problem) -> dict[str, Any]:
    beside = source.parent / f"{name}.yaml" if isinstance(source, Path) else None
    if beside is not None and beside.is_file():
        platform = _read(beside, str(beside), below)
    elif name in names():
        platform = _read(_BUILTIN / f"{name}.yaml", f"{name}.yaml", below)
    else:
        raise problem(("extends",), f"Platform '{name}' does not exist", allowed=", ".join(names()))
    return platform.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _merge(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """The child's keys over the parent's: tables by key, rules and fusions before the parent's, the rest replaced."""
    out = dict(parent)
    for key, value in child.items():
        if key in ("ops", "fuse"):
            out[key] = [*(value or []), *parent.get(key, [])]
        elif isinstance(value, dict) and isinstance(parent.get(key), dict):
            out[key] = {**parent[key], **value}
        elif key == "gaps":
            out[key] = [*(value or []), *parent.get(key, [])]
        else:
            out[key] = value
    return out


def _check(p: Platform, problem: _Problem, own_ops: int, own_fuse: int) -> None:
    """What the types cannot say: every name that is used is defined, bits of tied slots agree."""
    formats, sources = set(p.formats), set(p.sources)

    def know(path: tuple[Any, ...], word: str, name: str, known: set[str]) -> None:
        if name not in known:
            near = UnknownNameError(word, name, known)
            raise problem(path, near.what, allowed=near.allowed)

    operators = set(OPS) | _FOREIGN | set(ALIASES) | set(groups()) | {"*"}
    for i, op in enumerate(p.ops):
        for k, m in enumerate(op.match):
            know(("ops", i, "match", k), "operator or group", m, operators)
        for s in op.src:
            know(("ops", i, "src"), "source", s, sources)
        for k, use in enumerate(op.use):
            ins = use.in_ if isinstance(use.in_, tuple) else (use.in_,)
            for key, name in [*(("in", n) for n in ins), ("w", use.w), ("b", use.b), ("out", use.out)]:
                if name is not None:
                    know(("ops", i, "use", k, key), "format", name, formats | NOT_A_FORMAT)
            for r in op.rules:
                if r.tie and r.hard and op.how != "follow":
                    bits = {p.formats[n].bits for slot in r.tie for n in _formats_of(use, slot) if n in formats}
                    if len(bits) > 1:
                        raise problem(("ops", i, "rules"), "Slots with different bits are tied", got=sorted(bits), allowed="one width")
        arch = op.when.get("arch", "")
        if arch and arch.removeprefix(">=") not in p.arch:
            know(("ops", i, "when", "arch"), "revision", arch.removeprefix(">="), set(p.arch))
    for i, f in enumerate(p.fuse):
        for s in f.src:
            know(("fuse", i, "src"), "source", s, sources)
        for k, step in enumerate(f.chain or ()):
            for name in step:
                know(("fuse", i, "chain", k), "operator or group", name, operators)
    for key, fmts in (("io_in", p.place.io_in), ("io_out", p.place.io_out)):
        for name in fmts:
            know(("place", key), "format", name, formats | NOT_A_FORMAT)


def _formats_of(use: Any, slot: str) -> tuple[str, ...]:
    if slot in ("w", "b"):
        return (getattr(use, slot) or "",)
    if slot.startswith("out"):
        return (use.out or "",)
    return use.in_ if isinstance(use.in_, tuple) else (use.in_ or "",)
