"""Duplicate biases that several operators share: the int32 scale of each copy is s_in * s_w of its reader."""

from chipfit.graph.edit import new_name
from chipfit.graph.ir import Graph
from chipfit.graph.linear import LINEAR
from chipfit.passes.rewriting import Rewritten
from chipfit.registry import register


@register("pass", "duplicate_shared_biases", stage="rewrite", after=("fold_affine",))
def duplicate_shared_biases(graph: Graph) -> Rewritten:
    """Give every reader of a shared bias after the first a copy of its own (`name_1`, `name_2`, ...).

    A shared stored bias would force the inputs of all its readers to one common scale. What reads it as another operand
    than a bias, such as an addend, needs another type of integers.
    """
    graph, notes = graph.copy(), list[str]()
    copies: dict[str, int] = {}  # of each bias
    for index, node in enumerate(graph.nodes):
        bias = node.bias if node.op in LINEAR and graph.is_weight(node.weight) else None
        if bias is None or not graph.is_weight(bias):
            continue
        count = copies[bias] = copies.get(bias, -1) + 1
        if count:
            name = new_name(graph, f"{bias}_{count}")
            graph.weights[name] = graph.weights[bias].clone()
            if bias in graph.trainable:
                graph.trainable.add(name)
            graph.nodes[index] = node.with_(inputs=(*node.inputs[:2], name))
            notes.append(f"bias '{bias}' is used again by '{node.name}', which now reads its own copy '{name}'")
    notes += _duplicate_operands(graph, {*copies})
    return Rewritten(graph, notes)


def _duplicate_operands(graph: Graph, biases: set[str]) -> list[str]:
    """Give readers that take a bias for something else, such as an addend, one copy of it; return notes."""
    copies, notes = dict[str, str](), list[str]()
    for index, node in enumerate(graph.nodes):
        slot = 2 if node.op in LINEAR else None
        for k, i in enumerate(node.inputs):
            if i not in biases or k == slot:
                continue
            if i not in copies:
                copies[i] = new_name(graph, f"{i}_operand")
                graph.weights[copies[i]] = graph.weights[i].clone()
                graph.trainable |= {copies[i]} if i in graph.trainable else set()
            node = node.with_(inputs=(*node.inputs[:k], copies[i], *node.inputs[k + 1 :]))
            graph.nodes[index] = node
            notes.append(f"bias '{i}' is an operand of '{node.name}' too, which now reads its own copy '{copies[i]}'")
    return notes
