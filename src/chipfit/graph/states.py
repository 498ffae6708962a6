"""The states of recurrent layers: those of a network of one step, and those that a layer keeps to itself."""

import json

from chipfit.graph.ir import Graph, Node


def state_pairs(graph: Graph) -> list[tuple[str, str]]:
    """Return the states of a network of one step: (input, the output that is its next value)."""
    spec = json.loads(graph.in_spec) if graph.in_spec else {}
    return [(graph.inputs[i], graph.outputs[o]) for i, o in spec.get("states", ())]


def keeps_states(graph: Graph, node: Node) -> bool:
    """Check whether a kernel that keeps the states of a recurrent layer from step to step can compute it.

    Its weights are constants, with one bias, and no step is masked; the states start from zeros, or are those of a
    network of one step; nothing else reads the cell state of an LSTM.
    """
    given, cell = [node.operand(k) for k in ("h", "c")], node.outputs[-1]
    constant = all(graph.is_weight(i) for i in node.inputs[1:4] if i is not None)
    if not constant or any(node.operand(k) is not None for k in ("rb", "mask", "lengths")):
        return False
    if any(cell in n.inputs for n in graph.nodes):
        return False
    if not any(given):
        return cell not in graph.outputs
    pairs, users = state_pairs(graph), graph.users()
    after = zip(given, node.outputs[-2:], strict=True)
    alone = all(before is not None and len(users[before]) == 1 for before in given)
    return alone and graph.outputs.count(cell) == 1 and all(pair in pairs for pair in after)
