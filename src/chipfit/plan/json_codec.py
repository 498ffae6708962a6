"""Plans, graphs and flat records as JSON data that restores exactly, and checks of such data from files."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, NotRequired, TypeAlias, TypeVar, cast, get_type_hints

import pydantic
import torch
from pydantic import Field, Strict
from typing_extensions import TypedDict

from chipfit.engine.opaque import resolve_target
from chipfit.engine.trees import read_tree
from chipfit.engine.types import dtype_of
from chipfit.errors import GraphError, PlanError
from chipfit.files import parse_json
from chipfit.graph.check import check
from chipfit.graph.ir import OPAQUE, Fold, Graph, Node, Ref, Value
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored
from chipfit.validation import check_value

T = TypeVar("T")

#: version of the JSON layout; raised when a reader of the old layout would misread the new one
SCHEMA = 1

# ------------------------------------------------------------------------------------------------------------- values


def to_json(x: Any) -> Any:
    """Return a value as JSON data that `from_json` restores; tuples, Refs and non-finite floats are marked.

    Raises:
        PlanError: the value has no JSON representation.
    """
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"$float": repr(x)}
    if isinstance(x, Ref):
        return {"$ref": x.index}
    if isinstance(x, tuple):
        return {"$tuple": [to_json(v) for v in x]}
    if isinstance(x, list):
        return [to_json(v) for v in x]
    if isinstance(x, Mapping) and all(isinstance(k, str) and not k.startswith("$") for k in x):
        return {k: to_json(v) for k, v in x.items()}
    raise PlanError(f"A {type(x).__name__} cannot be saved as JSON", got=repr(x))


def from_json(x: Any) -> Any:
    """Invert `to_json`; a mark with unexpected content stays a dictionary."""
    match x:
        case list():
            return [from_json(v) for v in x]
        case {"$float": "inf" | "-inf" | "nan" as v}:
            return float(v)
        case {"$ref": int(index)}:
            return Ref(index)
        case {"$tuple": list(items)}:
            return tuple(from_json(v) for v in items)
        case dict():
            return {k: from_json(v) for k, v in x.items()}
    return x


# ------------------------------------------------------------------------------------------------------------ records


def table(others: Any = False, **wanted: Any) -> pydantic.TypeAdapter[Any]:
    """Return a type for `validated`: a dictionary with these keys and types, and no other keys unless `others`."""
    make: Any = TypedDict  # the types are data
    kind = make("Table", wanted)
    kind.__pydantic_config__ = pydantic.ConfigDict(strict=True, extra="allow" if others else "forbid")
    return pydantic.TypeAdapter(kind)


def validated(data: Any, wanted: pydantic.TypeAdapter[Any], where: str) -> Any:
    """Return data of the wanted type.

    Raises:
        PlanError: naming the first key that is missing, unknown or of another type.
    """
    return check_value(wanted, data, PlanError, where)


def record_to_json(x: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a flat dataclass as JSON data, without the fields that hold their default."""
    kept = {f.name: getattr(x, f.name) for f in fields(x) if f.name not in leave_out}
    defaults = {f.name: f.default for f in fields(x)}
    return {k: to_json(v) for k, v in kept.items() if v != defaults[k] or type(v) is not type(defaults[k])}


def record_from_json(kind: type[T], data: Any, where: str, **given: Any) -> T:
    """Invert `record_to_json`; `given` are the fields that were left out.

    Raises:
        PlanError: naming the field that is missing, unknown or of another type.
    """
    data, hashable = from_json(data), cast("Any", kind)
    validated(data, _fields(hashable, *given), where)
    return kind(**given, **data)


@cache
def _fields(kind: Any, *given: str) -> pydantic.TypeAdapter[Any]:
    """Return the type of a dataclass's fields, without those that are given."""
    hints = get_type_hints(kind, include_extras=True)
    own = [(f, f.default is MISSING and f.default_factory is MISSING) for f in fields(kind) if f.name not in given]
    return table(**{f.name: hints[f.name] if needed else NotRequired[hints[f.name]] for f, needed in own})


