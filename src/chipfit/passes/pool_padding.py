"""Move padding into the max pools that read it: a pool pads with -inf, which no grid holds."""

from chipfit.graph.edit import drop_dead
from chipfit.graph.hidden_scores import ALWAYS_HIDES
from chipfit.graph.ir import Graph, Node
from chipfit.passes.rewriting import Rewritten
from chipfit.registry import register


@register("pass", "pool_padding", stage="rewrite")
def pool_padding(graph: Graph) -> Rewritten:
    """Replace max_pool(pad(x, -inf)) by a pool of x with more padding; numbers that no network computes are as -inf."""
    graph, producers, notes = graph.copy(), graph.producers(), list[str]()
    for k, n in enumerate(graph.nodes):
        pad = producers.get(n.data) if n.op == "MaxPool" else None
        if pad is not None and (padding := _padding(graph, pad, n)) is not None:
            graph.nodes[k] = n.with_(inputs=(pad.data,), attrs={**n.attrs, "padding": padding})
            notes.append(f"'{n.display_name}' pads as '{pad.display_name}' did")
    drop_dead(graph)
    return Rewritten(graph, notes)


def _padding(graph: Graph, pad: Node, pool: Node) -> tuple[tuple[int, int], ...] | None:
    """Return the padding of both; None unless -inf is added along spatial axes, less of it than the window is long."""
    if pad.op != "Pad" or pad.attrs["mode"] != "constant" or pad.attrs["value"] > ALWAYS_HIDES:
        return None
    ends = list(pad.attrs["padding"])
    others = [ends.pop(0), ends.pop(-1 if graph.data_format == "channels_last" else 0)]
    padding = tuple((a + c, b + d) for (a, b), (c, d) in zip(pool.attrs["padding"], ends, strict=True))
    within = all(end < k for pair, k in zip(padding, pool.attrs["kernel"], strict=True) for end in pair)
    positive = all(end >= 0 for pair in ends for end in pair) and not any(map(any, others))
    return padding if within and positive and not pool.attrs["ceil_mode"] else None
