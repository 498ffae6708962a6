"""YAML with the line of every key, and what is wrong with it by file, line and key."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import get_type_hints, is_typeddict

from chipfit.errors import ChipfitError, PlatformError
from chipfit.files import package_data, read_text
from chipfit.platform import schema

Path = tuple[Any, ...]  #: keys and indices from the top of a file
Problem = tuple[Path, str, dict[str, Any]]  #: where, what is wrong, and the facts of the error about it

#: pydantic's error types in our words
_WORDS: dict[str, str] = package_data("chipfit.platform", "words.yaml")
_WHOLE: Path = ("?",)  #: of what is wrong with a file, and with no key of it
#: levels of tables and lists in a platform file; the deepest one that means something has 8
_DEEPEST = 40
#: what pydantic puts into a path for a member of a union or a key of a table, though no file has such a key
_TAG = re.compile(r"(literal|tuple|list|function|int|str|bool)\b|\[key\]$")


class Source:
    """A file as it stands there: its data, and errors about them that name file, line and dotted key.

    Args:
        text: what to read: a Path, or a resource of a package.
        file: its name in errors.
        failure: the kind of these errors.

    Raises:
        failure: the file cannot be read, or holds no table of keys.
    """

    def __init__(self, text: Any, file: str, failure: type[ChipfitError] = PlatformError) -> None:
        self.file, self.failure = file, failure
        try:
            content = read_text(text, failure)
            _check_plain(content)
            loader = _Loader(content)
            node = loader.get_single_node()
            data = None if node is None else loader.construct_document(node)
        except yaml.YAMLError as e:
            mark = getattr(e, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            raise failure(f"This is not valid YAML: {getattr(e, 'problem', e)}", where=f"{file}{line}") from None
        if not isinstance(data, dict):
            raise failure("Such a file is a table of keys", where=file, got=type(data).__name__)
        self.data: dict[str, Any] = data
        self.under: Source | None = None  #: the file that this one goes over
        self._lines = dict(_lines(node, ()))

    def holds(self, path: Path) -> bool:
        """There is something at this path, here or in the file that this one goes over."""
        return path in self._lines or (self.under is not None and self.under.holds(path))

    def line(self, path: Path) -> int:
        """Where the last key of the path stands, or of as much of it as there is."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def error(self, path: Path, what: str, **facts: Any) -> ChipfitError:
        if self.under is not None and path not in self._lines and self.under.holds(path):
            return self.under.error(path, what, **facts)
        at = f":{self.line(path)}, key {'.'.join(map(str, path))}" if path != _WHOLE else ""
        return self.failure(what, where=f"{self.file}{at}", **facts)


def _lines(node: yaml.Node, path: Path) -> Iterator[tuple[Path, int]]:
    """Key path and line of everything in a document; a key comes after its value, whose line may be a later one."""
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _lines(value, (*path, key.value))
            yield (*path, key.value), key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, (*path, i))


_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  #: libyaml's, ten times as fast, where it is installed


