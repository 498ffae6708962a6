"""Values and flat records as JSON data that comes back exactly."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NotRequired, TypeVar, cast, get_type_hints

import pydantic
from typing_extensions import TypedDict

from chipfit.errors import PlanError
from chipfit.graph.ir import Ref

T = TypeVar("T")

#: version of the JSON form; raised when a reader of the old form would misread the new one
SCHEMA = 1


def to_plain(x: Any) -> Any:
    """A value as JSON that `from_plain` restores exactly: tuples, Refs, non-finite floats are marked, the rest stays.

    Raises:
        PlanError: the value has no JSON form.
    """
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"$float": repr(x)}
    if isinstance(x, Ref):
        return {"$ref": x.index}
    if isinstance(x, tuple):
        return {"$tuple": [to_plain(v) for v in x]}
    if isinstance(x, list):
        return [to_plain(v) for v in x]
    if isinstance(x, Mapping) and all(isinstance(k, str) and not k.startswith("$") for k in x):
        return {k: to_plain(v) for k, v in x.items()}
    raise PlanError(f"A {type(x).__name__} cannot be saved as JSON", got=repr(x))


def from_plain(x: Any) -> Any:
    """The inverse of `to_plain`; a mark with something else behind it stays the table that it is."""
    match x:
        case list():
            return [from_plain(v) for v in x]
        case {"$float": "inf" | "-inf" | "nan" as v}:
            return float(v)
        case {"$ref": int(index)}:
            return Ref(index)
        case {"$tuple": list(items)}:
            return tuple(from_plain(v) for v in items)
        case dict():
            return {k: from_plain(v) for k, v in x.items()}
    return x


def table(others: Any = False, **wanted: Any) -> pydantic.TypeAdapter[Any]:
    """What `demand` asks of a table: these keys, with values of these types, and no others unless `others`."""
    make: Any = TypedDict  # the types are data
    kind = make("Table", wanted)
    kind.__pydantic_config__ = pydantic.ConfigDict(strict=True, extra="allow" if others else "forbid")
    return pydantic.TypeAdapter(kind)


def demand(data: Any, wanted: pydantic.TypeAdapter[Any], where: str) -> Any:
    """The data, or a PlanError that names the first key which is missing, unknown or of another type."""
    try:
        return wanted.validate_python(data)
    except pydantic.ValidationError as e:
        raise malformed(e, where) from e


def malformed(e: pydantic.ValidationError, where: str) -> PlanError:
    """The first thing that does not fit, as an error."""
    first = e.errors(include_url=False)[0]
    at, why = ".".join(map(str, first["loc"])) or "all", first["msg"].removeprefix("Value error, ")
    return PlanError(f"'{at}' is malformed: {why}", where=where, got=repr(first["input"])[:80])


def record_from_plain(kind: type[T], data: Any, where: str, **given: Any) -> T:
    """The inverse of `record_to_plain`; `given` are the fields that were left out.

    Raises:
        PlanError: naming the field that is missing, unknown or of another type.
    """
    data, hashable = from_plain(data), cast("Any", kind)
    demand(data, _fields(hashable, *given), where)
    return kind(**given, **data)


@cache
def _fields(kind: Any, *given: str) -> pydantic.TypeAdapter[Any]:
    """The fields of a dataclass without those that are given."""
    hints = get_type_hints(kind, include_extras=True)
    own = [(f, f.default is MISSING and f.default_factory is MISSING) for f in fields(kind) if f.name not in given]
    return table(**{f.name: hints[f.name] if needed else NotRequired[hints[f.name]] for f, needed in own})


def record_to_plain(x: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """A flat dataclass as JSON, fields that hold their default left out."""
    kept = {f.name: getattr(x, f.name) for f in fields(x) if f.name not in leave_out}
    defaults = {f.name: f.default for f in fields(x)}
    return {k: to_plain(v) for k, v in kept.items() if v != defaults[k] or type(v) is not type(defaults[k])}


def check_schema(data: Any, what: str) -> None:
    """Raise a PlanError unless `data` is a table of the schema version that this chipfit reads."""
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        hint = "read it with the chipfit that wrote it, or quantize again"
        raise PlanError(
            f"The schema version of {what} is not the one that this chipfit reads", got=found, allowed=SCHEMA, hint=hint
        )
