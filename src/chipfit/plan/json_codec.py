"""Plans and graphs as JSON data that restores exactly. Data from files are checked by the types of the records."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, NotRequired, TypeVar

import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    TypeAdapter,
    ValidationInfo,
    WrapValidator,
    with_config,
)
from typing_extensions import TypedDict

from chipfit.engine.opaque import resolve_target
from chipfit.engine.operand_checks import MOST_ELEMENTS
from chipfit.engine.trees import read_tree
from chipfit.engine.types import dtype_of
from chipfit.errors import GraphError, PlanError
from chipfit.files import parse_json
from chipfit.graph.check import check
from chipfit.graph.edit import lies_channels_last
from chipfit.graph.ir import OPAQUE, Fold, Graph, Node, Ref, Removed, Value
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored
from chipfit.validation import check_value

T = TypeVar("T")

#: version of the JSON layout; raised when a reader of the old layout would misread the new one
SCHEMA = 1
_STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
_OPEN = ConfigDict(strict=True, extra="allow")
for _record in (Value, Node, Fold, Removed, NodePlan, TensorPlan, Stored, Grid, ScaleBound):
    with_config(_STRICT)(_record)

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


def record_to_json(x: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a flat dataclass as JSON data, without the fields that hold their default."""
    kept = [(f, getattr(x, f.name)) for f in fields(x) if f.name not in leave_out]
    return {f.name: to_json(v) for f, v in kept if v != f.default or type(v) is not type(f.default)}


def _with_names(table: Any) -> Any:
    """Return JSON data of records by name as data of records that have the name as a field."""
    if not isinstance(table, dict):
        return table
    return {k: {**from_json(v), "name": k} if isinstance(v, dict) else v for k, v in table.items()}


def _unchanged(x: Any, read: Any) -> Any:
    """Check data, and keep the order of their keys."""
    read(x)
    return x


#: a record that is checked after `from_json` has read its marks ("$tuple", "$float", "$ref")
FromJson = Annotated[T, BeforeValidator(from_json)]
#: records by name, of which each has its name as a field
_Named = Annotated[dict[str, T], BeforeValidator(_with_names)]
#: data that are checked, but kept as they were given: a TypedDict would drop the order of keys
_Unchanged = Annotated[T, WrapValidator(_unchanged)]


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


@with_config(_STRICT)
class _Graph(TypedDict):
    schema: int
    values: _Named[Value]
    nodes: list[FromJson[Node]]
    weights: list[str]
    aliases: dict[str, str]
    trainable: set[str]
    folds: NotRequired[dict[str, FromJson[Fold]]]  # newer than the schema
    outer_layers: NotRequired[dict[str, tuple[str, dict[str, Any]]]]  # newer than the schema
    removed: NotRequired[list[FromJson[Removed]]]  # newer than the schema
    channels_last: NotRequired[list[str]]  # newer; weights in this memory format, which changes the order of sums
    inputs: list[str]
    outputs: list[str]
    in_spec: str
    out_spec: str
    data_format: str
    framework: str


@with_config(_STRICT)
class _Call(TypedDict):
    """The call with which a model was captured (`Graph.in_spec`); leaves are those of its nested arguments."""

    args: int  #: number of arguments by position
    leaves: int  #: number of leaves, of which some are no tensors
    tensors: list[int]  #: which leaves are the graph's inputs, ascending
    kwargs: list[str]  #: names of arguments by name
    names: list[str]  #: names of the parameters
    plain: NotRequired[str]  #: the nesting in plain containers
    captured: NotRequired[str]  #: the nesting in the containers of the model
    packed: NotRequired[bool]  #: all inputs are one argument, as in Keras
    batch: NotRequired[list[list[int]]]  #: (input, axis) of each axis of samples
    states: NotRequired[list[list[int]]]  #: (input, output) of each state: the output is its next value


@with_config(_STRICT)
class _Results(TypedDict):
    """The results of a model (`Graph.out_spec`): nesting as in `_Call`, and an output or a constant for each leaf."""

    plain: str
    captured: NotRequired[str]
    leaves: list[dict[str, Any]]


_GRAPH, _CALL, _RESULTS = TypeAdapter(_Graph), TypeAdapter(_Call), TypeAdapter(_Results)
#: fields that are JSON data already
_AS_THEY_ARE = ("inputs", "outputs", "in_spec", "out_spec", "data_format", "framework", "outer_layers")


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
            own = w.detach().contiguous()
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
        "channels_last": [name for name in weights if lies_channels_last(graph.weights[name])],
        "folds": {name: record_to_json(f) for name, f in graph.folds.items()},
        "removed": [
            {**record_to_json(r, leave_out=("node",)), "node": record_to_json(r.node)} for r in graph.removed.values()
        ],
        **{name: getattr(graph, name) for name in _AS_THEY_ARE},
    }, weights


