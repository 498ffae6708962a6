"""Plans as text: to JSON and back."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypeAlias

import torch
from pydantic import Field, Strict

from chipfit.errors import PlanError
from chipfit.files import parse_json
from chipfit.plan import plain
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored

# JSON has lists only
_Names: TypeAlias = Annotated[tuple[str, ...], Strict(False)]
_Groups: TypeAlias = Annotated[tuple[_Names, ...], Strict(False)]
_Pairs: TypeAlias = Annotated[frozenset[Annotated[tuple[str, str], Strict(False)]], Strict(False)]
_Int32: TypeAlias = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
_PLAN = plain.table(
    schema=int,
    tensors=dict[str, dict[str, Any]],
    nodes=dict[str, dict[str, Any]],
    groups=_Groups,
    float_edges=_Pairs,
    ties=_Groups,
    limits=NotRequired[list[dict[str, Any]]],  # these four are newer than the schema
    fixed=NotRequired[_Names],
    zeros=NotRequired[_Names],
    sums=NotRequired[dict[str, Annotated[float, Field(gt=0)]]],
    platform=str,
    rewrites=_Names,
    provenance=dict[str, Any],
)
#: what is read again, of what a plan says about where it came from
_PROVENANCE = plain.table(
    others=True,
    settings=NotRequired[dict[str, Any]],
    samples=NotRequired[list[str]],
    corrected=NotRequired[list[str]],
    chosen=NotRequired[dict[str, int]],
    widths=NotRequired[dict[str, list[int]]],
    edited=NotRequired[dict[str, Any]],
    foreign_quantizers=NotRequired[list[str]],
)
_SETTINGS = plain.table(
    others=True,
    steps=NotRequired[dict[str, Any]],
    rule=NotRequired[str],
    weight_rule=NotRequired[str],
    overrides=NotRequired[dict[str, Any]],
    z_threshold=NotRequired[Annotated[float, Field(gt=0, allow_inf_nan=False)]],
    seed=NotRequired[Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]],
)
_STORED = plain.table(
    format=str,
    axis=NotRequired[int | None],
    grid=dict[str, Any],
    scale=NotRequired[float | list[float]],
    zero_point=NotRequired[_Int32 | list[_Int32]],
)
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
        entry = plain.record_to_plain(t, leave_out=("name", "stored"))
        if t.stored is not None:
            t.stored.check()
            entry |= plain.record_to_plain(t.stored, leave_out=("grid", *_NUMBERS)) | {
                "grid": plain.record_to_plain(t.stored.grid)
            }
            for field in _NUMBERS:
                value = getattr(t.stored, field)
                if numbers is None:
                    entry[field] = value.tolist()
                else:
                    numbers[f"{field}:{t.name}"] = value
        tensors[t.name] = entry
    data = {
        "schema": plain.SCHEMA,
        **{name: getattr(plan, name) for name in ("platform", "groups", "ties", "fixed", "zeros", "rewrites")},
        "tensors": tensors,
        "nodes": {n.name: plain.record_to_plain(n, leave_out=("name",)) for n in plan.nodes.values()},
        "float_edges": sorted(plan.float_edges),
        "limits": [plain.record_to_plain(x) for x in plan.limits],
        "sums": dict(plan.sums),
        "provenance": plain.to_plain(plan.provenance),
    }
    return json.dumps(data, indent=1, allow_nan=False)


def plan_from_json(text: str, numbers: Mapping[str, torch.Tensor] | None = None) -> Plan:
    """The inverse of `plan_to_json`.

    Raises:
        PlanError: the text is not a plan, is of another schema version, or names fields or numbers that do not exist.
    """
    data = parse_json(text, PlanError, where="the plan")
    plain.check_schema(data, "the plan")
    data = plain.demand(data, _PLAN, "the plan")
    del data["schema"]
    provenance = plain.demand(plain.from_plain(data["provenance"]), _PROVENANCE, "the plan, provenance")
    plain.demand(provenance.get("settings", {}), _SETTINGS, "the plan, provenance.settings")
    tensors = {name: _tensor(name, entry, numbers) for name, entry in data["tensors"].items()}
    nodes = {k: plain.record_from_plain(NodePlan, e, f"node '{k}'", name=k) for k, e in data["nodes"].items()}
    limits = tuple(plain.record_from_plain(ScaleBound, x, f"limit {k}") for k, x in enumerate(data.get("limits", ())))
    data |= {"tensors": tensors, "nodes": nodes, "limits": limits, "provenance": provenance}
    plan = Plan(**{**data, "sums": tuple(data.get("sums", {}).items())})
    known = {f"{field}:{t.name}" for t in tensors.values() for field in _NUMBERS if getattr(t, field) is not None}
    extra = sorted(set(numbers or ()) - known)
    if extra:
        raise PlanError("There are numbers for tensors that the plan does not know", got=", ".join(extra[:8]))
    return plan


def _tensor(name: str, entry: dict[str, Any], numbers: Mapping[str, torch.Tensor] | None) -> TensorPlan:
    where, stored = f"tensor '{name}'", None
    if entry.get("grid") is not None:
        own = {k: entry[k] for k in ("format", "axis", "grid", *(_NUMBERS if numbers is None else ())) if k in entry}
        plain.demand(own, _STORED, where)
        entry = {k: v for k, v in entry.items() if k not in own}
        own["grid"] = plain.record_from_plain(Grid, own["grid"], f"{where}, grid")
        for field, dtype in _NUMBERS.items():
            if numbers is not None and f"{field}:{name}" in numbers:
                own[field] = numbers[f"{field}:{name}"]
            elif field in own:
                own[field] = torch.tensor(own[field], dtype=dtype)
            else:
                raise PlanError(f"Tensor '{name}' is quantized but has no {field.replace('_', ' ')}")
        try:
            stored = Stored(**own)
        except PlanError as e:
            raise PlanError(e.what, where=where, got=e.got, allowed=e.allowed) from e
    t = plain.record_from_plain(TensorPlan, entry, where, name=name, stored=stored)
    ends = [x for x in (t.low, t.high) if x is not None]
    infinite = not all(map(math.isfinite, ends)) if stored is not None else any(map(math.isnan, ends))
    if infinite or ends != sorted(ends):
        raise PlanError(f"The range of '{name}' is none", got=f"{t.low}..{t.high}")
    return t
