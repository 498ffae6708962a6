"""A graph's structure as JSON data, its weights beside it."""

from typing import Any, NotRequired

import torch

from chipfit.engine.opaque import resolve_target
from chipfit.engine.trees import read_tree
from chipfit.engine.types import dtype_of
from chipfit.errors import GraphError, PlanError
from chipfit.files import parse_json
from chipfit.graph.check import check
from chipfit.graph.ir import OPAQUE, Fold, Graph, Node, Value
from chipfit.plan.plain import SCHEMA, check_schema, demand, record_from_plain, record_to_plain, table

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


def graph_to_plain(graph: Graph) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The structure as JSON, and each weight once: tied ones are listed as aliases of the first.

    Raises:
        PlanError: a weight holds NaN, or an attribute has no JSON form.
    """
    _demand_numbers(graph)
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
            weights[name] = own if whole else own.clone()  # safetensors takes no two tensors that share memory
            stored.add(own.data_ptr())
    return {
        "schema": SCHEMA,
        "values": {v.name: record_to_plain(v, leave_out=("name",)) for v in graph.values.values()},
        "nodes": [record_to_plain(n) for n in graph.nodes],
        "weights": list(graph.weights),
        "aliases": aliases,
        "trainable": sorted(graph.trainable),
        "folds": {name: record_to_plain(f) for name, f in graph.folds.items()},
        **{name: getattr(graph, name) for name in _AS_THEY_ARE},
    }, weights


def graph_from_plain(data: Any, weights: dict[str, torch.Tensor]) -> Graph:
    """The inverse of `graph_to_plain`.

    Raises:
        PlanError: the data are malformed or of another schema version, or do not fit the weights.
    """
    check_schema(data, "the graph")
    demand(data, _GRAPH, "the graph")
    aliases, owned = data["aliases"], dict.fromkeys(data["weights"])
    absent = {*aliases.values(), *(owned.keys() - aliases)} - weights.keys()
    if absent or not aliases.keys() <= owned.keys():
        got = ", ".join(sorted(absent or aliases))[:80]
        raise PlanError("There are no numbers for weights of the graph, or no weights for aliases", got=got)
    weights.update({name: weights[original] for name, original in aliases.items()})
    graph = Graph(
        nodes=[record_from_plain(Node, n, f"node {k}") for k, n in enumerate(data["nodes"])],
        values={k: record_from_plain(Value, v, f"value '{k}'", name=k) for k, v in data["values"].items()},
        weights={name: weights.pop(name) for name in owned},
        trainable=set(data["trainable"]),
        folds={k: record_from_plain(Fold, f, f"fold '{k}'") for k, f in data.get("folds", {}).items()},
        **{name: data[name] for name in _AS_THEY_ARE},
    )
    try:
        check(graph, blame="loading")
        for v in graph.values.values():
            if v.dtype != "int":
                dtype_of(v.dtype)
        for n in graph.nodes:
            target = str(n.attrs.get("target"))
            if n.op == OPAQUE and ":" not in target:  # those of a framework need it, which is loaded later
                resolve_target(target)
        if graph.in_spec or graph.out_spec:  # a graph that nobody captured has neither
            _demand_call(graph)
        named = {n for w, f in graph.folds.items() for n in (w, f.bias, f.gamma, f.beta, f.mean, f.var)} - {None}
        if not named <= set(graph.weights):
            raise GraphError("A folded batch norm has tensors that are not there")
        strangers = (graph.trainable - set(graph.weights)) | (set(graph.inputs) - set(graph.values))
        if strangers:
            raise GraphError("Inputs or trainable weights are not there", got=", ".join(sorted(strangers)[:8]))
    except GraphError as e:
        raise PlanError(f"The saved graph is malformed: {e.what}", where=e.where, got=e.got, allowed=e.allowed) from e
    _demand_numbers(graph)
    if weights:
        raise PlanError("There are weights that the graph does not know", got=", ".join(sorted(weights)[:8]))
    return graph


def _demand_numbers(graph: Graph) -> None:
    """Raise a PlanError where a weight holds NaN, or is trained and holds integers."""
    for name, w in graph.weights.items():
        if bool(w.isnan().any()):
            raise PlanError(f"The weight '{name}' holds NaN")
        if name in graph.trainable and not w.is_floating_point():
            raise PlanError(f"The weight '{name}' is trained", got=str(w.dtype), allowed="floats")


def _demand_call(graph: Graph) -> None:
    """Raise a PlanError or GraphError unless what is written about arguments and results fits the graph."""
    call, results = (parse_json(x, PlanError, where="the call of the graph") for x in (graph.in_spec, graph.out_spec))
    demand(call, _CALL, "in_spec of the graph")
    places = call["tensors"]
    inside = all(0 <= k < call["leaves"] for k in places)
    if len(places) != len(graph.inputs) or not inside or places != sorted(set(places)):
        raise GraphError("Arguments do not fit the graph's inputs", got=str(places)[:80], allowed="ascending places")
    demand(results, _RESULTS, "out_spec of the graph")
    leaves, known = results["leaves"], {str({"output": k}) for k in range(len(graph.outputs))}
    strange = [x for x in leaves if set(x) != {"constant"} and str(x) not in known]
    if strange or read_tree(results["plain"]).num_leaves != len(leaves):
        raise GraphError("Results do not fit the graph's outputs", got=str(strange or leaves)[:80])
