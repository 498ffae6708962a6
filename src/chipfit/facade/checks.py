"""pydantic's checks in chipfit's words: records of options, arguments of constructors, and single values.

The only place that turns a `ValidationError` into one of ours. Checks are strict: no value is converted on the quiet.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from enum import Enum
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator, validate_call
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from chipfit.errors import ChipfitError, ConfigError, UnknownNameError

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

_STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, validate_assignment=True)
#: types of pydantic's errors -> what is allowed; braces hold the error's own facts
_ALLOWED = {
    "bool_type": "True or False",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a text that is not empty",
    "string_too_short": "a text that is not empty",
    "tuple_type": "a list",
    "sequence_str": "a list",
    "too_short": "a list that is not empty",
    "dict_type": "a dictionary",
    "callable_type": "a function",
    "dataclass_exact_type": "a {class_name}",
    "model_type": "a {class_name}",
    "is_instance_of": "a {class}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number that is at least {ge}",
    "less_than_equal": "a number that is at most {le}",
    "member": "{members}",
}
_ARITY = ("missing", "missing_argument", "unexpected_positional_argument", "multiple_argument_values")

#: a number as it was given: 3 stays an integer
Number = Annotated[float, WrapValidator(lambda value, check: value if check(value) is not None else None)]
#: a text that is not empty
Name = Annotated[str, Field(min_length=1)]


def by_name(kind: type[Enum]) -> BeforeValidator:
    """Annotation of an enumeration: a member, in JSON its name; refused with all members."""

    def read(value: Any, info: Any) -> Any:
        value = kind.__members__.get(value) if info.mode == "json" else value
        if not isinstance(value, kind):
            raise PydanticCustomError("member", "no member", {"members": ", ".join(map(str, kind))})
        return value

    return BeforeValidator(read)


@dataclass_transform(field_specifiers=(field,))
def record(error: type[ChipfitError], *, frozen: bool = False) -> Callable[[type[C]], type[C]]:
    """Class decorator: a dataclass whose values are checked when it is made and whenever one is set.

    Raises (from the constructor, and where a field is set):
        UnknownNameError: no field of that name; `error` instead where that is a PlatformError.
        error: a value of the wrong kind or out of bounds, and whatever `__post_init__` raises.
    """

    def decorate(cls: type[C]) -> type[C]:
        made: Any = dataclass(cls, config=_STRICT, frozen=frozen)
        names = [f.name for f in fields(made)]
        for method in ("__init__", "__setattr__"):
            setattr(made, method, _in_our_words(getattr(made, method), error, cls.__name__, names))
        return made  # type: ignore[no-any-return]

    return decorate


def arguments(error: type[ChipfitError]) -> Callable[[F], F]:
    """Decorator of a constructor or function: its arguments are checked by their annotations, as fields of a record."""

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        owner = function.__qualname__.removesuffix(".__init__")
        return _in_our_words(validate_call(function, config=_STRICT), error, owner, names)

    return decorate


def checked(kind: Any, value: Any, error: type[ChipfitError], owner: str, name: str) -> Any:
    """One value of an annotated type; `owner` and `name` are for the message."""
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[kind, Field(strict=True)])
    return _in_our_words(lambda given: adapter.validate_python(given), error, owner, [name])(value)


def _in_our_words(function: Any, error: type[ChipfitError], owner: str, names: Sequence[str]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValidationError as e:
            refusal = _refusal(e, error, owner, names)
        raise refusal

    return call


def _refusal(e: ValidationError, error: type[ChipfitError], owner: str, names: Sequence[str]) -> Exception:
    """The first problem; where the members of a union complain together, with all that is allowed."""
    first = e.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ChipfitError):
        return cause
    place = first["loc"] or (0,)  # an index stands for an argument by position
    name = names[min(place[0], len(names) - 1)] if isinstance(place[0], int) else place[0]
    if first["type"] in _ARITY:
        return TypeError(f"{owner}: {first['msg'].lower()} '{name}'")
    if first["type"] in ("unexpected_keyword_argument", "no_such_attribute"):
        unknown = UnknownNameError(f"option of {owner}", name, names)
        return unknown if issubclass(error, ConfigError) else error(unknown.what, allowed=unknown.allowed)
    path = "".join([name, *(f"[{p}]" for p in place[1:])])
    got = f"{first['input']!r} of type {type(first['input']).__name__}"
    if first["type"] not in _ALLOWED:
        return error(f"'{path}' of {owner} is not understood: {first['msg'].removeprefix('Value error, ')}", got=got)
    together = [x for x in e.errors() if x["loc"][:1] == first["loc"][:1] and x["type"] in _ALLOWED]
    allowed = dict.fromkeys(_ALLOWED[x["type"]].format(**x.get("ctx", {})) for x in together)
    return error(f"'{path}' of {owner} is of the wrong kind", got=got, allowed=" or ".join(allowed))
