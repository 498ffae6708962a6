"""Assignment of quantizers to the tensors of a trainable simulation, for every framework."""

from dataclasses import dataclass, field, replace

import torch

from chipfit.errors import TrainingError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid, in_16_bits
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored, scales_per_output


@dataclass(slots=True)
class QuantizerSharing:
    """The quantizers of a simulation, and the tensors that share them."""

    #: quantized tensor -> the one whose quantizer it uses: itself, a tied one, or the input of a pass-through operator
    owner: dict[str, str] = field(default_factory=dict)
    #: tensors to which their quantizer is applied; the other quantized tensors hold quantized values already
    rounded: set[str] = field(default_factory=set)
    #: bias -> (input, weight) whose scales multiply to its own
    products: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: owners whose scale and zero point the platform dictates, and owners whose zero point alone it dictates
    fixed: set[str] = field(default_factory=set)
    zeros: set[str] = field(default_factory=set)
    #: the plan's bounds on scales, in terms of owners, and its bounds on sums of quantized weights
    limits: list[ScaleBound] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)

    def start(self, plan: Plan, owner: str) -> Stored:
        """Return the initial quantization parameters from the plan; a dictated zero point is fixed in the grid."""
        stored = plan[owner]
        if owner not in self.zeros:
            return stored
        return stored.with_(grid=replace(stored.grid, zero=int(stored.zero_point.reshape(-1)[0])))


def share_quantizers(graph: Graph, plan: Plan) -> QuantizerSharing:
    """Share quantizers among tied tensors, and leave out those that would quantize quantized values again."""
    out = QuantizerSharing()
    tied = {name: k for k, group in enumerate(plan.ties) for name in group}
    owners: dict[int, list[str]] = {}  # tie -> its tensors with quantizers of their own
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
    out.fixed, out.zeros = ({out.owner[t] for t in names if t in out.owner} for names in (plan.fixed, plan.zeros))
    out.sums = {out.owner[t]: most for t, most in plan.sums if t in out.owner}
    for limit in plan.limits:
        exponents: dict[str, int] = {}
        for member, e in limit.terms:
            owner = out.owner.get(member, member)
            exponents[owner] = exponents.get(owner, 0) + e
        if any(exponents.values()):
            out.limits.append(replace(limit, terms=tuple((t, e) for t, e in exponents.items() if e)))
    return out


def _skip_moved(out: QuantizerSharing, sharing: dict[str, list[str]], graph: Graph, plan: Plan, n: Node) -> None:
    """Let results that only move rounded numbers share the quantizer of their source and not round again."""
    if not n.facts.moves:
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
    """Check that a bias is stored with scale s_in * s_w and zero point 0."""
    if x is None or w is None or x.scale.dim():
        return False
    scale = scales_per_output(x.scale * w.scale, bias.scale.numel())
    fits = scale.dim() <= bias.scale.dim() and bool((bias.zero_point == 0).all())
    return fits and torch.equal(scale.expand_as(bias.scale), bias.scale)


def with_trained_numbers(
    t: TensorPlan, scale: torch.Tensor, zero_point: torch.Tensor | None = None, grid: Grid | None = None
) -> TensorPlan:
    """Return a quantized tensor with trained scale and zero point; the record itself if they did not change.

    Args:
        scale, zero_point: [] or the shape in the plan; None keeps the zero point.
        grid: the grid of training, if it differs.

    Raises:
        TrainingError: the scale is not positive, or the zero point is not on the grid.
    """
    if t.stored is None:
        return t
    old = t.stored
    scale = scale.detach().to(device=old.scale.device, dtype=old.scale.dtype).expand_as(old.scale).clone()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        got = float(scale.min())
        hint = "lower the learning rate of the scales, or keep this one frozen"
        raise TrainingError(f"The trained scale of '{t.name}' must be positive", where=t.layer, got=got, hint=hint)
    scale = in_16_bits(scale) if old.grid.short_scale else scale
    zero = old.zero_point
    if zero_point is not None:
        zero = zero_point.detach().to(zero.device).round().to(zero.dtype).expand_as(zero).clone()
    new = old.with_(scale=scale, zero_point=zero, grid=replace(grid or old.grid, zero=old.grid.zero))
    return t if new.same_numbers(old) else t.with_(stored=new, origin=f"{t.origin}, trained")
