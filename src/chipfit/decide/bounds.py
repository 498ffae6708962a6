"""What training may not do to a plan's numbers, as data: the platform's rules over the tensors that are stored."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chipfit.decide.constraints import Constraint, dictated_qparams
from chipfit.decide.legality import product_bounds
from chipfit.graph.ir import Graph
from chipfit.graph.ops import OPS
from chipfit.plan.record import TensorPlan
from chipfit.quantizers.scale_bounds import ScaleBound


def plan_limits(graph: Graph, constraints: Sequence[Constraint], tensors: Mapping[str, TensorPlan]) -> dict[str, Any]:
    """`limits`, `fixed`, `zeros` and `sums` of a Plan; biases follow from other tensors and are in none.

    Weights whose codes cannot add up to too much are left out of `sums`.
    """
    grids = {t.name: t.stored.grid for t in tensors.values() if t.stored is not None and t.role != "bias"}
    found = [
        ScaleBound(op=r.op, terms=r.terms, low=r.low, high=r.high)
        for r in product_bounds(constraints, grids)
        if r.terms
    ]
    for t, grid in grids.items():
        if grid.scale_min:
            found.append(ScaleBound(op=tensors[t].op, terms=((t, 1),), low=math.log2(np.float32(grid.scale_min))))
    every = [(b, r) for b in constraints for r in b.rules if r.hard]
    sums: dict[str, float] = {}
    for b, r in every:
        for t in b.of("w") if r.wsum_max else ():
            shape, most = graph.shape(t), float(r.wsum_max or 0)
            count = math.prod(int(n or 1) for n in shape) // int(shape[OPS[b.op].weight_axis] or 1)
            if t in grids and count * max(-grids[t].qmin, grids[t].qmax) > most:
                sums[t] = min(most, sums.get(t, most))
    return {
        "limits": tuple(dict.fromkeys(x for x in found if math.isfinite(x.low) or math.isfinite(x.high))),
        "fixed": tuple(sorted(t for t in dictated_qparams(constraints) if t in grids)),
        "zeros": tuple(sorted({t for b, r in every if r.zero for t in b.of(r.zero) if t in grids})),
        "sums": tuple(sums.items()),
    }
