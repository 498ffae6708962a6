"""Values and flat records as JSON data that comes back exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from chipfit.errors import PlanError
from chipfit.graph.ir import Ref

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
    """The inverse of `to_plain`."""
    if isinstance(x, list):
        return [from_plain(v) for v in x]
    if not isinstance(x, dict):
        return x
    if len(x) == 1:
        ((key, v),) = x.items()
        if key == "$float":
            return float(v)
        if key == "$ref":
            return Ref(v)
        if key == "$tuple":
            return tuple(from_plain(i) for i in v)
    return {k: from_plain(v) for k, v in x.items()}


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
