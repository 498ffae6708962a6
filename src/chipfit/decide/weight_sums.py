"""Weights whose codes add up to more than a chip's weight stage holds (`wsum_max`) get a larger scale."""

from collections.abc import Iterable, Mapping

from chipfit.decide.constraints import Constraint
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.graph.ops import OPS
from chipfit.quantizers.scale_bounds import code_sums, enlargement
from chipfit.quantizers.stored import Stored


def limit_weight_sums(
    graph: Graph, constraints: Iterable[Constraint], stored: Mapping[str, Stored], *, final: bool = False
) -> dict[str, Stored]:
    """All tensors, those weights whose sum of |code| over one output channel is too large with larger scales.

    Raises:
        UnsupportedError: a sum is too large and scales are `final`: other rules have made it so again.
    """
    out = dict(stored)
    rules = [(b.op, r.wsum_max, b.of("w")) for b in constraints for r in b.rules if r.wsum_max and r.hard]
    for op, most, name in [(op, most, t) for op, most, names in rules for t in names if t in stored]:
        axis, values = OPS[op].weight_axis, graph.weights[name]
        while (factor := enlargement(out[name], values, most, axis)) is not None:
            if final:
                what = f"The codes of '{name}' add up to more than {most:g}, and other rules forbid a larger scale"
                raise UnsupportedError(what, got=f"{float(code_sums(out[name], values, axis).max()):g}")
            out[name] = out[name].with_(scale=(out[name].scale * factor).to(out[name].scale.dtype))
    return out
