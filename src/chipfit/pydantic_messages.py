"""Validation by pydantic with chipfit's error messages: records of options, arguments, and single values.

The only module that translates a `ValidationError`. Checks are strict: no value is converted implicitly.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from enum import Enum
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator, validate_call
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError, to_json

from chipfit.errors import ChipfitError, ConfigError, UnknownNameError, UnsupportedError
from chipfit.files import package_data

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

_STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, validate_assignment=True)
#: type of a pydantic error -> description of allowed values; braces hold fields of the error
_ALLOWED: dict[str, str] = package_data("chipfit.platform", "pydantic_messages.yaml")["python"]
_CLASSES = {"Sequence": "a list", "list": "a list", "dict": "a dictionary", "Math": "a dictionary"}
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120  # length of a value in a message
_ARITY = ("missing", "missing_argument", "unexpected_positional_argument", "multiple_argument_values")

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
        value = kind.__members__.get(value) if info.mode == "json" else value
        if not isinstance(value, kind):
            raise PydanticCustomError("allowed", "{words}", {"words": ", ".join(map(str, kind))})
        return value

    return BeforeValidator(read)


@dataclass_transform(field_specifiers=(field,))
def record(error: type[ChipfitError], *, frozen: bool = False) -> Callable[[type[C]], type[C]]:
    """Return a class decorator: a dataclass that validates fields on construction and assignment.

    Raises (from the constructor and assignments):
        UnknownNameError: there is no field of that name; for a PlatformError, `error` instead.
        error: a value has the wrong type or is out of bounds; also whatever `__post_init__` raises.
    """

    def decorate(cls: type[C]) -> type[C]:
        made: Any = dataclass(cls, config=_STRICT, frozen=frozen)
        names = {f.name: True for f in fields(made)}
        for method in ("__init__", "__setattr__"):
            setattr(made, method, translate_errors(getattr(made, method), error, cls.__name__, names))
        return made  # type: ignore[no-any-return]

    return decorate


def arguments(error: type[ChipfitError]) -> Callable[[F], F]:
    """Return a decorator that validates the arguments of a function by their annotations, as `record` does fields."""

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        names = {p.name: p.kind is not p.KEYWORD_ONLY for p in parameters}
        owner = function.__qualname__.removesuffix(".__init__")
        return translate_errors(validate_call(config=_STRICT)(function), error, owner, names)

    return decorate


def check_value(kind: Any, value: Any, error: type[ChipfitError], owner: str, name: str, *, json: bool = False) -> Any:
    """Validate and return one value of an annotated type.

    Args:
        owner, name: for the message; name is "" for a table whose keys are the names.
        json: the value comes from a JSON file, in which enumerations are names and records are objects.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_json(to_json(value)) if json else adapter.validate_python(value, strict=True)
    except ValidationError as e:
        refusal = _translated(e, error, owner, {name: True}, (name,) if name else ())
    raise refusal


def json_default(thing: Any) -> Any:
    """Return enumerations, arrays, mappings and records as JSON data, for `json.dumps(default=...)`."""
    if isinstance(thing, Enum):
        return thing.name
    return thing.tolist() if hasattr(thing, "tolist") else dict(thing) if isinstance(thing, Mapping) else vars(thing)


def refuse_options(options: Any, names: str, hint: str) -> None:
    """Check that unsupported options of a configuration are unset.

    Args:
        names: of the options, separated by spaces.

    Raises:
        UnsupportedError: one of them is set.
    """
    for name in names.split():
        if getattr(options, name) not in (None, False, {}):
            raise UnsupportedError(f"'{name}' of {type(options).__name__} is not supported", hint=hint)


def translate_errors(function: Any, error: type[ChipfitError], owner: str, names: Mapping[str, bool]) -> Any:
    """Return a function that translates ValidationErrors to `error`.

    Args:
        names: argument name -> whether it may be passed by position.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValidationError as e:
            refusal = _translated(e, error, owner, names)
        raise refusal

    return call


def _translated(
    e: ValidationError, error: type[ChipfitError], owner: str, names: Mapping[str, bool], inside: tuple[str, ...] = ()
) -> Exception:
    """Return the translation of the first error; members of a union contribute all allowed values."""
    first = e.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ChipfitError):
        return cause
    place = (*inside, *first["loc"]) or (0,)  # a leading index is that of a positional argument
    by_place = [name for name, has_place in names.items() if has_place]
    name = by_place[min(place[0], len(by_place) - 1)] if isinstance(place[0], int) else place[0]
    if len(place) == 1 and first["type"] in _ARITY and by_place[0]:
        return TypeError(f"{owner}: {first['msg'].lower()} '{name}'")
    if len(place) == 1 and first["type"] in ("unexpected_keyword_argument", "no_such_attribute"):
        unknown = UnknownNameError(f"option of {owner}", name, names)
        return unknown if issubclass(error, ConfigError) else error(unknown.what, allowed=unknown.allowed)
    path = "".join([name, *(f"[{p}]" for p in place[1:])])
    if first["type"] == "missing":
        return error(f"'{path}' of {owner} is missing")
    got = f"{_SHORT.repr(first['input'])} of type {type(first['input']).__name__}"
    if first["type"] not in _ALLOWED:
        return error(f"'{path}' of {owner} is invalid: {first['msg'].removeprefix('Value error, ')}", got=got)
    together = [x for x in e.errors() if x["loc"][:1] == first["loc"][:1] and x["type"] in _ALLOWED]
    words = [_ALLOWED[x["type"]].format(**x.get("ctx", {})) for x in together]
    words = [_CLASSES.get(w, w) for w in dict.fromkeys(words)]
    problem = "out of bounds" if first["type"].startswith(("greater", "less")) else "of the wrong type"
    return error(f"'{path}' of {owner} is {problem}", got=got, allowed=" or ".join(words))
