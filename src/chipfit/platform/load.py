"""Load platforms from YAML files, with `extends`, and report every problem of a file by line and key."""

import os
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from chipfit.errors import PlatformError, UnknownNameError
from chipfit.files import existing_file
from chipfit.operators.table import ALIASES, FOREIGN, GROUPS, OPS
from chipfit.platform.builtin import built_in
from chipfit.platform.predicates import ATTRIBUTES, TESTS
from chipfit.platform.schema import WORDS, Gate, Option, Platform
from chipfit.platform.yaml_file import YamlFile, well_formed
from chipfit.registry import lookup
from chipfit.validation import Path as Keys
from chipfit.validation import Problem, problems_of

_BUILTIN = resources.files("chipfit.platform") / "builtin"


@lru_cache(maxsize=1)
def names() -> list[str]:
    """Return the names of the built-in platforms."""
    return built_in()


#: a name, a file, a Platform, or a chip described with the classes of `chipfit.target_platform`
Target = str | Path | Platform | Any


def load(what: Target, arch: str | None = None) -> Platform:
    """Return a platform by built-in name, by file, or as it is.

    Args:
        what: "ort_cpu", "ort_cpu@AVX2" (selects a revision), a path to a YAML file or to a JSON file of modelled
            capabilities, TargetPlatformCapabilities, a TargetPlatformModel, or a Platform.
        arch: revision tag; unless one is selected, the file's default, or its last one.

    Raises:
        UnknownNameError: neither a built-in platform nor a file has that name, or there is no such revision.
        PlatformError: the file is malformed; names file, line and key.

    Examples:
        >>> import chipfit
        >>> chipfit.load_platform("tflite_int8").name
        'tflite_int8'
    """
    if isinstance(what, Platform):
        return _select(what, arch)
    if not isinstance(what, (str, Path)):
        platform = what.to_platform() if hasattr(what, "to_platform") and not isinstance(what, type) else None
        if not isinstance(platform, Platform):
            got = getattr(what, "__name__", type(what).__name__)
            allowed = "a name, a path, a Platform, or modelled capabilities"
            raise PlatformError("The platform must be given by name, path or record", got=got, allowed=allowed)
        return _select(platform, arch)
    text = str(what)
    if text.endswith(".json"):
        return _select(lookup("modelled", "files").read(text).to_platform(), arch)
    if "@" in Path(text).name:
        text, _, tag = text.rpartition("@")
        arch = arch or tag
    if text in names():
        platform = _read(_builtin_file(f"{text}.yaml"), _BUILTIN)
    elif text.endswith((".yaml", ".yml")) or os.path.isfile(text):
        path = existing_file(text, PlatformError, "The platform file")
        platform = _read(YamlFile(path, text), path.parent)
    else:
        hint = "`chipfit platforms list`, or give the path of a YAML file"
        raise UnknownNameError("platform", text, names(), near=_about(text), hint=hint)
    return _select(platform, arch)


load_platform = load  #: for modules that load other things too


def check(file: str | Path) -> list[PlatformError]:
    """Return every problem of a platform file, in the order of the file; an empty list if it loads."""
    try:
        load(Path(file))
    except PlatformError as e:
        return list(e.all) or [e]
    return []


def _select(platform: Platform, arch: str | None) -> Platform:
    if arch is None:
        arch = platform.arch_selected or platform.arch_default or (platform.arch[-1] if platform.arch else None)
    elif arch not in platform.arch:
        raise UnknownNameError(f"revision of '{platform.name}'", arch, platform.arch)
    return platform.model_copy(update={"arch_selected": arch})