def check_schema(data: Any, what: str) -> None:
    """Check that `data` is a dictionary of the schema version that this chipfit reads.

    Raises:
        PlanError: it is not.
    """
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        hint = "read it with the chipfit that wrote it, or quantize again"
        raise PlanError(
            f"The schema version of {what} is not the one that this chipfit reads", got=found, allowed=SCHEMA, hint=hint
        )


# ------------------------------------------------------------------------------------------------------------- graphs

#: fields that are JSON data already
_AS_THEY_ARE = ("inputs", "outputs", "in_spec", "out_spec", "data_format", "framework")
_GRAPH = table(
    schema=int,
    values=dict[str, dict[str, Any]],
    nodes=list[dict[str, Any]],
    aliases=dict[str, str],
    **dict.fromkeys(("weights", "trainable", "inputs", "outputs"), list[str]),
    **dict.fromkeys(("in_spec", "out_spec", "data_format", "framework"), str),
    folds=NotRequired[dict[str, dict[str, Any]]],  # newer than the schema
)
_CALL = table(
    args=int,
    leaves=int,
    tensors=list[int],
    kwargs=list[str],
    names=list[str],
    plain=NotRequired[str],
    captured=NotRequired[str],
    packed=NotRequired[bool],
)
_RESULTS = table(plain=str, captured=NotRequired[str], leaves=list[dict[str, Any]])


