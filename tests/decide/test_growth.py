"""Twice the nodes cost twice the work: nothing that decides walks over all nodes for each node."""

from collections.abc import Iterator

import pytest
from benchmarks.decide_time import KINDS, decide, network

from chipfit.decide.overrides import resolve_overrides
from chipfit.graph.ir import Node
from chipfit.platform.load import load


class Counted(list[Node]):
    """Nodes that count how many of them were looked at."""

    seen = 0

    def __iter__(self) -> Iterator[Node]:
        for node in super().__iter__():
            self.seen += 1
            yield node


def walks(nodes: int, kind: str) -> float:
    """How often all nodes of a network are walked over while it is decided."""
    graph = network(nodes, *KINDS[kind])
    graph.nodes = counted = Counted(graph.nodes)
    resolve_overrides(graph, {n.name: {"rule": "mse"} for n in list(graph.nodes)})
    decide(graph, load("tflite_int8"))
    return counted.seen / nodes


@pytest.mark.parametrize("kind", KINDS)
def test_deciding_walks_over_the_nodes_as_often_whatever_their_number(kind):
    assert walks(60, kind) == walks(120, kind) < 60
