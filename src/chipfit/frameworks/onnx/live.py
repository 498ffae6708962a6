"""The nodes of an ONNX graph that its outputs depend on."""

from collections.abc import Collection, Sequence

import onnx


def live_nodes(nodes: Sequence[onnx.NodeProto], outputs: Collection[str]) -> list[onnx.NodeProto]:
    """Return the nodes that an output depends on, in order."""
    live, kept = set(outputs), []
    for n in reversed(nodes):
        if live.intersection(n.output):
            live.update(reads_of(n))
            kept.append(n)
    return kept[::-1]


def reads_of(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node reads, those in the bodies of loops and branches included."""
    bodies = [g for a in node.attribute for g in (a.g, *a.graphs)]
    inner = (reads_of(n) for g in bodies for n in g.node)
    return {*node.input}.union(*inner, (o.name for g in bodies for o in g.output))
