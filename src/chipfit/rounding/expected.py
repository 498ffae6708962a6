"""The signal-to-noise ratio of the outputs that the bits of a plan explain."""

from chipfit.graph.ir import DYNAMIC, Graph
from chipfit.plan.record import Plan
from chipfit.quantizers.noise import decibels
from chipfit.quantizers.stored import Stored

#: half range of a grid in standard deviations of well spread values
_SPREAD = 4.0


def expected_sqnr_db(graph: Graph, plan: Plan) -> float:
    """Return the signal over the quantization noise of the worst output [dB] if all tensors were well spread.

    A grid of n codes over +-4 deviations of a tensor makes noise of (8 / n)^2 / 12 of its power, up to four times that
    where scales are powers of two. Shares of independent errors add up along the longest path to an output. A ratio
    much below this is a sign of tensors that their grids do not fit, such as channels of unlike ranges.
    """
    shares = {v: _share(plan.stored(v)) for v in graph.inputs}
    for n in graph.nodes:
        reads = [shares[i] for i in n.inputs if i in shares]
        weights = sum(_share(plan.stored(i)) for i in n.inputs if i in graph.weights and i != n.bias)
        for o in n.outputs:
            shares[o] = max(reads, default=0.0) + weights + _share(plan.stored(o))
            if n.op == DYNAMIC:
                shares[o] += _share_of(n.attrs["qmax"] - n.attrs["qmin"] + 1)
    return decibels(1.0, max((shares[o] for o in graph.outputs if o in shares and graph.is_float(o)), default=0.0))


def _share(stored: Stored | None) -> float:
    """Return the noise of a well spread tensor as a share of its power."""
    if stored is None:
        return 0.0
    return _share_of(stored.grid.qmax - stored.grid.qmin + 1) * (4 if stored.grid.pot else 1)


def _share_of(codes: int) -> float:
    """Return the noise of a well spread tensor on a grid of so many codes, as a share of its power."""
    return (2 * _SPREAD / codes) ** 2 / 12
