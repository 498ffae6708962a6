"""Centre the range of logits around 0: softmax(x + c) = softmax(x)."""

from chipfit.decide.assignment import Assignment
from chipfit.graph.ir import Graph
from chipfit.graph.linear import bias_or_zero, is_linear, with_bias
from chipfit.passes.rewriting import Adapted, Readers, Stats
from chipfit.passes.shift_negative import step
from chipfit.registry import Setting, register

_SETTING = Setting("softmax_shift", False, "logits go to the middle of their range")


@register("pass", "softmax_shift", stage="adapt", after=("shift_negative",), setting=_SETTING)
def softmax_shift(graph: Graph, assignment: Assignment, stats: Stats) -> Adapted:
    """Subtract (min + max) / 2 of the logits from the bias in front of a softmax, if that makes their scale smaller.

    Args:
        graph, assignment, stats: as for `shift_negative`.

    Returns:
        The graph, the statistics with shifted logits, and one note per shift or refusal.
    """
    graph, stats, notes = graph.copy(), dict(stats), list[str]()
    readers, producers = Readers(graph), graph.producers()
    for softmax in graph.nodes:
        logits = softmax.data if softmax.facts.softmax else ""
        linear = producers.get(logits)
        if linear is None or not is_linear(graph, linear) or logits not in stats or logits not in assignment.tensors:
            continue
        seen, fmt = stats[logits], assignment.tensors[logits].format
        c = -(seen.low + seen.high) / 2
        before, after = step(fmt, seen.low, seen.high), step(fmt, seen.low + c, seen.high + c)
        if after > before * (1 - 1e-6):
            continue
        why = "its logits are also read elsewhere" if readers.only(logits) is None else readers.why_fixed(linear)
        if why:
            notes.append(f"the logits of '{linear.display_name}' are not shifted: {why}")
            continue
        graph.nodes[graph.nodes.index(linear)] = with_bias(graph, linear, bias_or_zero(graph, linear) + c)
        stats[logits] = seen.shifted(c)
        falls = f"their step falls from {before:.3g} to {after:.3g}"
        notes.append(f"shifted the logits of '{linear.display_name}' by {c:.4g}: {falls}")
    return Adapted(graph, stats, notes)
