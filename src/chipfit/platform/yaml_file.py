"""YAML files with the line of every key, and their problems by file, line and key."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from chipfit.errors import ChipfitError, PlatformError
from chipfit.files import read_text
from chipfit.validation import Path, types_of

#: most levels of tables and lists in a file; a platform file needs 8
_DEEPEST = 40


class YamlFile:
    """The data of a YAML file, with errors about them that name file, line and dotted key.

    Args:
        text: a Path, or a resource of a package.
        file: its name in errors.
        failure: the class of these errors.

    Raises:
        failure: the file cannot be read, or does not hold a table of keys.
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
            raise failure(f"The file is not valid YAML: {getattr(e, 'problem', e)}", where=f"{file}{line}") from None
        if not isinstance(data, dict):
            raise failure("The file must hold a table of keys", where=file, got=type(data).__name__)
        self.data: dict[str, Any] = data
        self.under: YamlFile | None = None  #: the file whose keys this one overrides
        self._lines = dict(_lines(node, ()))

    def holds(self, path: Path) -> bool:
        """Return whether there is something at a path, here or in the file that this one overrides."""
        return path in self._lines or (self.under is not None and self.under.holds(path))

    def line(self, path: Path) -> int:
        """Return the line of the last key of a path, or of as much of the path as there is."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def error(self, path: Path, what: str, **facts: Any) -> ChipfitError:
        """Return an error that names the place of a path."""
        if self.under is not None and path not in self._lines and self.under.holds(path):
            return self.under.error(path, what, **facts)
        at = f":{self.line(path)}, key {'.'.join(map(str, path))}" if path else ""
        return self.failure(what, where=f"{self.file}{at}", **facts)


def _lines(node: yaml.Node, path: Path) -> Iterator[tuple[Path, int]]:
    """Yield path and line of everything in a document; a key comes after its value, whose line may be a later one."""
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _lines(value, (*path, key.value))
            yield (*path, key.value), key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, (*path, i))


#: the loader of libyaml, ten times as fast, if it is installed
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_plain(text: str) -> None:
    """Refuse aliases, which may nest without end, and too many levels."""
    depth = 0
    for event in yaml.parse(text, Loader=_BASE):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, 'aliases (*name) are not read; quote "*"', event.start_mark)
        if isinstance(event, yaml.NodeEvent) and depth == _DEEPEST:
            why = f"it nests deeper than {_DEEPEST} levels"
            raise yaml.composer.ComposerError(None, None, why, event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


class _Loader(_BASE):  # type: ignore[misc]  # one of two
    """A loader that refuses half characters, and a key given twice, of which YAML would silently keep the last."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            data = super().construct_object(node, deep)
            if isinstance(data, str):
                data.encode()  # "\\ud800" is half a character, which cannot be written to a file
            return data
        except ValueError as e:  # looks like a number or a date, but is not: 0x, 2001-99-99, thousands of digits
            why = f"this is neither text nor a number nor a date: {e}"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def well_formed(kind: Any, data: Any) -> Any:
    """Return data as a type, without their malformed parts; the other parts keep their places."""
    either = (kind,) if get_origin(kind) is dict else (kind, *get_args(kind))
    many = next((k for k in either if get_origin(k) is tuple), None)
    if known := types_of(kind):
        needed = {f.alias or n for n, f in getattr(kind, "model_fields", {}).items() if f.is_required()}
        given = dict.fromkeys(needed) | (data if isinstance(data, dict) else {})
        parts = {k: well_formed(known[k], given[k]) for k in known if k in given}
        return parts if is_typeddict(kind) else kind.model_construct(**parts)
    if isinstance(data, list) and many:
        return tuple(well_formed(get_args(many)[0], x) for x in data)
    if isinstance(data, dict) and get_origin(kind) is dict:
        return {str(k): well_formed(get_args(kind)[1], x) for k, x in data.items()}
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError:
        return () if many else {} if get_origin(kind) is dict else None


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables merged by key; later ones take precedence.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4})
    {'a': {'b': 1, 'c': 3}, 'd': 4}
    """
    out: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            out[key] = merged(out[key], value) if nested else value
    return out
