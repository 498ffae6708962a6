"""A graph's structure as JSON data, its weights beside it."""

from __future__ import annotations

from typing import Any

import torch

from chipfit.engine.opaque import resolve_target
from chipfit.engine.trees import read_tree
from chipfit.engine.types import dtype_of
from chipfit.errors import GraphError, PlanError
from chipfit.files import parse_json
from chipfit.graph.check import check
from chipfit.graph.ir import OPAQUE, Graph, Node, Value
from chipfit.plan.plain import SCHEMA, check_schema, demand, fits, record_from_plain, record_to_plain

#: keys of a graph, and of what is written about its arguments -> types
_GRAPH: dict[str, Any] = {
    "schema": int,
    "values": dict[str, dict[str, Any]],
    "nodes": list[dict[str, Any]],
    "weights": list[str],
    "aliases": dict[str, str],
    "trainable": list[str],
    "inputs": list[str],
    "outputs": list[str],
    "in_spec": str,
    "out_spec": str,
    "data_format": str,
    "framework": str,
}
_CALL: dict[str, Any] = {
    "plain": str,
    "captured": str,
    "tree": str,
    "args": int,
    "kwargs": list[str],
    "leaves": int,
    "tensors": list[int],
    "names": list[str],
}
#: fields that are JSON data already
_AS_THEY_ARE = ("inputs", "outputs", "in_spec", "out_spec", "data_format", "framework")


def graph_to_plain(graph: Graph) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The structure as JSON, and each weight once: tied ones are listed as aliases of the first."""
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
        **{name: getattr(graph, name) for name in _AS_THEY_ARE},
    }, weights


def _demand_structure(graph: Graph) -> None:
    """What is written about arguments and results fits the graph; weights are numbers.

    Raises:
        PlanError, GraphError: it does not.
    """
    if graph.in_spec or graph.out_spec:  # a graph that nobody captured has neither
        _demand_call(graph)
    strangers = graph.trainable - set(graph.weights)
    inputs = set(graph.inputs) - set(graph.values)
    if strangers or inputs:
        raise GraphError("Trainable weights or inputs are not there", got=", ".join(sorted(strangers | inputs)[:8]))
    for name, w in graph.weights.items():
        if bool(w.isnan().any()) or (name in graph.trainable and not w.is_floating_point()):
            raise PlanError(f"Weight '{name}' holds what is no number", got=str(w.dtype))


def _demand_call(graph: Graph) -> None:
    """What is written about arguments and results fits the graph; raises as above."""
    call = parse_json(graph.in_spec, PlanError, where="in_spec of the graph")
    demand(call, _CALL, "in_spec of the graph", optional=("plain", "captured", "tree"))
    if len(call["tensors"]) != len(graph.inputs) or any(not 0 <= k < call["leaves"] for k in call["tensors"]):
        raise GraphError("Arguments do not fit the graph's inputs", got=str(call["tensors"])[:80])
    results = parse_json(graph.out_spec, PlanError, where="out_spec of the graph")
    wanted = {"plain": str, "captured": str, "tree": str, "leaves": list[dict[str, Any]]}
    demand(results, wanted, "out_spec of the graph", optional=("captured", "tree"))
    for leaf in results["leaves"]:
        if set(leaf) != {"constant"} and not (set(leaf) == {"output"} and fits(leaf["output"], int)):
            raise GraphError("A result is neither an output nor a constant", got=repr(leaf)[:80])
        if not 0 <= leaf.get("output", 0) < max(len(graph.outputs), 1):
            raise GraphError("A result is no output of the graph", got=repr(leaf)[:80])
    if read_tree(results["plain"]).num_leaves != len(results["leaves"]):
        raise GraphError("The structure of the results has another number of leaves", got=len(results["leaves"]))


def graph_from_plain(data: Any, weights: dict[str, torch.Tensor]) -> Graph:
    """The inverse of `graph_to_plain`.

    Raises:
        PlanError: the data are malformed or of another schema version, or do not fit the weights.
    """
    check_schema(data, "the graph")
    demand(data, _GRAPH, "the graph")
    absent = {*data["aliases"].values(), *data["weights"]} - {*weights, *data["aliases"]}
    if absent:
        raise PlanError("There are no numbers for weights of the graph", got=", ".join(sorted(absent)[:8]))
    weights.update({name: weights[original] for name, original in data["aliases"].items() if original in weights})
    graph = Graph(
        nodes=[record_from_plain(Node, n, f"node {k}") for k, n in enumerate(data["nodes"])],
        values={k: record_from_plain(Value, v, f"value '{k}'", name=k) for k, v in data["values"].items()},
        weights={name: weights.pop(name) for name in dict.fromkeys(data["weights"]) if name in weights},
        trainable=set(data["trainable"]),
        **{name: data[name] for name in _AS_THEY_ARE},
    )
    try:
        check(graph, blame="loading")
        for v in graph.values.values():
            if v.dtype != "int":
                dtype_of(v.dtype)
        for n in graph.nodes:
            target = n.attrs.get("target") if n.op == OPAQUE else ":"
            if not isinstance(target, str):
                raise GraphError(f"Node '{n.name}' names no operator", got=repr(target)[:80])
            if ":" not in target:  # those of a framework need it, which is loaded later
                resolve_target(target)
        _demand_structure(graph)
    except GraphError as e:
        raise PlanError(f"The saved graph is malformed: {e.what}", where=e.where, got=e.got, allowed=e.allowed) from e
    if weights:
        raise PlanError("There are weights that the graph does not know", got=", ".join(sorted(weights)[:8]))
    return graph
