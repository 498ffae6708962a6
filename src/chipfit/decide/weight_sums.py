"""Weights whose codes add up to more than a chip's weight stage holds (`wsum_max`) get a larger scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from chipfit.decide.ties import Binding
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.graph.ops import OPS
from chipfit.quantizers.stored import Stored


def with_small_sums(
    graph: Graph, bindings: Iterable[Binding], stored: Mapping[str, Stored], *, final: bool = False
) -> dict[str, Stored]:
    """All tensors, those weights whose sum of |code| over one output channel is too large with larger scales.

    Raises:
        UnsupportedError: a sum is too large and scales are `final`: other rules have made it so again.
    """
    out = dict(stored)
    rules = [(b.op, r.wsum_max, b.of("w")) for b in bindings for r in b.rules if r.wsum_max and r.hard]
    for op, most, name in [(op, most, t) for op, most, names in rules for t in names if t in stored]:
        while True:
            w, axis = out[name], OPS[op].weight_axis
            sums = w.quantize(graph.weights[name].detach()).double().abs().transpose(0, axis).flatten(1).sum(1)  # [C]
            over = (sums if w.scale.dim() else sums.max()) / most
            if not bool((over > 1).any()):
                break
            if final:
                what = f"The codes of '{name}' add up to more than {most:g}, and other rules forbid a larger scale"
                raise UnsupportedError(what, got=f"{float(sums.max()):g}")
            larger = torch.exp2(torch.ceil(torch.log2(over))) if w.grid.pot else 1.01 * over
            out[name] = w.with_(scale=(w.scale * torch.where(over > 1, larger, 1)).to(w.scale.dtype))
    return out