def _read(source: YamlFile, folder: Any, below: tuple[str, ...] = ()) -> Platform:
    """Return the platform of a file in a folder, with what it extends; `below` are the files that extend it."""
    data, file = source.data, source.file
    if data.get("extends") is not None:
        data = _merge(_parent(source, folder, (*below, file)), data)
    problems: list[Problem] = [Problem((k,), f"Key '{k}' is unknown", {}) for k in _INTERNAL if k in data]
    try:
        platform = Platform.model_validate({**data, "file": file})
    except ValidationError as e:
        problems += problems_of(e.errors(), data, Platform)
        platform = well_formed(Platform, data)
    problems += _problems(platform, {at for at, *_ in problems})
    if not problems:
        return platform
    errors = [source.error(at, what, **facts) for at, what, facts in sorted(problems, key=lambda p: source.line(p[0]))]
    one, rest = errors[0], len(errors) - 1
    more = f"`chipfit platforms check {file}` lists {rest} more" if rest else ""
    hint = "; ".join(filter(None, [one.hint, more]))
    first = PlatformError(one.what, where=one.where, got=one.got, allowed=one.allowed, hint=hint)
    first.all = errors  # type: ignore[assignment]  # of the class that `YamlFile` was given
    raise first


@cache
def _builtin_file(file: str) -> YamlFile:
    """Return the file of a built-in platform, which is parsed once."""
    return YamlFile(_BUILTIN / file, file)


def _about(word: str) -> list[str]:
    """Return the built-in platforms whose name or title holds a word, such as the name of a runtime or a maker."""

    def letters(text: str) -> str:
        return re.sub(r"\W|_", "", text).lower()

    found, wanted = list[str](), letters(word)
    for name in names() if wanted else ():
        title = re.search(r"^title:(.*)", (_BUILTIN / f"{name}.yaml").read_text("utf-8"), re.M)
        if any(wanted in letters(text) for text in (name, title[1] if title else "")):
            found.append(name)
    return found


def check_consistent(p: Platform, where: str) -> None:
    """Raise a PlatformError if a platform that no file was checked for uses a name that is not defined."""
    for path, what, facts in _problems(p, set()):
        raise PlatformError(what, where=f"{where}, {'.'.join(map(str, path))}", **facts)
    if p.arch_selected not in (p.arch or (None,)):
        raise UnknownNameError(f"revision of '{p.name}'", str(p.arch_selected), p.arch)


#: fields of a Platform that are not keys of a file
_INTERNAL = ("arch_selected", "file")


