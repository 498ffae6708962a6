"""Bias correction: the mean error of the outputs that rounded weights cause is subtracted from the bias."""

from collections.abc import Container, Iterator, Mapping, Sequence

import torch

from chipfit.calibration.collect import Need, TensorStats, with_channel_stats
from chipfit.engine.kernels import execute
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import bias_or_zero, channel_axis, is_linear, with_bias
from chipfit.plan.record import Plan
from chipfit.quantizers.rounding import ROUNDINGS
from chipfit.registry import Setting, register


def with_means(graph: Graph, needs: Mapping[str, Need]) -> dict[str, Need]:
    """Return `needs` with the mean of each input channel of a linear operator."""
    readers = (n for n in graph.nodes if is_linear(graph, n) and not graph.is_weight(n.data))
    return with_channel_stats(needs, {n.data: channel_axis(n) for n in readers})


_DOES = "biases lose the mean error of rounded weights. None: where samples gain by it, and by measured mean errors"
_SETTING = Setting("correct_bias", None, _DOES, choices=(True, False))
_NEEDS = ("stats", "changed")


@register(
    "correction", "bias", stage="correct", after=("second_moment",), needs=_NEEDS, collects=with_means, setting=_SETTING
)
def correct_bias(
    graph: Graph, plan: Plan, stats: Mapping[str, TensorStats], *, changed: Container[str] = ()
) -> tuple[Graph, list[str]]:
    """Compute b' = b - mean over positions of (Q(W) - W) * E[x], for every linear operator with quantized weights.

    The outputs then have their mean in float. Groups, transposed convolutions and zero padding count.

    Args:
        stats: with means, as collected for `with_means`.
        changed: nodes whose weights, and with them the means of outputs, were corrected before.

    Returns:
        The graph with new biases, and one note per correction or refusal. The plan stays valid.

    Source: Nagel et al. 2019, arXiv:1906.04721, section 4.2.
    """
    graph, notes = graph.copy(), []
    for node, why in quantized_linear(graph, plan):
        if node.name in changed:
            continue
        mean = stats[node.data].mean if node.data in stats else None
        if why or mean is None:
            why = why or "the mean of its input was not collected"
            notes.append(f"the bias of '{node.display_name}' is not corrected: {why}")
            continue
        w = graph.weights[node.weight].detach()
        error = mean_output(node, plan[node.weight].round(w) - w, mean, spatial(graph, node))
        notes.append(move_bias(graph, plan, node, -error))
    return graph, notes


def quantized_linear(graph: Graph, plan: Plan, *, sized: bool = True) -> Iterator[tuple[Node, str]]:
    """Yield the linear operators with quantized weights, and why the bias of each cannot change ("" if it can).

    Args:
        sized: the change depends on the size of the input, which must be known then.
    """
    users = graph.users()
    for node in list(graph.nodes):
        raw = not is_linear(graph, node) or (node.weight, node.name) in plan.float_edges
        if raw or not plan.quantized(node.weight):
            continue
        bias, size = node.bias, spatial(graph, node)
        why = "" if bias else "it has none"
        if bias and len(users[bias]) > 1:
            why = f"'{bias}' is read by several operators"
        if sized and None in size:
            why = "the size of its input is not known"
        yield node, why


def spatial(graph: Graph, node: Node) -> tuple[int | None, ...]:
    """Return the spatial size of the input of a linear operator; () for Linear."""
    return () if node.facts.kind == "linear" else tuple(graph.shape(node.data))[2:]


def move_bias(graph: Graph, plan: Plan, node: Node, by: torch.Tensor) -> str:
    """Add `by` [O] to the bias of `node` in `graph` unless the sum exceeds its grid; returns a note."""
    moved = bias_or_zero(graph, node) + by
    stored = plan.stored(node.bias)
    if stored is not None:
        codes, grid = ROUNDINGS[stored.grid.rounding](moved / stored.scale) + stored.zero_point, stored.grid
        if bool(((codes < grid.qmin) | (codes > grid.qmax)).any()):
            return f"the bias of '{node.display_name}' is not corrected: the sum exceeds its {grid.bits}-bit grid"
    with_bias(graph, node, moved)
    return f"corrected the bias of '{node.display_name}' by at most {float(by.abs().max()):.3g}"


def mean_output(node: Node, w: torch.Tensor, mean: torch.Tensor, spatial: Sequence[int | None]) -> torch.Tensor:
    """Return the mean over all positions of the outputs of `node` with weight `w` and no bias, for inputs of this mean.

    The operator runs on an image that is `mean` everywhere, so that zero padding counts.

    Args:
        mean: of each input channel, [I].
        spatial: size of the input along its spatial axes; empty for Linear.

    Returns:
        [O], float64.
    """
    w, mean = w.detach().double(), mean.double()
    if node.facts.kind == "linear":
        return execute(node, [mean, w])[0]
    constant = mean.view(1, -1, *[1] * len(spatial)).expand(1, -1, *(s or 0 for s in spatial))
    (y,) = execute(node, [constant, w])
    return y.mean((0, *range(2, y.dim())))