def graph_from_json(data: Any, weights: dict[str, torch.Tensor]) -> Graph:
    """Invert `graph_to_json`.

    Raises:
        PlanError: the data are malformed or of another schema version, or do not fit the weights.
    """
    check_schema(data, "the graph")
    parts = check_value(_GRAPH, data, PlanError, "the graph", json=True)
    del parts["schema"]
    aliases, owned = parts.pop("aliases"), dict.fromkeys(parts.pop("weights"))
    absent = {*aliases.values(), *(owned.keys() - aliases)} - weights.keys()
    if absent or not aliases.keys() <= owned.keys():
        got = ", ".join(sorted(absent or aliases))[:80]
        raise PlanError("Weights of the graph are missing from the file, or aliases name missing weights", got=got)
    for name in parts.pop("channels_last", ()):
        if name not in weights or weights[name].dim() != 4:
            raise PlanError("Only weights with 4 axes can have channels last in memory", got=name[:80])
        weights[name] = weights[name].contiguous(memory_format=torch.channels_last)
    weights.update({name: weights[original] for name, original in aliases.items()})
    parts["removed"] = {r.node.name: r for r in parts.pop("removed", ())}
    graph = Graph(weights={name: weights.pop(name) for name in owned}, **parts)
    try:
        _check_parts(graph)
    except GraphError as e:
        raise PlanError(f"The saved graph is malformed: {e.what}", where=e.where, got=e.got, allowed=e.allowed) from e
    _check_numbers(graph)
    if weights:
        raise PlanError("The file holds weights that the graph does not have", got=", ".join(sorted(weights)[:8]))
    return graph


def _check_parts(graph: Graph) -> None:
    """Check that the parts of a graph fit together; raise a GraphError if not."""
    check(graph, blame="loading")
    for name, v in graph.values.items():
        if v.dtype != "int":
            dtype_of(v.dtype)
        if math.prod(max(s or 1, 1) for s in v.shape) > MOST_ELEMENTS:
            allowed = f"up to {MOST_ELEMENTS} elements"
            raise GraphError(f"The size of '{name}' is beyond all bounds", got=str(v.shape)[:120], allowed=allowed)
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


def _check_numbers(graph: Graph) -> None:
    """Check that no weight holds NaN, and no trainable weight integers."""
    for name, w in graph.weights.items():
        if bool(w.isnan().any()):
            raise PlanError(f"The weight '{name}' holds NaN")
        if name in graph.trainable and not (w.is_floating_point() or w.is_complex()):
            raise PlanError(f"The trainable weight '{name}' must hold floats", got=str(w.dtype))


def _check_call(graph: Graph) -> None:
    """Check that the specification of arguments and results fits the graph."""
    call, results = (parse_json(x, PlanError, where="the call of the graph") for x in (graph.in_spec, graph.out_spec))
    check_value(_CALL, call, PlanError, "in_spec of the graph")
    places = call["tensors"]
    inside = all(0 <= k < call["leaves"] for k in places)
    if len(places) != len(graph.inputs) or not inside or places != sorted(set(places)):
        raise GraphError("Arguments do not fit the graph's inputs", got=str(places)[:80], allowed="ascending places")
    for place in call.get("batch", ()):
        if not (
            len(place) == 2 and 0 <= place[0] < len(places) and 0 <= place[1] < len(graph.shape(graph.inputs[place[0]]))
        ):
            raise GraphError("No input has this axis of samples", got=str(place)[:80])
    for pair in call.get("states", ()):
        if not (len(pair) == 2 and 0 <= pair[0] < len(graph.inputs) and 0 <= pair[1] < len(graph.outputs)):
            raise GraphError(
                "A state is not an input of the graph, or its next value is not an output", got=str(pair)[:80]
            )
    check_value(_RESULTS, results, PlanError, "out_spec of the graph")
    leaves, known = results["leaves"], {str({"output": k}) for k in range(len(graph.outputs))}
    typed = [(x, {k: v for k, v in x.items() if k != "dtype"}) for x in leaves]
    strange = [x for x, rest in typed if set(x) != {"constant"} and str(rest) not in known]
    for x in leaves:
        dtype_of(str(x.get("dtype", "float32")))
    if strange or read_tree(results["plain"]).num_leaves != len(leaves):
        raise GraphError("Results do not fit the graph's outputs", got=str(strange or leaves)[:80])


# -------------------------------------------------------------------------------------------------------------- plans

