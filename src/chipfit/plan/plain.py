"""Values and flat records as JSON data that comes back exactly."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from chipfit.errors import PlanError
from chipfit.graph.ir import Ref

T = TypeVar("T")
#: levels of tables and lists in a value
_DEEPEST = 50

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


def from_plain(x: Any, level: int = 0) -> Any:
    """The inverse of `to_plain`.

    Raises:
        PlanError: a mark with something else behind it, or values that nest deeper than any that was written.
    """
    level += 1
    if level > _DEEPEST:
        raise PlanError(f"The data nest deeper than {_DEEPEST} levels")
    if isinstance(x, list):
        return [from_plain(v, level) for v in x]
    if not isinstance(x, dict):
        return x
    if len(x) == 1:
        ((key, v),) = x.items()
        if key == "$float" and v in ("inf", "-inf", "nan"):
            return float(v)
        if key == "$ref" and type(v) is int and v >= 0:
            return Ref(v)
        if key == "$tuple" and isinstance(v, list):
            return tuple(from_plain(i, level) for i in v)
        if key.startswith("$"):
            raise PlanError(f"A value marked '{key}' is malformed", got=repr(v)[:80])
    return {k: from_plain(v, level) for k, v in x.items()}


def fits(x: Any, hint: Any) -> bool:
    """Whether a value has an annotated type; numbers are not NaN, and no boolean is one."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(fits(x, h) for h in inner)
    if kind in (list, tuple):
        if not isinstance(x, kind):
            return False
        each = inner if kind is tuple and inner[-1] is not ... else inner[:1] * len(x)
        return len(x) == len(each) and all(fits(v, h) for v, h in zip(x, each, strict=True))
    if kind is dict:
        return isinstance(x, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in x.items())
    if hint is float:
        return isinstance(x, (int, float)) and not isinstance(x, bool) and not math.isnan(x)
    return isinstance(x, hint) and (hint is not int or not isinstance(x, bool))


def demand(data: Any, wanted: Mapping[str, Any], where: str, *, optional: Collection[str] = ()) -> None:
    """Raise unless `data` is a table of these keys with values of these types.

    Raises:
        PlanError: naming the first key that is missing, unknown or of another type.
    """
    if not isinstance(data, dict):
        raise PlanError("A table of keys is expected", where=where, got=type(data).__name__)
    for key in (*wanted, *data):
        if key not in wanted:
            raise PlanError(f"'{key}' is unknown", where=where, allowed=", ".join(wanted))
        if key not in data and key not in optional:
            raise PlanError(f"'{key}' is missing", where=where)
        if key in data and not fits(data[key], wanted[key]):
            allowed = getattr(wanted[key], "__name__", "") if not get_args(wanted[key]) else str(wanted[key])
            raise PlanError(f"'{key}' is of the wrong kind", where=where, got=repr(data[key])[:80], allowed=allowed)


def record_from_plain(kind: type[T], data: Any, where: str, leave_out: Collection[str] = (), **given: Any) -> T:
    """The inverse of `record_to_plain`; `given` are the fields that were left out.

    Raises:
        PlanError: naming the field that is missing, unknown or of another type.
    """
    hints = _hints(kind)
    own: Any = [f for f in fields(kind) if f.name not in (*given, *leave_out)]  # type: ignore[arg-type]
    data = from_plain(data)
    optional = [f.name for f in own if f.default is not MISSING or f.default_factory is not MISSING]
    demand(data, {f.name: hints[f.name] for f in own}, where, optional=optional)
    return kind(**given, **data)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


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