def graph_to_json(graph: Graph) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the structure of a graph as JSON data, and each weight once: tied weights are aliases of the first.

    Raises:
        PlanError: a weight holds NaN, or an attribute has no JSON representation.
    """
    _check_numbers(graph)
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    stored: set[int] = set()
    for name, w in graph.weights.items():
        original = first.setdefault(id(w), name)
        if original != name:
            aliases[name] = original
        else:
            own = w.detach().cpu().contiguous()
            whole = own.untyped_storage().nbytes() == own.nbytes and own.data_ptr() not in stored
            weights[name] = own if whole else own.clone()  # safetensors stores no two tensors that share memory
            stored.add(own.data_ptr())
    return {
        "schema": SCHEMA,
        "values": {v.name: record_to_json(v, leave_out=("name",)) for v in graph.values.values()},
        "nodes": [record_to_json(n) for n in graph.nodes],
        "weights": list(graph.weights),
        "aliases": aliases,
        "trainable": sorted(graph.trainable),
        "folds": {name: record_to_json(f) for name, f in graph.folds.items()},
        **{name: getattr(graph, name) for name in _AS_THEY_ARE},
    }, weights


def graph_from_json(data: Any, weights: dict[str, torch.Tensor]) -> Graph:
    """Invert `graph_to_json`.

    Raises:
        PlanError: the data are malformed or of another schema version, or do not fit the weights.
    """
    check_schema(data, "the graph")
    validated(data, _GRAPH, "the graph")
    aliases, owned = data["aliases"], dict.fromkeys(data["weights"])
    absent = {*aliases.values(), *(owned.keys() - aliases)} - weights.keys()
    if absent or not aliases.keys() <= owned.keys():
        got = ", ".join(sorted(absent or aliases))[:80]
        raise PlanError("Weights of the graph are missing from the file, or aliases name missing weights", got=got)
    weights.update({name: weights[original] for name, original in aliases.items()})
    graph = Graph(
        nodes=[record_from_json(Node, n, f"node {k}") for k, n in enumerate(data["nodes"])],
        values={k: record_from_json(Value, v, f"value '{k}'", name=k) for k, v in data["values"].items()},
        weights={name: weights.pop(name) for name in owned},
        trainable=set(data["trainable"]),
        folds={k: record_from_json(Fold, f, f"fold '{k}'") for k, f in data.get("folds", {}).items()},
        **{name: data[name] for name in _AS_THEY_ARE},
    )
    try:
        check(graph, blame="loading")
        for v in graph.values.values():
            if v.dtype != "int":
                dtype_of(v.dtype)
        for n in graph.nodes:
            target = str(n.attrs.get("target"))
            if n.op == OPAQUE and ":" not in target:  # a target with ":" needs its framework, which is loaded later
                resolve_target(target)
        if graph.in_spec or graph.out_spec:  # a graph that was not captured has neither
            _check_call(graph)
        named = {n for w, f in graph.folds.items() for n in (w, f.bias, f.gamma, f.beta, f.mean, f.var)} - {None}
        if not named <= set(graph.weights):
            raise GraphError("A folded batch norm names missing tensors")
        strangers = (graph.trainable - set(graph.weights)) | (set(graph.inputs) - set(graph.values))
        if strangers:
            raise GraphError("Inputs or trainable weights are missing", got=", ".join(sorted(strangers)[:8]))
    except GraphError as e:
        raise PlanError(f"The saved graph is malformed: {e.what}", where=e.where, got=e.got, allowed=e.allowed) from e
    _check_numbers(graph)
    if weights:
        raise PlanError("The file holds weights that the graph does not have", got=", ".join(sorted(weights)[:8]))
    return graph


def _check_numbers(graph: Graph) -> None:
    """Check that no weight holds NaN, and no trainable weight integers."""
    for name, w in graph.weights.items():
        if bool(w.isnan().any()):
            raise PlanError(f"The weight '{name}' holds NaN")
        if name in graph.trainable and not w.is_floating_point():
            raise PlanError(f"The trainable weight '{name}' must hold floats", got=str(w.dtype))


def _check_call(graph: Graph) -> None:
    """Check that the specification of arguments and results fits the graph."""
    call, results = (parse_json(x, PlanError, where="the call of the graph") for x in (graph.in_spec, graph.out_spec))
    validated(call, _CALL, "in_spec of the graph")
    places = call["tensors"]
    inside = all(0 <= k < call["leaves"] for k in places)
    if len(places) != len(graph.inputs) or not inside or places != sorted(set(places)):
        raise GraphError("Arguments do not fit the graph's inputs", got=str(places)[:80], allowed="ascending places")
    validated(results, _RESULTS, "out_spec of the graph")
    leaves, known = results["leaves"], {str({"output": k}) for k in range(len(graph.outputs))}
    strange = [x for x in leaves if set(x) != {"constant"} and str(x) not in known]
    if strange or read_tree(results["plain"]).num_leaves != len(leaves):
        raise GraphError("Results do not fit the graph's outputs", got=str(strange or leaves)[:80])


# -------------------------------------------------------------------------------------------------------------- plans

# tuples and sets, which are lists in JSON
_Names: TypeAlias = Annotated[tuple[str, ...], Strict(False)]
_Groups: TypeAlias = Annotated[tuple[_Names, ...], Strict(False)]
_Pairs: TypeAlias = Annotated[frozenset[Annotated[tuple[str, str], Strict(False)]], Strict(False)]
_Int32: TypeAlias = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
_PLAN = table(
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
#: the entries of a plan's provenance that are used after loading
_PROVENANCE = table(
    others=True,
    settings=NotRequired[dict[str, Any]],
    samples=NotRequired[list[str]],
    corrected=NotRequired[list[str]],
    chosen=NotRequired[dict[str, int]],
    widths=NotRequired[dict[str, list[int] | tuple[int, ...]]],  # tuples: as earlier versions saved them
    edited=NotRequired[dict[str, Any]],
    foreign_quantizers=NotRequired[list[str]],
)
_SETTINGS = table(
    others=True,
    steps=NotRequired[dict[str, Any]],
    rule=NotRequired[str],
    weight_rule=NotRequired[str],
    overrides=NotRequired[dict[str, Any]],
    z_threshold=NotRequired[Annotated[float, Field(gt=0, allow_inf_nan=False)]],
    seed=NotRequired[Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]],
)
_STORED = table(
    format=str,
    axis=NotRequired[int | None],
    grid=dict[str, Any],
    scale=NotRequired[float | list[float]],
    zero_point=NotRequired[_Int32 | list[_Int32]],
)
_NUMBERS = {"scale": torch.float32, "zero_point": torch.int32}


def plan_to_json(plan: Plan, numbers: dict[str, torch.Tensor] | None = None) -> str:
    """Return a Plan as JSON text.

    Args:
        numbers: receives the scales and zero points under "scale:<tensor>" and "zero_point:<tensor>"; by default they
            are part of the text, where they can be edited by hand.
    """
    tensors = {}
    for t in plan.tensors.values():
        entry = record_to_json(t, leave_out=("name", "stored"))
        if t.stored is not None:
            t.stored.check()
            entry |= record_to_json(t.stored, leave_out=("grid", *_NUMBERS)) | {"grid": record_to_json(t.stored.grid)}
            for field in _NUMBERS:
                value = getattr(t.stored, field)
                if numbers is None:
                    entry[field] = value.tolist()
                else:
                    numbers[f"{field}:{t.name}"] = value
        tensors[t.name] = entry
    data = {
        "schema": SCHEMA,
        **{name: getattr(plan, name) for name in ("platform", "groups", "ties", "fixed", "zeros", "rewrites")},
        "tensors": tensors,
        "nodes": {n.name: record_to_json(n, leave_out=("name",)) for n in plan.nodes.values()},
        "float_edges": sorted(plan.float_edges),
        "limits": [record_to_json(x) for x in plan.limits],
        "sums": dict(plan.sums),
        "provenance": to_json(plan.provenance),
    }
    return json.dumps(data, indent=1, allow_nan=False)


def plan_from_json(text: str, numbers: Mapping[str, torch.Tensor] | None = None) -> Plan:
    """Invert `plan_to_json`.

    Raises:
        PlanError: the text is not a plan, has another schema version, or names unknown fields or numbers.
    """
    data = parse_json(text, PlanError, where="the plan")
    check_schema(data, "the plan")
    data = validated(data, _PLAN, "the plan")
    del data["schema"]
    provenance = validated(from_json(data["provenance"]), _PROVENANCE, "the plan, provenance")
    validated(provenance.get("settings", {}), _SETTINGS, "the plan, provenance.settings")
    tensors = {name: _tensor(name, entry, numbers) for name, entry in data["tensors"].items()}
    nodes = {k: record_from_json(NodePlan, e, f"node '{k}'", name=k) for k, e in data["nodes"].items()}
    limits = tuple(record_from_json(ScaleBound, x, f"limit {k}") for k, x in enumerate(data.get("limits", ())))
    data |= {"tensors": tensors, "nodes": nodes, "limits": limits, "provenance": provenance}
    plan = Plan(**{**data, "sums": tuple(data.get("sums", {}).items())})
    known = {f"{field}:{t.name}" for t in tensors.values() for field in _NUMBERS if getattr(t, field) is not None}
    extra = sorted(set(numbers or ()) - known)
    if extra:
        raise PlanError("The file holds numbers for tensors that the plan does not have", got=", ".join(extra[:8]))
    return plan


def _tensor(name: str, entry: dict[str, Any], numbers: Mapping[str, torch.Tensor] | None) -> TensorPlan:
    where, stored = f"tensor '{name}'", None
    if entry.get("grid") is not None:
        own = {k: entry[k] for k in ("format", "axis", "grid", *(_NUMBERS if numbers is None else ())) if k in entry}
        validated(own, _STORED, where)
        entry = {k: v for k, v in entry.items() if k not in own}
        own["grid"] = record_from_json(Grid, own["grid"], f"{where}, grid")
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
    t = record_from_json(TensorPlan, entry, where, name=name, stored=stored)
    ends = [x for x in (t.low, t.high) if x is not None]
    infinite = not all(map(math.isfinite, ends)) if stored is not None else any(map(math.isnan, ends))
    if infinite or ends != sorted(ends):
        raise PlanError(f"The range of '{name}' must be finite and ascending", got=f"{t.low}..{t.high}")
    return t
