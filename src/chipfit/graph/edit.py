"""Functions that edit a graph: free names, inserted, replaced and removed nodes."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from chipfit.graph.ir import Graph, Node


def lies_channels_last(w: torch.Tensor) -> bool:
    """Return whether a weight lies in memory with its channels last; sums in kernels then have another order."""
    return w.dim() == 4 and w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous()


def unique_name(wanted: str, taken: Container[str], counts: dict[str, int] | None = None) -> str:
    """Return `wanted`, or the first of `wanted_1`, `wanted_2`, ... that is not taken.

    Args:
        counts: the last number tried for each name, from which the search goes on, while no name becomes free.
    """
    counts = {} if counts is None else counts
    count = counts.get(wanted, 0)
    name = f"{wanted}_{count}" if count else wanted
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    counts[wanted] = count
    return name


def taken_names(graph: Graph) -> set[str]:
    """Return the names of all values, weights and nodes."""
    return {*graph.values, *graph.weights, *(n.name for n in graph.nodes)}


def new_name(graph: Graph, wanted: str) -> str:
    """Return `wanted`, or the next free name like it."""
    return unique_name(wanted, taken_names(graph))


def replace_node(graph: Graph, old: Node, *new: Node) -> None:
    """Replace `old` by `new`."""
    at = next(k for k, n in enumerate(graph.nodes) if n.name == old.name)
    graph.nodes[at : at + 1] = new


def replace_values(graph: Graph, others: Mapping[str, str]) -> Graph:
    """Return a graph without some nodes of one result each: result -> the value that takes its place."""
    graph = graph.copy()
    graph.nodes = [n.reading(others) for n in graph.nodes if n.output not in others]
    graph.outputs = [others.get(o, o) for o in graph.outputs]
    for value in others:
        del graph.values[value]
    return graph


def insert_behind(
    graph: Graph,
    value: str,
    op: str,
    constant: torch.Tensor,
    readers: Iterable[Node],
    *,
    names: tuple[str, str, str],
    **fields: Any,
) -> str:
    """Insert op(value, constant) right behind the producer of a value; return the result.

    Args:
        readers: the nodes that shall read the result instead of the value.
        names: wanted names of the result, the constant and the node.
        fields: others of the node.
    """
    result, weight = (new_name(graph, wanted) for wanted in names[:2])
    graph.values[result] = replace(graph.values[value], name=result)
    graph.weights[weight] = constant.to(torch.float32)
    producer = graph.producers()[value]
    replace_node(graph, producer, producer, Node(new_name(graph, names[2]), op, (value, weight), (result,), **fields))
    for reader in readers:
        now = graph.node(reader.name)
        replace_node(graph, now, now.reading({value: result}))
    return result


def drop_dead(graph: Graph) -> None:
    """Remove the nodes that no output depends on, with their values."""
    live = live_values(graph)
    for o in (o for n in graph.nodes if live.isdisjoint(n.outputs) for o in n.outputs):
        graph.values.pop(o, None)
    graph.nodes = [n for n in graph.nodes if not live.isdisjoint(n.outputs)]


def live_values(graph: Graph) -> set[str]:
    """Return the values and weights that an output depends on."""
    live = set(graph.outputs)
    for n in reversed(graph.nodes):
        if live.intersection(n.outputs):
            live.update(i for i in n.inputs if i is not None)
    return live


def with_weights_of(graph: Graph, captured: Graph) -> Graph:
    """Return a graph whose unchanged weights have the memory format of `captured`, without layers that nothing reads.

    Batch norms that were folded are kept.
    """
    graph, read = graph.copy(), {i for n in graph.nodes for i in n.inputs} | set(graph.outputs)
    for f in graph.folds.values():
        read |= {f.bias, f.gamma, f.beta, f.mean, f.var}
    layers = {name.rpartition(".")[0] for name in graph.weights.keys() & read}
    copies: dict[int, torch.Tensor] = {}  # tied names stay tied
    for name, w in tuple(graph.weights.items()):
        if name.rpartition(".")[0] not in layers:
            del graph.weights[name]
        elif (own := captured.weights.get(name)) is not None and torch.equal(own, w):
            graph.weights[name] = copies.setdefault(id(own), own.detach().clone(memory_format=torch.preserve_format))
    return graph
