"""Validation by pydantic from types alone: files, options, arguments of functions, single values.

The only module that translates a `ValidationError`. Checks are strict: no value is converted implicitly.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator, validate_call
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError, to_json
from typing_extensions import get_type_hints, is_typeddict

from chipfit.errors import ChipfitError, ConfigError, UnknownNameError
from chipfit.files import package_data

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
Path = tuple[Any, ...]  #: keys and indices from the top of the data

_STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, validate_assignment=True)
#: type of a pydantic error -> description of allowed values; braces hold fields of the error
_ALLOWED: dict[str, str] = package_data("chipfit", "validation.yaml")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120  # length of a value in a message
#: types of pydantic's errors about calls that Python refuses itself, and about names that nothing has
_ARITY = ("missing", "missing_argument", "unexpected_positional_argument", "multiple_argument_values")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "no_such_attribute")

#: a number that keeps its type: 3 stays an integer
Number = Annotated[float, WrapValidator(lambda value, check: value if check(value) is not None else None)]
Positive = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
#: a text with at least one character
Name = Annotated[str, Field(min_length=1)]


def allowed(words: str) -> WrapValidator:
    """Return an annotation with a description of the allowed values, for messages."""

    def check(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("allowed", "{words}", {"words": words}) from None

    return WrapValidator(check)


def by_name(kind: type[Enum]) -> BeforeValidator:
    """Return an annotation that accepts members of an enumeration, in JSON their names."""

    def read(value: Any, info: Any) -> Any:
        value = kind.__members__.get(str(value)) if info.mode == "json" else value
        if not isinstance(value, kind):
            raise PydanticCustomError("allowed", "{words}", {"words": ", ".join(map(str, kind))})
        return value

    return BeforeValidator(read)


@dataclass_transform(field_specifiers=(field,))
def record(failure: type[ChipfitError], *, frozen: bool = False) -> Callable[[type[C]], type[C]]:
    """Return a class decorator: a dataclass that validates fields on construction and assignment.

    Raises (from the constructor and assignments):
        UnknownNameError: there is no field of that name; for a PlatformError, `failure` instead.
        failure: a value has the wrong type or is out of bounds; also whatever `__post_init__` raises.
    """

    def decorate(cls: type[C]) -> type[C]:
        made: Any = dataclass(cls, config=_STRICT, frozen=frozen)
        names = {f.name: True for f in fields(made)}
        for method in ("__init__", "__setattr__"):
            setattr(made, method, translate_errors(getattr(made, method), failure, cls.__name__, names))
        return made  # type: ignore[no-any-return]

    return decorate


def arguments(failure: type[ChipfitError]) -> Callable[[F], F]:
    """Return a decorator that validates the arguments of a function by their annotations, as `record` does fields."""

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        names = {p.name: p.kind is not p.KEYWORD_ONLY for p in parameters}
        owner = function.__qualname__.removesuffix(".__init__")
        return translate_errors(validate_call(config=_STRICT)(function), failure, owner, names)

    return decorate


def check_value(
    kind: Any,
    value: Any,
    failure: type[ChipfitError],
    where: str,
    name: str = "",
    *,
    json: bool = False,
    context: Any = None,
) -> Any:
    """Validate and return a value of an annotated type, or of a TypeAdapter.

    Args:
        where, name: for the message; name is "" for a table whose keys are the names.
        json: the value comes from a JSON file, in which enumerations are names and records are objects.
        context: for the validators of the type.
    """
    adapter, strict = (kind, None) if isinstance(kind, TypeAdapter) else (TypeAdapter(kind), True)
    try:
        if json:
            return adapter.validate_json(to_json(value), context=context)
        return adapter.validate_python(value, strict=strict)
    except ValidationError as e:
        inside = (name,) if name else ()
        errors = [x | {"loc": (*inside, *x["loc"])} for x in e.errors()]
    raise error_of(errors, {name: value} if name else value, failure, where)


def json_default(thing: Any) -> Any:
    """Return enumerations, arrays, mappings and records as JSON data, for `json.dumps(default=...)`."""
    if isinstance(thing, Enum):
        return thing.name
    return thing.tolist() if hasattr(thing, "tolist") else dict(thing) if isinstance(thing, Mapping) else vars(thing)


def without_effect(options: Any) -> list[str]:
    """Return the options of a configuration that were set and have no effect, each with the reason.

    They are those in `WITHOUT_EFFECT` of the class, a table of reasons.
    """
    out = []
    for f in fields(options):
        why = type(options).WITHOUT_EFFECT.get(f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if why is not None and getattr(options, f.name) != default:
            out.append(f"'{f.name}' of {type(options).__name__}: {why}")
    return out


def translate_errors(function: Any, failure: type[ChipfitError], owner: str, names: Mapping[str, bool]) -> Any:
    """Return a function that translates ValidationErrors to `failure`.

    Args:
        names: argument name -> whether it may be passed by position.
    """
    by_place = [name for name, has_place in names.items() if has_place]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValidationError as e:
            errors: list[Any] = e.errors()
        for x in errors:
            at, *inside = x["loc"] or (0,)
            x["loc"] = (by_place[min(at, len(by_place) - 1)] if isinstance(at, int) else at, *inside)
        first, (name, *inside) = errors[0], errors[0]["loc"]
        if not inside and first["type"] in _ARITY:
            raise TypeError(f"{owner}: {first['msg'].lower()} '{name}'")
        if not inside and first["type"] in _UNKNOWN:
            unknown = UnknownNameError(f"option of {owner}", name, names)
            raise unknown if issubclass(failure, ConfigError) else failure(unknown.what, **unknown.choices)
        raise error_of(errors, dict(zip(by_place, args)) | kwargs, failure, owner)

    return call


# ----------------------------------------------------------------------------------------------------- messages


class Problem(NamedTuple):
    """A place where data do not fit their type."""

    path: Path  #: () for all of the data
    what: str
    facts: dict[str, Any]  #: of the error about it


def error_of(errors: Sequence[Any], data: Any, failure: type[ChipfitError], where: str) -> ChipfitError:
    """Return the first problem of data as an error, or the error that a validator raised."""
    cause = errors[0].get("ctx", {}).get("error")
    if isinstance(cause, ChipfitError):
        return cause
    path, what, facts = next(problems_of(errors, data))
    key = f"{where}, key {'.'.join(map(str, path))}" if len(path) > 1 else where
    return failure(what, where=key, **facts)


def problems_of(errors: Sequence[Any], data: Any, kind: Any = None) -> Iterator[Problem]:
    """Yield one problem for each place, where the members of a union are reported together.

    Args:
        errors: of a `ValidationError` about the data.
        kind: the type that the data were read as, for the names of its keys.
    """
    places: dict[Path, list[Any]] = {}
    for x in errors:
        if x["type"] != "too_short" or not x["input"]:  # otherwise it has entries, and each of them is reported
            places.setdefault(_place(x["loc"], x["type"] == "missing", data), []).append(x)
    for path, found in places.items():
        what, facts = _message(path, found, kind)
        yield from (Problem(path, line, facts) for line in what.splitlines())


def _place(loc: Path, missing: bool, data: Any) -> Path:
    """Return the keys and indices of an error in the data, without pydantic's names for members of unions."""
    path: Path = ()
    for part in loc:
        entries = range(len(data)) if isinstance(data, (list, tuple)) else ()
        inside = part in data if isinstance(data, Mapping) else type(part) is int and part in entries
        if inside or not path or (missing and part == loc[-1]):
            path, data = (*path, part), data[part] if inside else None
    return path


