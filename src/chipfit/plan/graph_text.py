"""A graph's structure as JSON data, its weights beside it."""

from __future__ import annotations

from typing import Any

import torch

from chipfit.engine.opaque import resolve_target
from chipfit.engine.types import dtype_of
from chipfit.errors import GraphError, PlanError
from chipfit.graph.check import check
from chipfit.graph.ir import OPAQUE, Graph, Node, Value
from chipfit.plan.plain import SCHEMA, check_schema, from_plain, record_to_plain

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


def graph_from_plain(data: Any, weights: dict[str, torch.Tensor]) -> Graph:
    """The inverse of `graph_to_plain`.

    Raises:
        PlanError: the data are malformed or of another schema version, or do not fit the weights.
    """
    check_schema(data, "the graph")
    try:
        weights.update({name: weights[original] for name, original in data["aliases"].items()})
        graph = Graph(
            nodes=[Node(**from_plain(n)) for n in data["nodes"]],
            values={name: Value(name, **from_plain(v)) for name, v in data["values"].items()},
            weights={name: weights.pop(name) for name in data["weights"]},
            trainable=set(data["trainable"]),
            **{name: data[name] for name in _AS_THEY_ARE},
        )
        check(graph, blame="loading")
        for v in graph.values.values():
            if v.dtype != "int":
                dtype_of(v.dtype)
        for n in graph.nodes:
            if n.op == OPAQUE and ":" not in n.attrs["target"]:  # those of a framework need it, which is loaded later
                resolve_target(n.attrs["target"])
    except (KeyError, TypeError, ValueError, AttributeError, GraphError) as e:
        raise PlanError("The saved graph is malformed", got=f"{type(e).__name__}: {e}") from e
    if weights:
        raise PlanError("There are weights that the graph does not know", got=", ".join(sorted(weights)[:8]))
    return graph
