"""What kernels that can do both hand over, codes or floats: the cheapest cut between what is best in each.

A network on a chip that computes some operators in float is islands of integers. Where the shore lies is free wherever
a kernel can hand over either: a linear layer may give its sums in float, an addition may run in float. Each value on
the shore is converted, which takes time, and each value in codes is rounded, which takes accuracy: an addition of two
residual streams in which one token is a hundred times the rest would round all others to nothing.

Costs are counted in conversions of one number. Both sides of a kernel, what it reads and what it hands over, have one
of two labels; a value is converted for readers that differ from its writer, once however many they are. The cheapest
labelling is a minimum cut [Picard, Ratliff: Minimum cuts and related problems, Networks 5, 1975], found exactly.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment
from chipfit.graph.ir import Graph
from chipfit.graph.linear import products
from chipfit.ranges import choose
from chipfit.registry import Setting, register

#: conversions that a value is worth whose rounding error has the variance of the value
_WORTH = 1000.0
#: share of the values, in the middle, whose variance is the signal: outliers are few, and what they drown is the rest
_BULK = 0.99
#: what a multiply-accumulate costs more in float than in 8 bits, in conversions (measured with ONNX Runtime on x86)
_PRODUCT = 1 / 64
#: what keeps a kernel in codes where both cost the same, of one conversion
_TIE = 1e-3
#: the largest capacity that is handed to the search of a flow, which adds them in 32 bits
_LARGEST = 1 << 20
_CODES, _FLOATS = 0, 1  #: the two ends of the cut
#: the sides of a value that is handed over in the other form, which are no sides of kernels
_CONVERTED = ("converted to codes", "converted to floats")

_SETTING = Setting(
    "results",
    None,
    "what kernels hand over that can do both, instead of what is cheapest and most exact",
    argument="asked",
    choices=("codes", "float"),
)


@register("pass", "islands", stage="results", options=(_SETTING,))
def float_regions(
    graph: Graph, assignment: Assignment, stats: dict[str, TensorStats], asked: str | None
) -> tuple[dict[str, str], list[str]]:
    """Choose for every kernel of `assignment.modes`.

    Args:
        asked: "codes" or "float", for all of them; None: whatever is best.

    Returns:
        First node of the kernel -> "codes", "float" or "whole", where it changes; a note that counts them.
    """
    if asked is not None:
        return {k: asked if asked in can else "whole" for k, can in assignment.modes.items()}, []
    head, found = _heads(assignment), _cut(graph, assignment, stats)
    now = {
        head.get(n.name, n.name): n.output in assignment.quantized_outputs for n in graph.nodes
    }  # in codes; the last one counts
    out = {k: label for k, label in found.items() if label != ("codes" if now[k] else "float")}
    floats = sum(label != "codes" for label in found.values())
    said = f"{floats} of {len(found)} kernels that can do both hand over floats"
    return out, [f"{said}: fewer conversions and less error; Settings(results=...) asks for either"]


def _heads(assignment: Assignment) -> dict[str, str]:
    """The first node of its kernel, for each node of a fused group."""
    return {name: group[0] for group in assignment.groups for name in group}


def _cut(graph: Graph, assignment: Assignment, stats: dict[str, TensorStats]) -> dict[str, str]:
    """The label of each kernel of `assignment.modes`."""
    head = _heads(assignment)
    made = {o: head.get(n.name, n.name) for n in graph.nodes for o in n.outputs}
    number: dict[tuple[str, str], int] = {}  # (kernel, side) whose label is open -> its node in the network of flows
    writes = {v: _CODES for v in graph.inputs if v in assignment.tensors}
    noises: dict[str, float] = {}  # of values; finding one takes a search, and a value may have several readers
    capacity: dict[tuple[int, int], float] = defaultdict(float)

    def side(kernel: str, which: str) -> int:
        """Where a kernel whose two sides differ in no state has one label for both."""
        which = which if "float" in assignment.modes.get(kernel, ()) else ""
        return number.setdefault((kernel, which), 2 + len(number))

    def edge(value: str, reader: int) -> None:
        writer, size = writes.get(value, _FLOATS), _size(graph, value)
        if writer != reader and max(writer, reader) > _FLOATS:  # between two that are fixed nothing is chosen
            if value not in noises:
                noises[value] = _WORTH * _noise(value, assignment, stats)
                to_codes, to_floats = (number.setdefault((value, how), 2 + len(number)) for how in _CONVERTED)
                capacity[to_codes, writer] += size
                capacity[writer, to_floats] += size
            to_codes, to_floats = (number[value, how] for how in _CONVERTED)
            capacity[reader, to_codes] = capacity[to_floats, reader] = math.inf  # once for all readers that want it
            noise = noises[value]
            capacity[writer, reader] += size * noise / 2
            capacity[reader, writer] += size * noise / 2
            for end in (writer, reader):  # codes at either end round the value
                if end > _FLOATS:
                    capacity[end, _FLOATS] += size * noise / 2

    for n in graph.nodes:
        kernel, plan = head.get(n.name, n.name), assignment.nodes[n.name]
        can = assignment.modes.get(kernel, ())
        moves = plan.exec == "follow"
        for value in dict.fromkeys(n.inputs):
            if value is None or value in graph.weights or not graph.is_float(value) or made.get(value) == kernel:
                continue
            reads = (
                plan.exec != "float" and value in assignment.tensors and (value, n.name) not in assignment.float_edges
            )
            edge(value, side(kernel, "reads") if moves or "whole" in can else _CODES if reads else _FLOATS)
        for value in n.outputs:
            label = _CODES if value in assignment.quantized_outputs else _FLOATS
            writes[value] = label = side(kernel, "writes") if can or moves else label
            if label > _FLOATS:
                capacity[_CODES, label] += _TIE * _size(graph, value)
        if n.name == kernel and {"float", "whole"} <= {*can}:
            capacity[_CODES, side(kernel, "reads")] += _PRODUCT * products(graph, n)
            capacity[side(kernel, "writes"), side(kernel, "reads")] = math.inf  # no kernel makes codes of floats
    for value in graph.outputs:  # as its inputs, results of a model are in codes unless these cost more
        if graph.is_float(value):
            edge(value, _CODES)
    most = sum(c for c in capacity.values() if c < math.inf)
    unit = _LARGEST / max(c for c in capacity.values() if c < math.inf)
    amounts = [max(1, round(min(c, most) * unit)) for c in capacity.values()]
    network = csr_array((np.array(amounts, np.int32), tuple(zip(*capacity, strict=True))), shape=(2 + len(number),) * 2)
    rest = network - maximum_flow(network, _CODES, _FLOATS).flow
    rest.eliminate_zeros()
    codes = {_CODES, *breadth_first_order(rest, _CODES, return_predecessors=False).tolist()}

    def label_of(kernel: str, can: tuple[str, ...]) -> str:
        if "whole" in can and side(kernel, "reads") not in codes:
            return "whole"
        return "codes" if side(kernel, "writes") in codes else "float"

    return {kernel: label_of(kernel, can) for kernel, can in assignment.modes.items()}


def _size(graph: Graph, value: str) -> int:
    """Numbers of a value, of one sample where the batch is open."""
    return math.prod(d or 1 for d in graph.shape(value))


def _noise(value: str, assignment: Assignment, stats: dict[str, TensorStats]) -> float:
    """Mean squared error of a value on the grid that it would have, over the variance of its bulk; 0 if not known."""
    slot, seen = assignment.tensors.get(value), stats.get(value)
    if slot is None or seen is None or seen.histogram is None or not bool(seen.histogram.counts.any()):
        return 0.0
    grid = slot.grid(signed=seen.low < 0)
    q, x, p = choose(seen, grid), seen.histogram.centers, seen.histogram.counts / seen.histogram.counts.sum()
    low, high = q.bounds(grid)
    clipped = (x - x.clamp(low, high)).square()
    error = torch.where(clipped > 0, clipped, float(q.scale) ** 2 / 12)
    below = p.cumsum(0)
    bulk = torch.where((below >= (1 - _BULK) / 2) & (below - p <= (1 + _BULK) / 2), p, 0.0)
    mean = (x * bulk).sum() / bulk.sum()
    signal = ((x - mean).square() * bulk).sum() / bulk.sum()
    return float((error * p).sum() / signal) if signal > 0 else 0.0
