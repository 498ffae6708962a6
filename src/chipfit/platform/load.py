"""Read platform files: YAML with line numbers, `extends`, and an error for everything that is not understood."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import ValidationError

from chipfit.errors import PlatformError, UnknownNameError
from chipfit.graph.ops import ALIASES, OPS
from chipfit.platform.schema import NOT_A_FORMAT, Platform
from chipfit.platform.where import ATTRIBUTES, TESTS
from chipfit.registry import lookup

_BUILTIN = resources.files("chipfit.platform") / "builtin"
#: operators that platform files may name beyond the canonical ones: parts of networks that chipfit does not read yet
_FOREIGN = frozenset(
    {
        "Attention",
        "AddN",
        "SquaredDifference",
        "BatchToSpace",
        "DynamicUpdateSlice",
        "FakeQuant",
        "Flatten",
        "GatherND",
        "GetItem",
        "GRU",
        "HardTanh",
        "L2Norm",
        "LSTM",
        "MVN",
        "MirrorPad",
        "NMS",
        "Output",
        "PadV2",
        "PixelShuffle",
        "ReluN1To1",
        "Requantize",
        "Reverse",
        "SSDPostProcess",
        "SVDF",
        "ScatterND",
        "Shape",
        "SpaceToBatch",
        "StridedSlice",
        "TopK",
        "ArgMin",
    }
)


@lru_cache(maxsize=1)
def groups() -> dict[str, tuple[str, ...]]:
    """The @groups of operators that platform files use."""
    text = (resources.files("chipfit.platform") / "groups.yaml").read_text()
    return {k: tuple(v) for k, v in yaml.safe_load(text).items()}


@lru_cache(maxsize=1)
def names() -> list[str]:
    """The built-in platforms."""
    return sorted(p.name.removesuffix(".yaml") for p in _BUILTIN.iterdir() if p.name.endswith(".yaml"))


class Modelled(Protocol):
    """A chip described with the classes of `chipfit.target_platform`."""

    def to_platform(self) -> Platform:
        """The record."""


Target = str | Path | Platform | Modelled


def load(what: Target, arch: str | None = None) -> Platform:
    """A platform by built-in name, by file, or as it is.

    Args:
        what: "ort_cpu", "ort_cpu@AVX2" (selects a revision), a path to a YAML file or to a JSON file of modelled
            capabilities, TargetPlatformCapabilities, a TargetPlatformModel, or a Platform.
        arch: revision tag; the last one of the file when nothing selects one.

    Raises:
        UnknownNameError: no built-in platform and no file of that name, or no such revision.
        PlatformError: the file is malformed; says file, line and key.
    """
    if isinstance(what, Platform):
        return _select(what, arch)
    if not isinstance(what, (str, Path)):
        if isinstance(what, type) or not hasattr(what, "to_platform"):
            raise PlatformError(
                "This is no platform",
                got=getattr(what, "__name__", type(what).__name__),
                allowed="a name, a path, a Platform, or modelled capabilities",
            )
        return _select(what.to_platform(), arch)
    text = str(what)
    if text.endswith(".json"):
        return _select(lookup("modelled", "files").read(text).to_platform(), arch)
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
        raise UnknownNameError(
            "platform", text, names(), hint="`chipfit platforms list`, or give the path of a YAML file"
        )
    return _select(platform, arch)


def check(file: str | Path) -> list[PlatformError]:
    """Every problem of a platform file, in the file's order; empty when it loads."""
    try:
        load(Path(file))
    except PlatformError as e:
        return list(getattr(e, "all", [e]))
    return []


def _select(platform: Platform, arch: str | None) -> Platform:
    if arch is None:
        arch = platform.arch_selected or (platform.arch[-1] if platform.arch else None)
    elif arch not in platform.arch:
        raise UnknownNameError(f"revision of '{platform.name}'", arch, platform.arch)
    return platform.model_copy(update={"arch_selected": arch})


class _Lines:
    """Line numbers of a YAML document by key path."""

    def __init__(self, node: yaml.Node | None) -> None:
        self._lines: dict[tuple[Any, ...], int] = {}
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


