"""Plans as text: to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from chipfit.errors import PlanError
from chipfit.files import parse_json
from chipfit.plan.plain import (
    SCHEMA,
    check_schema,
    demand,
    fits,
    from_plain,
    record_from_plain,
    record_to_plain,
    to_plain,
)
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored

_ROLES, _WAYS = ("activation", "weight", "bias"), ("int", "float", "follow", "table")
#: keys of a plan -> types
_PLAN: dict[str, Any] = {
    "schema": int,
    "platform": str,
    "tensors": dict[str, dict[str, Any]],
    "nodes": dict[str, dict[str, Any]],
    "groups": list[list[str]],
    "float_edges": list[list[str]],
    "ties": list[list[str]],
    "rewrites": list[str],
    "provenance": dict[str, Any],
}
_NUMBERS = {"scale": torch.float32, "zero_point": torch.int32}


def plan_to_json(plan: Plan, numbers: dict[str, torch.Tensor] | None = None) -> str:
    """A Plan as JSON text.

    Args:
        plan: what to write.
        numbers: receives the scales and zero points under "scale:<tensor>" and "zero_point:<tensor>"; when omitted
            they stand in the text, where they can be edited by hand.
    """
    tensors = {}
    for t in plan.tensors.values():
        entry = record_to_plain(t, leave_out=("name", "stored"))
        if t.stored is not None:
            entry |= record_to_plain(t.stored, leave_out=("grid", *_NUMBERS)) | {"grid": record_to_plain(t.stored.grid)}
            for field in _NUMBERS:
                value = getattr(t.stored, field)
                if numbers is None:
                    entry[field] = value.tolist()
                else:
                    numbers[f"{field}:{t.name}"] = value
        tensors[t.name] = entry
    return json.dumps(
        {
            "schema": SCHEMA,
            "platform": plan.platform,
            "tensors": tensors,
            "nodes": {n.name: record_to_plain(n, leave_out=("name",)) for n in plan.nodes.values()},
            "groups": plan.groups,
            "float_edges": sorted(plan.float_edges),
            "ties": plan.ties,
            "rewrites": plan.rewrites,
            "provenance": to_plain(plan.provenance),
        },
        indent=1,
        allow_nan=False,
    )


def plan_from_json(text: str, numbers: Mapping[str, torch.Tensor] | None = None) -> Plan:
    """The inverse of `plan_to_json`.

    Raises:
        PlanError: the text is not a plan, is of another schema version, or names fields or numbers that do not exist.
    """
    data = parse_json(text, PlanError, where="the plan")
    check_schema(data, "the plan")
    demand(data, _PLAN, "the plan")
    if any(len(edge) != 2 for edge in data["float_edges"]):
        raise PlanError("'float_edges' are pairs of a tensor and a node", where="the plan")
    tensors = {name: _tensor(name, entry, numbers) for name, entry in data["tensors"].items()}
    plan = Plan(
        tensors=tensors,
        nodes={k: record_from_plain(NodePlan, entry, f"node '{k}'", name=k) for k, entry in data["nodes"].items()},
        groups=tuple(map(tuple, data["groups"])),
        float_edges=frozenset((e[0], e[1]) for e in data["float_edges"]),
        ties=tuple(map(tuple, data["ties"])),
        platform=data["platform"],
        rewrites=tuple(data["rewrites"]),
        provenance=from_plain(data["provenance"]),
    )
    _demand_words(plan)
    known = {f"{field}:{t.name}" for t in tensors.values() for field in _NUMBERS if getattr(t, field) is not None}
    extra = sorted(set(numbers or ()) - known)
    if extra:
        raise PlanError("There are numbers for tensors that the plan does not know", got=", ".join(extra[:8]))
    return plan


def _demand_words(plan: Plan) -> None:
    """Roles and ways to run are known ones, ranges ascend, names that are used are there."""
    for t in plan.tensors.values():
        if t.role not in _ROLES or (t.low is not None and t.high is not None and t.low > t.high):
            got = f"role {t.role!r}, from {t.low} to {t.high}"
            raise PlanError("A tensor's role or range is malformed", where=f"tensor '{t.name}'", got=got)
    for n in plan.nodes.values():
        if n.exec not in _WAYS:
            allowed = ", ".join(_WAYS)
            raise PlanError("A way to run is unknown", where=f"node '{n.name}'", got=n.exec, allowed=allowed)


def _tensor(name: str, entry: dict[str, Any], numbers: Mapping[str, torch.Tensor] | None) -> TensorPlan:
    entry, where = dict(entry), f"tensor '{name}'"
    grid = entry.pop("grid", None)
    if grid is None:
        return record_from_plain(TensorPlan, entry, where, ("stored",), name=name)
    values: dict[str, Any] = {}
    for field, dtype in _NUMBERS.items():
        if numbers is None:
            given = entry.pop(field, None)
            if given is not None and not fits(given, float | list[float]):
                raise PlanError(f"'{field}' is of the wrong kind", where=where, got=repr(given)[:80])
            values[field] = None if given is None else torch.tensor(given, dtype=dtype)
        else:
            values[field] = numbers.get(f"{field}:{name}")
        if values[field] is None:
            raise PlanError(f"Tensor '{name}' is quantized but has no {field.replace('_', ' ')}")
    own = {field: entry.pop(field) for field in ("format", "axis") if field in entry}
    demand(own, {"format": str, "axis": int | None}, where, optional=("axis",))
    try:
        stored = Stored(grid=record_from_plain(Grid, grid, f"{where}, grid"), **own, **values)
    except PlanError as e:
        raise PlanError(e.what, where=e.where or where, got=e.got, allowed=e.allowed) from e
    return record_from_plain(TensorPlan, entry, where, name=name, stored=stored)
