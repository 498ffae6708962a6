"""Which quantizer rounds which tensor of a simulation; the same for every framework."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.stored import Stored


@dataclass(slots=True)
class Rounding:
    """The quantizers that a simulation needs."""

    #: quantized tensor -> the one whose quantizer it has: itself, one that it is tied to, or one whose numbers it moves
    owner: dict[str, str] = field(default_factory=dict)
    #: tensors that pass through their quantizer; the other quantized ones hold rounded numbers already
    rounded: set[str] = field(default_factory=set)
    #: bias -> (input, weight) whose scales multiply to its own
    products: dict[str, tuple[str, str]] = field(default_factory=dict)


def rounding(graph: Graph, plan: Plan) -> Rounding:
    """Share quantizers where tensors are tied, and leave out those that would round rounded numbers again."""
    out = Rounding()
    tied = {name: k for k, group in enumerate(plan.ties) for name in group}
    owners: dict[int, list[str]] = {}  # tie -> its tensors with a quantizer of their own
    sharing: dict[str, list[str]] = {}  # owner -> the tensors that its quantizer rounds
    for name, t in plan.tensors.items():
        if t.stored is not None and t.role != "bias":
            alike = owners.setdefault(tied[name], []) if name in tied else []
            owner = next((o for o in alike if plan[o].same_numbers(t.stored)), name)
            alike += [name] * (owner == name)
            out.owner[name] = owner
            out.rounded.add(name)
            sharing.setdefault(owner, []).append(name)
    for n in graph.nodes:
        _skip_moved(out, sharing, graph, plan, n)
    for n in graph.nodes:
        x, w, b = (n.operand(slot) for slot in ("in0", "w", "b"))
        bias = plan.stored(b)
        if b is not None and bias is not None and plan.tensors[b].role == "bias" and b not in out.owner:
            if x is not None and w is not None and _is_product(bias, plan.stored(x), plan.stored(w)):
                out.products[b] = x, w
            out.owner[b] = b
            out.rounded.add(b)
    return out


def _skip_moved(out: Rounding, sharing: dict[str, list[str]], graph: Graph, plan: Plan, n: Node) -> None:
    """Let results that only move rounded numbers share the quantizer of their source and not round again."""
    if n.op not in OPS or not OPS[n.op].moves:
        return
    data = [i for i in n.inputs if i is not None and graph.is_float(i)]
    owners = {out.owner.get(i) for i in data}
    if len(owners) != 1 or None in owners or any((i, n.name) in plan.float_edges for i in data):
        return
    for o in n.outputs:
        if o in out.owner and plan[o].same_numbers(plan[data[0]]):
            mine, theirs = out.owner[o], out.owner[data[0]]
            if mine != theirs:
                moved = sharing.pop(mine)
                out.owner.update(dict.fromkeys(moved, theirs))
                sharing[theirs] += moved
            out.rounded.discard(o)


def _is_product(bias: Stored, x: Stored | None, w: Stored | None) -> bool:
    """The bias is stored at s_in * s_w with zero point 0."""
    if x is None or w is None or x.scale.dim():
        return False
    scale = x.scale * w.scale
    fits = scale.dim() <= bias.scale.dim() and bool((bias.zero_point == 0).all())
    return fits and torch.equal(scale.expand_as(bias.scale), bias.scale)


def retrained(t: TensorPlan, scale: torch.Tensor) -> TensorPlan:
    """A quantized tensor with the scale that training gave it; the same record where it keeps the old one.

    Raises:
        PlanError: it is not positive.
    """
    if t.stored is None:
        return t
    old = t.stored.scale
    scale = scale.detach().to(device=old.device, dtype=old.dtype).expand_as(old).clone()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise PlanError(
            f"Training left '{t.name}' without a positive scale",
            where=t.layer,
            got=float(scale.min()),
            hint="lower the learning rate of the scales, or keep this one frozen",
        )
    return t if torch.equal(scale, old) else t.with_(scale=scale, origin=f"{t.origin}, trained")
