"""Give clipped activations a power of two as their upper bound: Relu6 becomes a clamp at 8."""

import math

from chipfit.graph.ir import Graph
from chipfit.graph.linear import bias_or_zero, is_linear, with_bias
from chipfit.passes.rewriting import Readers, Rewritten
from chipfit.registry import Repair, Setting, register

_SETTING = Setting("relu_bound", False, "clipped activations get a power of two as upper bound")


#: for scales that are powers of two
_REPAIR = Repair(True, lambda graph, assignment: any(s.format.scale == "pot" for s in assignment.tensors.values()))


@register("pass", "relu_bound", stage="rewrite", after=("collapse_residual",), setting=_SETTING, repair=_REPAIR)
def relu_bound(graph: Graph) -> Rewritten:
    """Scale linear -> clip(., low, high) -> linear by k = 2^ceil(log2 high) / high without changing the network.

    W1' = k W1, b1' = k b1, clip' = clip(., k low, k high), W2' = W2 / k: a power-of-two grid then ends at the clip.
    Every reader of the clipped value must lead to a linear operator through operators with f(k x) = k f(x).
    """
    graph, notes = graph.copy(), list[str]()
    for clip in list(graph.nodes):
        low, high = clip.clip_range or (None, None)
        if high is None or not 0 < high < math.inf or (low is not None and low > 0):
            continue
        bound = 2.0 ** math.ceil(math.log2(high) - 1e-9)
        if math.isclose(bound, high):
            continue
        readers, before = Readers(graph), graph.producers().get(clip.data)
        found = readers.linear_behind(clip.output, lambda n: n.facts.homogeneous)
        if before is None or not is_linear(graph, before):
            why = "no linear operator with constant weights is in front of it"
        elif readers.only(before.output) is None:
            why = f"the result of '{before.display_name}' is also read elsewhere"
        else:
            why = found.refusal or readers.why_fixed(before, *found.ends)
        if why or before is None:
            notes.append(f"'{clip.display_name}' keeps its bound {high:g}: {why}")
            continue
        k = bound / high
        for n, factor in ((before, k), *((end, 1 / k) for end in found.ends)):
            graph.weights[n.weight] = graph.weights[n.weight].detach() * factor
        if before.bias:
            with_bias(graph, before, bias_or_zero(graph, before) * k)
        attrs = {"min": None if low is None else low * k, "max": bound}
        graph.nodes[graph.nodes.index(clip)] = clip.with_(op="Clamp", attrs=attrs)
        notes.append(f"the bound of '{clip.display_name}' moved from {high:g} to {bound:g}")
    return Rewritten(graph, notes)
