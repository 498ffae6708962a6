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


def needed(graph: onnx.GraphProto) -> set[str]:
    """Return the names that the outputs of a graph depend on, whose nodes may stand in any order."""
    makers = {o: k for k, n in enumerate(graph.node) for o in n.output if o}
    found, done, left = set[str](), set[int](), [o.name for o in graph.output]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            maker = makers.get(name)
            if maker is not None and maker not in done:
                done.add(maker)
                left += reads_of(graph.node[maker])
    return found


def without_unread(model: onnx.ModelProto, copy: bool) -> onnx.ModelProto:
    """Return a model with the nodes and initialisers that its outputs need, and the inputs that a caller gives.

    Those are tensors; of files before version 4 of the format, initialisers are inputs, too.

    Args:
        copy: leave `model` as it is.
    """
    read = needed(model.graph)
    dead = [k for k, n in enumerate(model.graph.node) if read.isdisjoint(n.output)]
    unread = [k for k, w in enumerate(model.graph.initializer) if w.name not in read]
    gone_weights = {model.graph.initializer[k].name for k in unread}
    unread_inputs = [(k, v) for k, v in enumerate(model.graph.input) if v.name not in read]
    odd = [k for k, v in unread_inputs if v.name in gone_weights or not v.type.HasField("tensor_type")]
    if not (dead or unread or odd):
        return model
    if copy:
        model, given = onnx.ModelProto(), model
        model.CopyFrom(given)
    for held, gone in ((model.graph.node, dead), (model.graph.initializer, unread), (model.graph.input, odd)):
        for k in reversed(gone):
            del held[k]
    return model