class _Loader(yaml.SafeLoader):
    """Refuses aliases, which may nest without end, and a key given twice, where YAML would silently keep the last."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, 'aliases (*name) are not read in platform files; quote "*"', mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(source: Any, file: str, below: tuple[str, ...]) -> Platform:
    try:
        text = source.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
        lines = _Lines(node)
    except (OSError, UnicodeDecodeError) as e:
        raise PlatformError(f"This file cannot be read as text: {e}", where=file) from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise PlatformError(f"This is not valid YAML: {getattr(e, 'problem', e)}", where=f"{file}{line}") from None
    if not isinstance(data, dict):
        raise PlatformError("A platform file is a table of keys", where=file, got=type(data).__name__)

    problem = _Problem(file, lines)
    parent = data.get("extends")
    if parent is not None:
        if not isinstance(parent, str):
            raise problem(("extends",), "extends is the name of one platform", got=repr(parent))
        if file in below:
            raise problem(
                ("extends",), f"'{parent}' extends itself, through {' and '.join(below)}", hint="remove the cycle"
            )
        data = _merge(_parent(source, parent, (*below, file), problem), data, problem)
    found: list[PlatformError] = []
    try:
        platform = Platform.model_validate({**data, "file": file})
    except ValidationError as e:
        found = _explain(e, problem)
    else:
        found = list(_check(platform, problem))
    if found:
        more = f"`chipfit platforms check {file}` lists {len(found) - 1} more" if len(found) > 1 else ""
        first = PlatformError(
            found[0].what, where=found[0].where, got=found[0].got, allowed=found[0].allowed, hint=more
        )
        first.all = found  # type: ignore[attr-defined]  # for `check`
        raise first
    return platform


#: pydantic's error types in our words
_WORDS = {
    "missing": "is missing",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a table of keys",
    "model_type": "must be a table of keys",
    "string_type": "must be text",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "too_long": "must be a list [low, high]",
    "too_short": "must be a list [low, high]",
}


def _explain(e: ValidationError, problem: _Problem) -> list[PlatformError]:
    """One error per place: the members of a union complain together."""
    places: dict[tuple[Any, ...], list[Any]] = {}
    for error in e.errors():
        kept = [
            p
            for p in error["loc"]
            if not (isinstance(p, str) and re.match(r"(literal|tuple|function|int|str|bool|float|list)\b", p))
        ]
        places.setdefault(tuple(kept) or ("?",), []).append(error)
    out = []
    for path, errors in places.items():
        first, got, key = errors[0], errors[0].get("input"), path[-1]
        shown = None if isinstance(got, dict) else repr(got)
        if first["type"] == "extra_forbidden":
            known = _fields_at(path[:-1])
            near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.5)
            out.append(
                problem(
                    path,
                    f"Key '{key}' is unknown",
                    allowed=f"did you mean {', '.join(near)}" if near else ", ".join(known),
                )
            )
        elif first["type"] == "missing":
            out.append(problem(path, f"Key '{key}' is missing: it is required"))
        elif first["type"] == "literal_error" or len(errors) > 1:
            literal = [x["ctx"]["expected"] for x in errors if x["type"] == "literal_error"]
            others = [_WORDS[x["type"]].removeprefix("must be ") for x in errors if x["type"] in _WORDS]
            out.append(
                problem(
                    path,
                    f"Value of '{key}' is not understood",
                    got=shown,
                    allowed=", or ".join(dict.fromkeys(literal + others)),
                )
            )
        elif first["type"] in _WORDS:
            out.append(problem(path, f"'{key}' {_WORDS[first['type']]}", got=shown))
        else:
            said = first["msg"].removeprefix("Value error, ").replace("Input should", f"'{key}' should")
            out.append(problem(path, said, got=shown))
    return out


class _Problem:
    """Makes errors that name file, line and dotted key."""

    def __init__(self, file: str, lines: _Lines) -> None:
        self.file, self.lines = file, lines

    def __call__(self, path: tuple[Any, ...], what: str, **facts: Any) -> PlatformError:
        dotted = ".".join(map(str, path))
        return PlatformError(what, where=f"{self.file}:{self.lines.at(path)}, key {dotted}", **facts)


def _fields_at(path: tuple[Any, ...]) -> list[str]:
    from chipfit.platform import schema

    if not path:
        return sorted(f.alias or n for n, f in Platform.model_fields.items() if not f.exclude)
    table: dict[str, Any] = {
        "formats": schema.Format,
        "ops": schema.OpRule,
        "use": schema.Option,
        "rules": schema.Rule,
        "fuse": schema.Fuse,
        "place": schema.Placement,
        "math": schema.Math,
    }
    record = next((table[p] for p in reversed(path) if p in table), Platform)
    return sorted(f.alias or n for n, f in record.model_fields.items() if not f.exclude)


def _parent(source: Any, name: str, below: tuple[str, ...], problem: _Problem) -> dict[str, Any]:
    beside = source.parent / f"{name}.yaml" if isinstance(source, Path) else None
    if beside is not None and beside.is_file():
        platform = _read(beside, str(beside), below)
    elif name in names():
        platform = _read(_BUILTIN / f"{name}.yaml", f"{name}.yaml", below)
    else:
        raise problem(
            ("extends",),
            f"Platform '{name}' does not exist",
            allowed=UnknownNameError("platform", name, names()).allowed,
        )
    return platform.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _merge(parent: dict[str, Any], child: dict[str, Any], problem: _Problem) -> dict[str, Any]:
    """The child's keys over the parent's: tables by key, rules and fusions before the parent's, the rest replaced."""
    out = dict(parent)
    for key, value in child.items():
        if key in ("ops", "fuse", "gaps"):
            if not isinstance(value or [], list):
                raise problem((key,), f"'{key}' must be a list")
            out[key] = [*(value or []), *parent.get(key, [])]
        elif isinstance(value, dict) and isinstance(parent.get(key), dict):
            out[key] = {**parent[key], **value}
        else:
            out[key] = value
    return out