def _check_plain(text: str) -> None:
    """Refuse aliases, which may nest without end, and what nests too deep."""
    depth = 0
    for event in yaml.parse(text, Loader=_BASE):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, 'aliases (*name) are not read; quote "*"', event.start_mark)
        if isinstance(event, yaml.NodeEvent) and depth == _DEEPEST:
            why = f"it nests deeper than {_DEEPEST} levels"
            raise yaml.composer.ComposerError(None, None, why, event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


class _Loader(_BASE):  # type: ignore[misc]  # one of two
    """Refuses a key given twice, where YAML would silently keep the last, and half characters."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            data = super().construct_object(node, deep)
            if isinstance(data, str):
                data.encode()  # "\\ud800" is half a character, which no file holds
            return data
        except ValueError as e:  # what looks like a number or a date and is none: 0x, 2001-99-99, thousands of digits
            why = f"this is no text, no number and no date: {e}"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is one word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def explain(e: ValidationError, source: Source, record: Any = schema.Platform) -> Iterator[Problem]:
    """One problem for each place: the members of a union complain together.

    Args:
        record: what the file was read as.
    """
    places: dict[Path, list[Any]] = {}
    for error in e.errors():
        if error["type"] == "too_short" and error["input"]:
            continue  # it has entries, and each of them is refused
        path: Path = ()
        for part in error["loc"]:
            if source.holds((*path, part)) or not _TAG.match(str(part)):
                path = (*path, part)
        places.setdefault(path or _WHOLE, []).append(error)
    for path, errors in places.items():
        what, facts = _in_words(path, errors, record)
        yield from ((path, line, facts) for line in what.splitlines())


def _in_words(path: Path, errors: list[Any], record: Any) -> tuple[str, dict[str, Any]]:
    """What is wrong at a place, and the facts of the error about it."""
    first, got = errors[0], errors[0].get("input")
    names = [k for k, part in enumerate(path) if isinstance(part, str)]
    key = ".".join(map(str, path[names[-1] if names else 0 :]))  # an entry of a list by the name of the list
    facts = {} if isinstance(got, dict) else {"got": repr(got)}
    if first["type"] == "extra_forbidden":
        known = _keys_at(path[:-1], record)
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        return f"Key '{key}' is unknown", {"allowed": f"did you mean {', '.join(near)}" if near else ", ".join(known)}
    if first["type"] == "missing":
        return f"Key '{key}' is missing: it is required", {}
    if first["type"] == "literal_error" or len(errors) > 1:
        literal = [x["ctx"]["expected"] for x in errors if x["type"] == "literal_error"]
        others = [_WORDS[x["type"]].removeprefix("must be ") for x in errors if x["type"] in _WORDS]
        return f"Value of '{key}' is not understood", facts | {"allowed": ", or ".join(dict.fromkeys(literal + others))}
    if first["type"] in _WORDS:
        return f"'{key}' {_WORDS[first['type']]}", facts
    return first["msg"].removeprefix("Value error, ").replace("Input should", f"'{key}' should"), facts


def _keys_at(path: Path, record: Any) -> list[str]:
    """The keys that may stand at a path of a record."""
    for part in path:
        record = next(iter(_records(_fields(record)[part])), record) if part in _fields(record) else record
    return sorted(_fields(record))


def _fields(record: Any) -> dict[str, Any]:
    """Key -> type of what stands there, as files call it."""
    if is_typeddict(record):
        return get_type_hints(record)
    return {f.alias or n: f.annotation for n, f in record.model_fields.items() if not f.exclude}


def _records(kind: Any) -> list[Any]:
    """The tables of keys in a type."""
    is_record = is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel))
    return [kind] if is_record else [r for inner in get_args(kind) for r in _records(inner)]


def what_fits(kind: Any, data: Any) -> Any:
    """Data as a type, without what is malformed in them; the others keep their places, for names to be looked up."""
    either = (kind,) if get_origin(kind) is dict else (kind, *get_args(kind))
    many = next((k for k in either if get_origin(k) is tuple), None)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        given = data if isinstance(data, dict) else {}
        known = {n: f.annotation for n, f in kind.model_fields.items() if (f.alias or n) in given or f.is_required()}
        keys = {n: kind.model_fields[n].alias or n for n in known}
        return kind.model_construct(**{n: what_fits(known[n], given.get(k)) for n, k in keys.items()})
    if is_typeddict(kind):
        given, known = data if isinstance(data, dict) else {}, get_type_hints(kind)
        return {k: what_fits(known[k], given[k]) for k in known if k in given}
    if isinstance(data, list) and many:
        return tuple(what_fits(get_args(many)[0], x) for x in data)
    if isinstance(data, dict) and get_origin(kind) is dict:
        return {str(k): what_fits(get_args(kind)[1], x) for k, x in data.items()}
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError:
        return () if many else {} if get_origin(kind) is dict else None
