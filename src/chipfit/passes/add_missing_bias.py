"""Add a bias of zeros to linear operators without one, which corrections then change."""

from chipfit.graph.ir import Graph
from chipfit.graph.linear import bias_or_zero, is_linear, with_bias
from chipfit.passes.rewriting import Rewritten
from chipfit.platform.match import resolve_node
from chipfit.platform.schema import Platform
from chipfit.registry import register


@register("pass", "add_missing_bias", stage="rewrite", after=("equalize",), needs=("platform",), if_any_in="correct")
def add_missing_bias(graph: Graph, platform: Platform) -> Rewritten:
    """Add a zero bias to the linear operators without one, if the platform stores biases for them."""
    graph, notes = graph.copy(), list[str]()
    for k, node in enumerate(graph.nodes):
        if not is_linear(graph, node) or node.bias:
            continue
        options = resolve_node(platform, graph, node).options
        if options and options[0].b not in (None, "none"):
            graph.nodes[k] = with_bias(graph, node, bias_or_zero(graph, node))
        elif options:
            notes.append(f"'{node.display_name}' gets no bias: '{platform.name}' has none for {node.op}")
    return Rewritten(graph, notes)