def _check(p: Platform, problem: _Problem) -> Iterator[PlatformError]:
    """What the types cannot say: every name that is used is defined, bits of tied slots agree."""
    formats, sources = set(p.formats), set(p.sources)
    storable = formats | NOT_A_FORMAT
    operators = set(OPS) | _FOREIGN | set(ALIASES) | set(groups()) | {"*"} | {f"@{name}" for name in p.sets}

    def know(path: tuple[Any, ...], word: str, name: Any, known: Iterable[str]) -> Iterator[PlatformError]:
        if name is not None and name not in known:
            near = UnknownNameError(word, str(name), known)
            yield problem(path, near.what, allowed=near.allowed)

    def gate(path: tuple[Any, ...], when: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[PlatformError]:
        for key in when:
            yield from know((*path, key), "gate", key, keys)
        if "arch" in when:
            yield from know((*path, "arch"), "revision", re.sub("^(>=|<)", "", str(when["arch"])), p.arch)

    for tag in {a for a in p.arch if p.arch.count(a) > 1}:
        yield problem(("arch",), f"Revision '{tag}' is listed twice")
    for label, members in p.sets.items():
        for k, member in enumerate(members):
            for canonical in member.op:
                yield from know(("sets", label, k, "op"), "operator", canonical, set(OPS))
    for i, op in enumerate(p.ops):
        at = ("ops", i)
        for k, m in enumerate(op.match):
            yield from know((*at, "match", k), "operator or group", m, operators)
        for s in op.src:
            yield from know((*at, "src"), "source", s, sources)
        yield from gate((*at, "when"), op.when, ("arch", "bits", "runtime"))
        for attribute, want in op.where.items():
            yield from know((*at, "where", attribute), "attribute", attribute, ATTRIBUTES)
            for test in want if isinstance(want, dict) else ():
                yield from know((*at, "where", attribute, test), "test", test, TESTS)
        for k, use in enumerate(op.use):
            ins = use.in_ if isinstance(use.in_, tuple) else (use.in_,)
            for key, name in [*(("in", n) for n in ins), ("w", use.w), ("b", use.b), ("out", use.out)]:
                yield from know((*at, "use", k, key), "format", name, storable)
            yield from gate((*at, "use", k, "when"), use.when, ("arch", "bits", "runtime"))
            for r in op.rules:
                if r.tie and r.hard and op.how != "follow":
                    bits = {p.formats[n].bits for slot in r.tie for n in _formats_of(use, slot) if n in formats}
                    if len(bits) > 1:
                        yield problem(
                            (*at, "rules"), "Slots with different bits are tied", got=sorted(bits), allowed="one width"
                        )
    for i, f in enumerate(p.fuse):
        for s in f.src:
            yield from know(("fuse", i, "src"), "source", s, sources)
        for k, step in enumerate(f.steps):
            for name in step:
                yield from know(("fuse", i, "chain" if f.chain else "graph", k), "operator or group", name, operators)
        yield from know(("fuse", i, "inner"), "format", f.inner, storable)
        yield from gate(("fuse", i, "when"), f.when, ("arch", "phase", "single_use"))
    for key, fmts in (("io_in", p.place.io_in), ("io_out", p.place.io_out)):
        for name in fmts:
            yield from know(("place", key), "format", name, storable)


def _formats_of(use: Any, slot: str) -> tuple[str, ...]:
    if slot in ("w", "b"):
        return (getattr(use, slot) or "",)
    if slot.startswith("out"):
        return (use.out or "",)
    return use.in_ if isinstance(use.in_, tuple) else (use.in_ or "",)
