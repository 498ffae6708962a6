"""Let linear layers read images as they lie in memory, instead of transposing them in front of each flattening.

With channels last, flatten(transpose(x)) is a permutation of flatten(x). The columns of the weights behind it take that
permutation, so that sums of integers stay the same, as they have the same terms.
"""

import math

from chipfit.graph.edit import drop_dead, replace_node
from chipfit.graph.ir import Graph, Node, Users
from chipfit.passes.layout import LayoutChange
from chipfit.plan.record import Plan

#: tensor whose last axis is a flattened image, channels last -> sizes of its axes with channels first
Images = dict[str, tuple[int, ...]]


def read_in_memory_order(new: LayoutChange, plan: Plan) -> Images:
    """Remove transpositions in front of flattenings that only linear layers in integers read.

    Args:
        new: a graph with channels last, which is changed.

    Returns:
        The flattened images and the weights that read them.
    """
    graph, images = new.graph, Images()
    users, shapes = graph.users(), {w: tuple(t.shape) for w, t in graph.weights.items()}
    turned = [n for n in graph.nodes if n.op == "Transpose" and n.output in new.copies and _to_channels_first(graph, n)]
    for transpose in turned:
        sizes = graph.shape(transpose.output)[1:]
        for flatten in users.get(transpose.output, []):
            read = users.get(flatten.output, [])
            if not _flattens(graph, flatten) or not all(
                _takes_any_order(graph, plan, users, n, flatten.output) for n in read
            ):
                continue
            images[flatten.output] = image = tuple(s or 0 for s in sizes)
            replace_node(graph, flatten, flatten.with_(inputs=(transpose.data, *flatten.inputs[1:])))
            for weight in {n.weight for n in read}:
                images[weight] = image
                columns = graph.weights[weight].reshape(-1, image[0], math.prod(image[1:]))
                graph.weights[weight] = columns.transpose(1, 2).reshape(shapes[weight]).contiguous()
    drop_dead(graph)
    return images


def _to_channels_first(graph: Graph, n: Node) -> bool:
    rank, (_, *sizes) = len(graph.shape(n.output)), graph.shape(n.output)
    return tuple(n.attrs["perm"]) == (0, rank - 1, *range(1, rank - 1)) and None not in sizes


def _flattens(graph: Graph, n: Node) -> bool:
    """Return whether a node makes one axis of all but the first, for operators alone."""
    (batch, *sizes), result = graph.shape(n.data), graph.shape(n.output)
    merged = result == (batch, math.prod(s or 0 for s in sizes))
    return n.op == "Reshape" and merged and n.output not in graph.outputs


def _takes_any_order(graph: Graph, plan: Plan, users: Users, n: Node, value: str) -> bool:
    """Return whether a node multiplies integers of a value by a constant weight that only it reads."""
    if n.facts.kind != "linear" or n.data != value or n.inputs.count(value) != 1 or n.weight not in graph.weights:
        return False
    stored = plan.stored(n.weight)
    if stored is None or not plan.quantized(value) or stored.grid.per == "block" or stored.grid.pair_limit is not None:
        return False
    raw = {(i, n.name) for i in n.inputs} & plan.float_edges
    return not raw and len(users[n.weight]) == 1 and n.weight not in graph.outputs
