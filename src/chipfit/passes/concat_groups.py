"""Tensors that a concatenation joins, for grids that they should share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chipfit.graph.ir import Graph

if TYPE_CHECKING:
    from chipfit.decide.formats import Assignment


def concat_groups(graph: Graph, assignment: Assignment) -> list[list[str]]:
    """For each concatenation, its result and then its inputs, as far as they are stored in the result's format.

    With the result's threshold on all of them the concatenation moves codes and rounds nothing. Lists come in
    execution order: of nested concatenations the inner one first.
    """
    out = []
    for n in graph.nodes:
        if n.op == "Concat" and n.output in assignment.slots:
            wanted = assignment.slots[n.output].format_name
            inputs = [
                i
                for i in dict.fromkeys(n.inputs)
                if i in assignment.slots and assignment.slots[i].format_name == wanted
            ]
            if inputs:
                out.append([n.output, *(i for i in inputs if i is not None)])
    return out