def _parent(source: YamlFile, folder: Any, below: tuple[str, ...]) -> dict[str, Any]:
    """Return the data of the platform that a file extends: a file beside it, else a built-in platform."""
    name = source.data["extends"]
    if not isinstance(name, str):
        raise source.error(("extends",), "'extends' must be the name of one platform", got=repr(name))
    if source.file in below[:-1]:
        through = " and ".join(below[:-1])
        raise source.error(("extends",), f"'{name}' extends itself, through {through}", hint="remove the cycle")
    beside = None if folder == _BUILTIN else folder / f"{name}.yaml"
    if beside is not None and os.path.isfile(beside):  # False also for a name that no disk can have
        platform = _read(YamlFile(beside, str(beside)), folder, below)
    elif name in names():
        platform = _read(_builtin_file(f"{name}.yaml"), _BUILTIN, below)
    else:
        near = UnknownNameError("platform", name, names(), near=_about(name))
        raise source.error(("extends",), f"Platform '{name}' does not exist", **near.choices)
    return platform.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _merge(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """Return the child's keys over the parent's: tables by key, rules and fusions in front, the rest replaced."""
    out = dict(parent)
    for key, value in child.items():
        if key in ("ops", "fuse", "gaps"):
            out[key] = [*(value or []), *parent.get(key, [])] if isinstance(value or [], list) else value
        elif isinstance(value, dict) and isinstance(parent.get(key), dict):
            out[key] = {**parent[key], **value}
        else:
            out[key] = value
    return out


#: kind of a name -> key of the file under which such names are defined
_TABLES = {"format": "formats", "source": "sources", "revision": "arch", "operator or group": "sets"}


def _problems(p: Platform, wrong: set[Keys]) -> Iterator[Problem]:
    """Yield the problems that types cannot show: names that are not defined, tied slots with different bits.

    Args:
        p: a platform, perhaps without the malformed parts of its file.
        wrong: where those were; names of a table whose key is mistyped are not looked up.
    """
    wrong = wrong | {(t,) for key, *below in wrong if not below for t in get_close_matches(str(key), _TABLES.values())}
    for tag in {a for a in p.arch if p.arch.count(a) > 1}:
        yield Problem(("arch",), f"Revision '{tag}' is listed twice", {})
    for path, word, name, known in _names(p):
        if name is not None and name not in known and not {path, (_TABLES.get(word),)} & wrong:
            near = UnknownNameError(word, str(name), known)
            yield Problem(path, near.what, near.choices)
    for i, op in enumerate(p.ops):
        for use in op.use if op.how != "follow" else ():
            for r in op.rules:
                stored = {n for slot in r.tie or () if slot for n in _formats_of(use, slot)} if r.hard else set()
                bits = sorted({p.formats[n].bits for n in stored & set(p.formats)} - {None})
                if len(bits) > 1:
                    facts = {"got": bits, "allowed": "one width"}
                    yield Problem(("ops", i, "rules"), "Slots with different bits are tied", facts)


def _names(p: Platform) -> Iterator[tuple[Keys, str, str, Iterable[str]]]:
    """Yield every name that a platform uses: its path, its kind, the name, and the names that are defined."""
    operators = {*OPS, *FOREIGN, *ALIASES, *GROUPS, "*", *(f"@{name}" for name in p.sets)}
    formats = {slot: words | set(p.formats) for slot, words in WORDS.items()}

    def gate(path: Keys, when: Gate, *keys: str) -> Iterator[tuple[Keys, str, str, Iterable[str]]]:
        yield from (((*path, key), "gate", key, keys) for key in when)
        if "arch" in when:
            yield (*path, "arch"), "revision", re.sub("^(>=|<)", "", str(when["arch"])), p.arch

    if p.arch_default is not None:
        yield ("arch_default",), "revision", p.arch_default, p.arch
    for label, members in p.sets.items():
        yield from ((("sets", label, k, "op"), "operator", op, OPS) for k, m in enumerate(members) for op in m.op)
    for i, rule in enumerate(p.ops):
        at = ("ops", i)
        yield from (((*at, "match", k), "operator or group", m, operators) for k, m in enumerate(rule.match))
        yield from (((*at, "src"), "source", s, p.sources) for s in rule.src)
        yield from gate((*at, "when"), rule.when, "arch", "bits", "runtime")
        for attribute, want in rule.where.items():
            yield (*at, "where", attribute), "attribute", attribute, ATTRIBUTES
            tests = want if isinstance(want, dict) else ()
            yield from (((*at, "where", attribute, test), "condition", test, TESTS) for test in tests)
        for k, use in enumerate(rule.use):
            slots = {"in": use.ins, "w": (use.w,), "b": (use.b,), "out": (use.out,), "state": (use.state,)}
            used = [(slot, name) for slot, stored in slots.items() for name in stored if name is not None]
            yield from (((*at, "use", k, slot), "format", name, formats[slot]) for slot, name in used)
            yield from gate((*at, "use", k, "when"), use.when, "arch", "bits", "runtime")
    for i, f in enumerate(p.fuse):
        at, nodes = ("fuse", i), f.graph["nodes"] if f.graph else {}
        yield from (((*at, "src"), "source", s, p.sources) for s in f.src)
        steps: dict[Keys, Iterable[str]] = {("chain", k): step for k, step in enumerate(f.chain or ())}
        steps |= {("graph", "nodes", k): [n] if isinstance(n, str) else n for k, n in nodes.items()}
        yield from (((*at, *k), "operator or group", name, operators) for k, step in steps.items() for name in step)
        yield (*at, "inner"), "format", f.inner, formats["inner"]
        yield from gate((*at, "when"), f.when, "arch", "phase", "single_use")
    for k, stage in enumerate(p.math.acc):
        yield from gate(("math", "acc", k, "when"), stage.get("when", Gate()), "arch")
    for key, stored in (("io_in", p.place.io_in), ("io_out", p.place.io_out)):
        yield from ((("place", key), "format", name, formats[key]) for name in stored)


def _formats_of(use: Option, slot: str) -> tuple[str, ...]:
    if slot in ("w", "b"):
        return (getattr(use, slot) or "",)
    return (use.out or "",) if slot.startswith("out") else use.ins
