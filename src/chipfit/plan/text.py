"""Plans as text: to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from chipfit.errors import PlanError
from chipfit.files import parse_json
from chipfit.plan.plain import SCHEMA, check_schema, from_plain, record_to_plain, to_plain
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored

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
            t.stored.check()
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
    try:
        tensors = {name: _tensor(name, entry, numbers) for name, entry in data["tensors"].items()}
        plan = Plan(
            tensors=tensors,
            nodes={name: NodePlan(name=name, **from_plain(entry)) for name, entry in data["nodes"].items()},
            groups=tuple(map(tuple, data["groups"])),
            float_edges=frozenset((value, node) for value, node in data["float_edges"]),
            ties=tuple(map(tuple, data["ties"])),
            platform=data["platform"],
            rewrites=tuple(data["rewrites"]),
            provenance=from_plain(data["provenance"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise PlanError("The plan is malformed", got=f"{type(e).__name__}: {e}") from e
    known = {f"{field}:{t.name}" for t in tensors.values() for field in _NUMBERS if getattr(t, field) is not None}
    extra = sorted(set(numbers or ()) - known)
    if extra:
        raise PlanError("There are numbers for tensors that the plan does not know", got=", ".join(extra[:8]))
    return plan


def _tensor(name: str, entry: dict[str, Any], numbers: Mapping[str, torch.Tensor] | None) -> TensorPlan:
    entry = dict(entry)
    grid = entry.pop("grid", None)
    if grid is None:
        return TensorPlan(name=name, **from_plain(entry))
    values: dict[str, Any] = {}
    for field, dtype in _NUMBERS.items():
        if numbers is None:
            given = entry.pop(field, None)
            values[field] = None if given is None else torch.tensor(given, dtype=dtype)
        else:
            values[field] = numbers.get(f"{field}:{name}")
        if values[field] is None:
            raise PlanError(f"Tensor '{name}' is quantized but has no {field.replace('_', ' ')}")
    values |= {field: from_plain(entry.pop(field)) for field in ("format", "axis") if field in entry}
    try:
        stored = Stored(grid=Grid(**from_plain(grid)), **values)
    except PlanError as e:
        raise PlanError(e.what, where=f"tensor '{name}'", got=e.got, allowed=e.allowed) from e
    return TensorPlan(name=name, stored=stored, **from_plain(entry))
