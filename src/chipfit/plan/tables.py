"""Weights in look-up tables of bytes, as the integers that the tables hold."""

from dataclasses import replace

from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import Grid


def byte_tables(graph: Graph, plan: Plan) -> dict[str, tuple[float, ...]]:
    """Return the tables of weights whose entries are 8-bit integers, by name; none of those that are read in float."""
    raw = {value for value, _ in plan.float_edges}
    stored = {n: t.stored for n, t in plan.tensors.items() if n in graph.weights and n not in raw}
    grids = {n: s.grid for n, s in stored.items() if s is not None and s.grid.table is not None}
    return {n: g.table for n, g in grids.items() if g.table and _whole(g.table)}


def _whole(table: tuple[float, ...]) -> bool:
    return all(v == int(v) for v in table) and table[0] >= -128 and table[-1] <= 127


def with_integers(graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Return a graph and plan in which these weights are 8-bit integers: entries of their tables.

    Kernels and files compute with the entries; no value of the quantized network changes.
    """
    found = byte_tables(graph, plan)
    if not found:
        return graph, plan
    tensors, weights = dict(plan.tensors), dict(graph.weights)
    for name in found:
        stored = plan[name]
        weights[name] = stored.round(weights[name].detach())
        tensors[name] = tensors[name].with_(grid=Grid(bits=8, qmin=-128, qmax=127, per=stored.grid.per))
    return replace(graph, weights=weights), replace(plan, tensors=tensors)