def _message(path: Path, errors: Sequence[Any], kind: Any) -> tuple[str, dict[str, Any]]:
    """Return what is wrong at a place, and the facts of the error about it."""
    first, got = errors[0], errors[0].get("input")
    names = [k for k, part in enumerate(path) if isinstance(part, str)]
    key = ".".join(map(str, path[names[-1] if names else 0 :]))  # an entry of a list has the name of the list
    name = f"'{key}'" if path else "The value"
    if first["type"] in _UNKNOWN:
        known = _keys_at(path[:-1], kind)
        return f"Key {name} is unknown", UnknownNameError("key", key, known).choices if known else {}
    if first["type"] == "missing":
        return f"Key {name} is missing: it is required", {}
    facts = {} if isinstance(got, dict) else {"got": _SHORT.repr(got)}
    literals = [x["ctx"]["expected"] for x in errors if x["type"] == "literal_error"]
    others = [_ALLOWED[x["type"]].format(**x.get("ctx", {})) for x in errors if x["type"] in _ALLOWED]
    words = ", or ".join(dict.fromkeys([*literals, *(_ALLOWED.get(w, w) for w in others)]))
    if literals or len(errors) > 1 or first["type"] == "allowed":
        return f"Value of {name} is not allowed", facts | {"allowed": words}
    if others:
        return f"{name} must be {words}", facts
    return first["msg"].removeprefix("Value error, ").replace("Input should", f"{name} should"), facts


def _keys_at(path: Path, kind: Any) -> list[str]:
    """Return the keys that a record may have at a path."""
    for part in path:
        kind = next(iter(_records(types_of(kind)[part])), kind) if part in types_of(kind) else kind
    return sorted(types_of(kind))


def types_of(kind: Any) -> dict[str, Any]:
    """Return the keys of a record, as files name them, and the types of their values; none of another type."""
    if is_typeddict(kind):
        return get_type_hints(kind)
    known = getattr(kind, "model_fields", {})
    return {f.alias or n: f.annotation for n, f in known.items() if not f.exclude}


def _records(kind: Any) -> list[Any]:
    """Return the records in a type."""
    return [kind] if types_of(kind) else [r for inner in get_args(kind) for r in _records(inner)]
