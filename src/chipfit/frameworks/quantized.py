"""Parts that the readers of quantized files share."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid, all_codes
from chipfit.quantizers.stored import Stored

#: endings by which the files that are written here name copies of a tensor: numbered, transposed, in float
_COPY = re.compile(r"(_t\d+)?(/float)?(_t\d+)?(_\d+)?$")


def original_of(name: str) -> str:
    """Return the name of the tensor that a tensor of a file is a copy of; its own name if it is none."""
    return _COPY.sub("", name)


@dataclass(frozen=True)
class QuantizedFile:
    """The network of a quantized file."""

    graph: Graph  #: with channels first
    plan: Plan  #: formats, scales and zero points of the file
    content: bytes  #: a file that computes the same, whose tensors have the names of the graph
    given: bytes = b""  #: the file itself, where `content` is another network
    not_simulated: str = ""  #: why its integers are not compared with a simulation, if they are not
    runtime: str | None = None  #: the only runtime that has kernels for it, if not its platform's
    steps: Any = None  #: see `Framework.steps`


def stored_as(
    kind: str, scale: np.ndarray, zero: np.ndarray, axis: int | None, ends: tuple[int, int] | None = None
) -> Stored:
    """Return how a file stores a tensor.

    Args:
        kind: type of its integers, such as "int8".
        scale, zero: [], [C] along `axis`, or one for each block along it.
        ends: lowest and highest integer, if not those of the type; they may be twice as many.
    """
    bits, per = int(kind.lstrip("uint")), ("tensor", "channel", "block")[min(scale.ndim, 2)]
    low, high = ends or all_codes(bits, not kind.startswith("u"))
    bits += low < all_codes(bits, low < 0)[0] or high > all_codes(bits, low < 0)[1]
    grid = Grid(bits=bits, qmin=low, qmax=high, zero="any" if zero.any() else 0, per=per)  # type: ignore[arg-type]
    scales, zeros = (torch.from_numpy(np.array(p, t)) for p, t in ((scale, np.float32), (zero, np.int32)))
    return Stored(format=kind, grid=grid, scale=scales, zero_point=zeros, axis=axis if scale.ndim else None)


def dequantized(integers: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Return (q - z) s of integers, in the type of the scale; scale and zero point broadcast against them."""
    return np.asarray((integers.astype(np.int64) - zero).astype(scale.dtype) * scale)


def tie_moved(graph: Graph, new: list[Node], stored: dict[str, TensorPlan]) -> None:
    """Store moved numbers between the nodes of one operator as their operand or result is stored."""

    def tie(n: Node, a: str, b: str) -> None:
        if n.facts.moves and a in stored and b not in stored and b in graph.values and graph.is_float(b):
            stored[b] = stored[a].with_(name=b)

    known = [n for n in new if n.op in OPS]
    for n in reversed(known):  # behind a linear operator numbers are moved to the shape that the file has
        tie(n, n.output, n.data)
    for n in known:
        tie(n, n.data, n.output)
