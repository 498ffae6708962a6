"""Scales of biases: input scale x weight scale where the chip adds them in the accumulator, else a range alone."""

from collections.abc import Mapping

import torch

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import Constraint
from chipfit.decide.qparams import entry, stored_as
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import per_output
from chipfit.ranges import choose
from chipfit.ranges.qparams import QParams

#: an int32 bias leaves this much of the accumulator to the products
_SHARE = 0.5


def with_biases(
    graph: Graph, assignment: Assignment, grids: Mapping[str, Grid], tensors: Mapping[str, TensorPlan]
) -> dict[str, TensorPlan]:
    """All tensors with their biases, and with weight scales that leave room for them.

    A bias b at the scale s_in s_w has the code b / (s_in s_w), which its format holds up to qmax. Where that is too
    small for a channel, its weight scale grows: s_w >= |b| / (s_in qmax / 2). Every weight scale is final before any
    bias is stored, because operators with biases of their own may share a weight. Weights in blocks have no such
    scale: their sums are added up block by block, and the bias, with a range of its own, to the total.

    Args:
        tensors: activations and weights.
    """
    plan = Plan(tensors=dict(tensors))
    nodes = {n.name: n for n in graph.nodes}
    stored = [(b, name, _in_accumulator(b, plan, grids[name])) for b in assignment.constraints for name in b.of("b")]
    for b, name, accumulated in stored:
        if accumulated:
            _make_room(plan, b, graph.weights[name].detach(), grids[name])
    for b, name, accumulated in stored:
        slot, values = assignment.tensors[name], graph.weights[name].detach()
        if accumulated:
            [x], [w] = b.of("in0"), b.of("w")
            scale = (plan[x].scale * plan[w].scale).to(torch.float32)
            if slot.axis is not None or scale.dim():
                scale = per_output(scale.reshape(-1), values.numel())
            q, origin = QParams(scale, torch.zeros_like(scale, dtype=torch.int32)), "input scale x weight scale"
        else:
            q, origin = choose(values, grids[name], rule="no_clipping", axis=slot.axis), "no_clipping over the bias"
        plan.tensors[name] = entry(slot, nodes.get(slot.node), stored_as(slot, grids[name], q), origin)
    return plan.tensors


def _in_accumulator(constraint: Constraint, plan: Plan, grid: Grid) -> bool:
    """The bias has the scale of the products.

    The platform says so by a rule for the product, or has none and the bias is wide enough to be added to the products.
    """
    if not {"in0", "w"} <= set(constraint.slots) or any(plan[w].grid.per == "block" for w in constraint.of("w")):
        return False
    products = [r for r in constraint.rules if r.scale_product is not None and "b" in r.scale_product and r.hard]
    return any(r.eq is not None for r in products) or (not products and grid.bits >= 16)


def _make_room(plan: Plan, constraint: Constraint, bias: torch.Tensor, grid: Grid) -> None:
    """Enlarge the weight scales under which some channel's bias would not fit its codes."""
    [x], [name] = constraint.of("in0"), constraint.of("w")
    s_in, w = plan[x].scale, plan[name]
    least = bias.abs() / (s_in * grid.qmax * _SHARE)  # [C_out]
    least = least.view(-1, w.scale.numel()).amax(0).view(w.scale.shape)
    if w.grid.pot:
        least = torch.exp2(torch.ceil(torch.log2(least)))
    if bool((w.scale < least).any()):
        old = plan.tensors[name]
        scale = torch.maximum(w.scale, least.to(torch.float32))
        plan.tensors[name] = old.with_(scale=scale, origin=old.origin + ", enlarged to store the bias")
