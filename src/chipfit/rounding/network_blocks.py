"""Partition of a network into layers, blocks or one whole, for reconstruction part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear

SCOPES = ("layer", "block", "network")
#: linear operators in a chain without a branch that make a block
IN_A_ROW = 3


class Block(NamedTuple):
    """Nodes `first` to `last - 1`, the values that they read, and the values that later nodes read of them."""

    first: int
    last: int
    inputs: list[str]
    outputs: list[str]

    def subgraph(self, graph: Graph, more: list[str]) -> Graph:
        """Return these nodes as a network, with `more` outputs."""
        outputs = [*dict.fromkeys([*self.outputs, *more])]
        return replace(graph, nodes=graph.nodes[self.first : self.last], inputs=self.inputs, outputs=outputs)


def network_blocks(graph: Graph, scope: str) -> Iterator[Block]:
    """Yield the parts of a network in execution order.

    Args:
        scope: "layer": a linear operator and the nodes up to the next one. "block": the nodes between two values that
            alone connect the network before and behind, as around residual branches; without a branch, up to three
            linear operators. "network": all nodes.
    """
    heads = [k for k, n in enumerate(graph.nodes) if is_linear(graph, n)]
    cuts = {"layer": heads[1:], "block": _block_starts(graph, heads), "network": []}[scope]
    made = {o: k for k, n in enumerate(graph.nodes) for o in n.outputs}
    used = _last_used(graph)
    for first, last in zip([0, *cuts], [*cuts, len(graph.nodes)], strict=True):
        nodes = graph.nodes[first:last]
        inputs = dict.fromkeys(i for n in nodes for i in n.inputs if i is not None and not graph.is_weight(i))
        outputs = [o for n in nodes for o in n.outputs if used.get(o, -1) >= last or o in graph.outputs]
        yield Block(first, last, [i for i in inputs if made.get(i, -1) < first], outputs)


def _last_used(graph: Graph) -> dict[str, int]:
    return {i: k for k, n in enumerate(graph.nodes) for i in n.inputs if i is not None}


def _block_starts(graph: Graph, heads: list[int]) -> list[int]:
    """Return the index of the first node of each block but the first."""
    used, alive = _last_used(graph), {i for i in graph.inputs if graph.is_float(i)}
    pieces: list[tuple[int, int]] = []  # begin, linear operators in it
    for k, node in enumerate(graph.nodes):
        alive = {v for v in alive if used.get(v, -1) >= k}
        if k == 0 or len(alive) == 1:
            pieces.append((k, 0))
        pieces[-1] = pieces[-1][0], pieces[-1][1] + (k in heads)
        alive |= {o for o in node.outputs if graph.is_float(o)}
    cuts, row = [], 0
    for begin, linear in pieces:
        if linear and row and (linear > 1 or row + 1 > IN_A_ROW):
            cuts.append(begin)
            row = 0
        row += IN_A_ROW if linear > 1 else linear
    return cuts
