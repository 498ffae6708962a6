"""The table of a curve over all integers of its operand, as kernels look it up."""

import torch

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Node
from chipfit.quantizers.stored import Stored


def table_of(node: Node, x: Stored, y: Stored) -> torch.Tensor:
    """Return the integers of a curve's result for all integers of its operand, the least first; int64 [levels].

    The curve is computed in float64. Where it has no value, such as a logarithm below 0, the result is 0.
    """
    reals = x.dequantize(torch.arange(x.grid.qmin, x.grid.qmax + 1)).double()
    (results,) = execute(node, [reals])
    return y.quantize(results.nan_to_num(nan=0.0).float()).long()
