"""Read the state after the last step from the recurrent layer, not from the states of all steps."""

from chipfit.graph.edit import replace_values
from chipfit.graph.ir import Graph, Node
from chipfit.passes.rewriting import Rewritten
from chipfit.registry import register


@register("pass", "last_steps", stage="rewrite")
def last_steps(graph: Graph) -> Rewritten:
    """Replace y[:, -1], or y[:, 0] of a layer that runs backwards, by the layer's last state."""
    made = {n.outputs[0]: n for n in graph.nodes if n.facts.recurrent and len(graph.shape(n.outputs[0])) == 3}
    taken = {n.output: made[n.data].outputs[1] for n in graph.nodes if _takes_last(graph, n, made)}
    if not taken:
        return Rewritten(graph, [])
    return Rewritten(replace_values(graph, taken), [])


def _takes_last(graph: Graph, n: Node, made: dict[str, Node]) -> bool:
    """Return whether a node selects the step that its recurrent layer computes last."""
    if n.op != "Select" or n.attrs["axis"] != 1 or n.data not in made:
        return False
    last = 0 if made[n.data].attrs["reverse"] else -1
    size = graph.shape(n.data)[1]
    places = {last} if size is None else {last % size, last % size - size}
    return n.attrs["index"] in places