_NUMBERS = ("scale", "zero_point")


def _read_tensor(entry: Any, read: Any, info: ValidationInfo[Any]) -> TensorPlan:
    """Read a tensor, whose entry has the fields of `stored` too; scale and zero point are in the context."""
    if isinstance(entry, dict) and "grid" in entry:
        numbers = {field: f"{field}:{entry['name']}" for field in _NUMBERS}
        own = {f.name: entry.pop(f.name) for f in fields(Stored) if f.name in entry}
        entry["stored"] = own | {k: info.context[name] for k, name in numbers.items() if name in info.context}
    try:
        t: TensorPlan = read(entry)
    except PlanError as e:
        raise PlanError(e.what, where=f"tensor '{entry['name']}'", got=e.got, allowed=e.allowed) from e
    ends = [x for x in (t.low, t.high) if x is not None]
    infinite = not all(map(math.isfinite, ends)) if t.quantized else any(map(math.isnan, ends))
    if infinite or ends != sorted(ends):
        raise PlanError(f"The range of '{t.name}' must be finite and ascending", got=f"{t.low}..{t.high}")
    return t


@with_config(_OPEN)
class _Settings(TypedDict, total=False):
    """The settings that are used after loading."""

    steps: dict[str, Any]
    rule: str
    weight_rule: str
    overrides: dict[str, Any]
    z_threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


@with_config(_OPEN)
class _Provenance(TypedDict, total=False):
    """The entries of a plan's provenance that are used after loading."""

    settings: _Settings
    samples: list[str]
    corrected: list[str]
    chosen: dict[str, int]
    widths: dict[str, list[int] | tuple[int, ...]]  # tuples: as earlier versions saved them
    edited: dict[str, Any]
    foreign_quantizers: list[str]
    apart: list[str]


@with_config(_STRICT)
class _Plan(TypedDict):
    schema: int
    platform: str
    groups: tuple[tuple[str, ...], ...]
    ties: tuple[tuple[str, ...], ...]
    fixed: NotRequired[tuple[str, ...]]  # these four are newer than the schema
    zeros: NotRequired[tuple[str, ...]]
    limits: NotRequired[tuple[FromJson[ScaleBound], ...]]
    sums: NotRequired[Annotated[dict[str, PositiveFloat], AfterValidator(lambda sums: tuple(sums.items()))]]
    rewrites: tuple[str, ...]
    tensors: _Named[Annotated[TensorPlan, WrapValidator(_read_tensor)]]
    nodes: _Named[NodePlan]
    float_edges: frozenset[tuple[str, str]]
    provenance: FromJson[_Unchanged[_Provenance]]


_PLAN = TypeAdapter(_Plan)


def plan_to_json(plan: Plan) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a Plan as JSON data, and its scales and zero points as "scale:<tensor>" and "zero_point:<tensor>"."""
    tensors: dict[str, Any] = {}
    numbers: dict[str, torch.Tensor] = {}
    for t in plan.tensors.values():
        entry = record_to_json(t, leave_out=("name", "stored"))
        if t.stored is not None:
            t.stored.check()
            entry |= record_to_json(t.stored, leave_out=("grid", *_NUMBERS)) | {"grid": record_to_json(t.stored.grid)}
            numbers |= {f"{field}:{t.name}": getattr(t.stored, field) for field in _NUMBERS}
        tensors[t.name] = entry
    return {
        "schema": SCHEMA,
        **{name: getattr(plan, name) for name in ("platform", "groups", "ties", "fixed", "zeros", "rewrites")},
        "tensors": tensors,
        "nodes": {n.name: record_to_json(n, leave_out=("name",)) for n in plan.nodes.values()},
        "float_edges": sorted(plan.float_edges),
        "limits": [record_to_json(x) for x in plan.limits],
        "sums": dict(plan.sums),
        "provenance": to_json(plan.provenance),
    }, numbers


def plan_from_json(data: Any, numbers: Mapping[str, torch.Tensor]) -> Plan:
    """Invert `plan_to_json`.

    Raises:
        PlanError: the data are not a plan, have another schema version, or name unknown fields or numbers.
    """
    check_schema(data, "the plan")
    parts = check_value(_PLAN, data, PlanError, "the plan", json=True, context=numbers)
    del parts["schema"]
    plan = Plan(**parts)
    known = {f"{field}:{t.name}" for t in plan.tensors.values() if t.quantized for field in _NUMBERS}
    extra = sorted(numbers.keys() - known)
    if extra:
        raise PlanError("The file holds numbers for tensors that the plan does not have", got=", ".join(extra[:8]))
    return plan
