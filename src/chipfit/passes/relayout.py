"""The layout pass for a graph that has a plan: inserted values take the numbers of what they rearrange."""

from dataclasses import replace

from chipfit.graph.ir import Graph
from chipfit.passes.layout import Rearranged, rearrange
from chipfit.plan.record import NodePlan, Plan


def relayout(graph: Graph, plan: Plan, target: str, *, borders: bool = False) -> tuple[Rearranged, Plan]:
    """As `passes.layout.rearrange`, and the plan of the rearranged graph."""
    requantized = {v for v, _ in plan.float_edges}  # a value with a raw side is more than its operand in another order
    moved = [n for n in graph.nodes if n.op == "Transpose"]
    solid = {n.name for n in moved if n.output in requantized or not same_numbers(plan, n.data, n.output)}
    new = rearrange(graph, target, plan.float_edges, solid, borders=borders)
    tensors, nodes = dict(plan.tensors), dict(plan.nodes)
    made = new.graph.producers()
    for name, (source, _) in new.copies.items():
        quantized = plan.quantized(source) and (source, name) not in new.raw
        if quantized:
            tensors[name] = plan.tensors[source].with_(name=name)
        if name in made:
            nodes[name] = NodePlan(
                name=name, op=made[name].op, layer=made[name].layer, exec="follow" if quantized else "float"
            )
    return new, replace(plan, tensors=tensors, nodes=nodes, float_edges=plan.float_edges | frozenset(new.raw))


def same_numbers(plan: Plan, a: str, b: str) -> bool:
    """Whether two values are stored on one grid with one set of numbers, or both in float."""
    x, y = plan.stored(a), plan.stored(b)
    return x is y if x is None or y is None else x.same_numbers(y)
