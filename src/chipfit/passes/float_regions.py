"""Choose which kernels output integers and which output floats: the cheapest boundary between the two.

A kernel that can output integers or floats may sit on either side of the boundary between integer and float regions: a
linear layer may output its sums in float, an addition may run in float. Each value on the boundary is converted, which
takes time, and each value stored in integers is rounded, which costs accuracy: in an addition of two residual streams
in which one token is a hundred times the others, rounding would turn all others to zero.

Costs are counted in conversions of one number. The inputs and the output of a kernel have one of two labels each; a
value is converted for readers whose label differs from that of its producer, once for all of them. The cheapest
labelling is a minimum cut [Picard, Ratliff: Minimum cuts and related problems, Networks 5, 1975], found exactly.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment
from chipfit.decide.part_noise import PartOnGrid, describe, on_dictated_scale, parts_on_grid, squared_errors
from chipfit.graph.ir import Graph, Node
from chipfit.graph.joins import Joins
from chipfit.graph.linear import multiplications
from chipfit.quantizers.grids import Grid
from chipfit.ranges import choose
from chipfit.ranges.qparams import QParams
from chipfit.registry import Setting, register

#: conversions that cost as much as rounding one number with an error of the variance of its value
NOISE_COST = 1000.0
#: share of the values around the median whose variance is the signal: outliers are few, but drown the others
BULK = 0.99
#: extra cost of a multiply-accumulate in float over 8 bits (measured with ONNX Runtime on x86)
PRODUCT_COST = 1 / 64
#: conversions of one number of an output whose parts meet in float: in front of its kernel, and behind it
_CONVERSIONS = 2
#: cost of a float output, which keeps a kernel in integers where both labels cost the same otherwise
_TIE = 1e-3
#: largest capacity that is passed to the maximum flow, and largest sum of them: it adds in 32 bits
_LARGEST, _SUM = 1 << 20, 1 << 30
INTEGER, FLOAT = 0, 1  #: source and sink of the flow

_DOC = "output of kernels that can output integers or floats, instead of what is cheapest and most exact"
_SETTING = Setting("results", None, _DOC, argument="asked", choices=("codes", "float"))


@register("pass", "float_regions", stage="results", options=(_SETTING,))
def float_regions(
    graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats], asked: str | None
) -> tuple[dict[str, str], list[str]]:
    """Choose a mode for every kernel of `assignment.modes`, and for those of `assignment.joins` that lose a part.

    Args:
        asked: "codes" or "float" for all kernels; None: the cheapest modes.

    Returns:
        First node of the kernel -> "codes", "float", "whole" or "apart" (whole, since a part of an output would be lost
        on one grid), where it changes; notes with the number of kernels and with those whose parts meet in float.
    """
    if asked is not None:
        return {k: asked if asked in can else "whole" for k, can in assignment.modes.items()}, []
    lost = lost_parts(graph, assignment, stats)
    if not assignment.modes and not lost:
        return {}, []
    cut = Cut(graph, assignment, stats, {k: part.noise - part.own_noise for k, part in lost.items()})
    chosen = cut.modes()
    quantized = {cut.kernel(n): n.output in assignment.quantized_outputs for n in graph.nodes}  # by the last node
    changed = {k: mode for k, mode in chosen.items() if mode != ("codes" if quantized[k] else "float")}
    listed = [chosen[k] for k in assignment.modes]
    counted = f"{sum(mode != 'codes' for mode in listed)} of {len(listed)} kernels that can output integers or floats"
    why = [f"{counted} output floats: fewer conversions and less error; Settings(results=...) overrides it"]
    apart = [k for k in lost if changed.get(k) == "whole"]
    joined = [f"'{assignment.joins[k]}' is computed in float: {describe(lost[k])}" for k in apart]
    return changed | dict.fromkeys(apart, "apart"), (why if listed else []) + joined


def lost_parts(graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats]) -> dict[str, PartOnGrid]:
    """Return the first node of each kernel of `assignment.joins` -> the part that its grid rounds most.

    A result whose scale the hardware dictates is its only part. Kernels are left out whose parts are rounded about as
    well as by grids of their own, so that the conversions of a kernel in float would cost more.
    """
    dictated, out = dict(pair for c in assignment.constraints for pair in c.dictated), {}
    joins = Joins(graph)
    for kernel, value in assignment.joins.items():
        slot, seen = assignment.tensors.get(value), stats.get(value)
        if slot is not None and seen is not None:
            grid = slot.grid(signed=seen.low < 0)
            if value in dictated:
                scale, zero_point = map(torch.tensor, dictated[value])
                found = [on_dictated_scale(value, seen, QParams(scale, zero_point), grid)]
            else:
                found = parts_on_grid(joins, assignment, stats, value, choose(seen, grid), grid)
            worst = max(found, key=lambda p: p.noise - p.own_noise, default=None)
            if worst is not None and NOISE_COST * (worst.noise - worst.own_noise) > _CONVERSIONS:
                out[kernel] = worst
    return out


class Cut:
    """The flow network whose minimum cut separates kernels that output integers from those that output floats."""

    def __init__(
        self,
        graph: Graph,
        assignment: Assignment,
        stats: Mapping[str, TensorStats],
        lost: Mapping[str, float] | None = None,
    ) -> None:
        """Create a network without vertices; `modes` fills it.

        Args:
            lost: first node of a kernel -> noise of the worst part of the output that it joins.
        """
        self.graph, self.assignment, self.stats, self.lost = graph, assignment, stats, lost or {}
        self.can: dict[str, tuple[str, ...]] = dict.fromkeys(self.lost, ("codes", "whole")) | dict(assignment.modes)
        self._head = {name: group[0] for group in assignment.groups for name in group}
        #: (kernel, side) with an open label, or (value, direction of its conversion) -> vertex of the flow network
        self._vertices: dict[tuple[str, str], int] = {}
        self._capacity: dict[tuple[int, int], float] = defaultdict(float)
        self._producer = {v: INTEGER for v in graph.inputs if v in assignment.tensors}  # value -> vertex
        self._noise_cost: dict[str, float] = {}

    def kernel(self, n: Node) -> str:
        """Return the first node of a node's kernel."""
        return self._head.get(n.name, n.name)

    def modes(self) -> dict[str, str]:
        """Return the cheapest mode of each kernel of `Assignment.modes`, and of those that lose a part."""
        made = {o: self.kernel(n) for n in self.graph.nodes for o in n.outputs}
        for n in self.graph.nodes:
            self._add_node(n, [v for v in dict.fromkeys(n.inputs) if v is not None and made.get(v) != self.kernel(n)])
        free = self._free_floats()
        for value in self.graph.outputs:  # other outputs are stored in integers unless that costs more
            if self.graph.is_float(value):
                self._add_edge(value, FLOAT if value in free else INTEGER)
        integer = self._integer_side()

        def mode(kernel: str, can: tuple[str, ...]) -> str:
            if "whole" in can and self._side(kernel, "reads") not in integer:
                return "whole"
            return "codes" if self._side(kernel, "writes") in integer else "float"

        return {kernel: mode(kernel, can) for kernel, can in self.can.items()}

    def _free_floats(self) -> set[str]:
        """Return values that an integer kernel can output in float at no cost: its sums, and copies of them."""
        out, parts = set[str](), Counter(map(self.kernel, self.graph.nodes))
        for n in self.graph.nodes:
            can = self.can.get(n.name, ())
            sums = "float" in can and "whole" not in can and parts[n.name] == 1
            if sums or (self.assignment.nodes[n.name].exec == "follow" and n.inputs[0] in out):
                out |= {*n.outputs}
        return out

    def _side(self, kernel: str, which: str) -> int:
        """Return the vertex of what a kernel reads or writes; both share one unless the kernel has the mode "float"."""
        which = which if "float" in self.can.get(kernel, ()) else ""
        return self._vertices.setdefault((kernel, which), 2 + len(self._vertices))

    def _add_node(self, n: Node, inputs: list[str]) -> None:
        """Add the costs of a node; `inputs` are computed by other kernels."""
        kernel, exec_, tensors = self.kernel(n), self.assignment.nodes[n.name].exec, self.assignment.tensors
        can, passes = self.can.get(kernel, ()), exec_ == "follow"
        for value in inputs:
            if value in self.graph.weights or not self.graph.is_float(value):
                continue
            integer = exec_ != "float" and value in tensors and (value, n.name) not in self.assignment.float_edges
            fixed = INTEGER if integer else FLOAT
            self._add_edge(value, self._side(kernel, "reads") if passes or "whole" in can else fixed)
        for value in n.outputs:
            fixed = INTEGER if value in self.assignment.quantized_outputs else FLOAT
            self._producer[value] = label = self._side(kernel, "writes") if can or passes else fixed
            if label > FLOAT:
                self._capacity[INTEGER, label] += _TIE * self.size(value)
        if n.name in self.lost:
            lost = NOISE_COST * self.lost[n.name] * self.size(n.output)
            self._capacity[self._side(kernel, "writes"), FLOAT] += lost
        if n.name == kernel and {"float", "whole"} <= {*can}:
            reads, writes = self._side(kernel, "reads"), self._side(kernel, "writes")
            self._capacity[INTEGER, reads] += PRODUCT_COST * multiplications(self.graph, n)
            self._capacity[writes, reads] = math.inf  # no kernel computes integers from floats

    def _add_edge(self, value: str, reader: int) -> None:
        """Add the costs of a value between its producer and a reader: its conversion and its rounding."""
        producer, size = self._producer.get(value, FLOAT), self.size(value)
        if producer == reader or max(producer, reader) <= FLOAT:  # nothing is open between two fixed labels
            return
        directions = (value, "to integers"), (value, "to floats")  # shared by all readers that need a conversion
        to_integers, to_floats = (self._vertices.setdefault(d, 2 + len(self._vertices)) for d in directions)
        if value not in self._noise_cost:
            noise = NOISE_COST * self.noise(value)
            self._noise_cost[value] = size * noise / 2
            self._capacity[to_integers, producer] += size
            self._capacity[producer, to_floats] += size
        self._capacity[reader, to_integers] = self._capacity[to_floats, reader] = math.inf
        for edge in ((producer, reader), (reader, producer)):
            self._capacity[edge] += self._noise_cost[value]
        for end in (producer, reader):  # integers at either end round the value
            if end > FLOAT:
                self._capacity[end, FLOAT] += self._noise_cost[value]

    def _integer_side(self) -> set[int]:
        """Return the vertices on the source's side of the minimum cut."""
        finite = [c for c in self._capacity.values() if c < math.inf]
        total = sum(finite)
        unit = min(_LARGEST / max(finite), _SUM / total)
        amounts = np.array([max(1, round(min(c, total) * unit)) for c in self._capacity.values()], np.int32)
        ends = tuple(np.array(end, np.int32) for end in zip(*self._capacity, strict=True))
        network = csr_array((amounts, ends), shape=(2 + len(self._vertices),) * 2)
        rest = network - maximum_flow(network, INTEGER, FLOAT).flow
        rest.eliminate_zeros()
        return {INTEGER, *breadth_first_order(rest, INTEGER, return_predecessors=False).tolist()}

    def size(self, value: str) -> int:
        """Return the count of numbers of a value; an unknown size counts once."""
        return self.graph.size(value)

    def noise(self, value: str, of: Callable[[TensorStats, Grid], float] | None = None) -> float:
        """Return the relative rounding error of a value, 0 if it is not known.

        Args:
            of: its measure; `relative_noise` when omitted.
        """
        slot, seen = self.assignment.tensors.get(value), self.stats.get(value)
        if slot is None or seen is None or seen.histogram is None or not bool(seen.histogram.counts.any()):
            return 0.0
        return (of or relative_noise)(seen, slot.grid(signed=seen.low < 0))


def relative_noise(seen: TensorStats, grid: Grid, centred: bool = True) -> float:
    """Return the mean squared error of a value on a grid, relative to the variance of the bulk of its values.

    Args:
        centred: False for the mean square in place of the variance: of a factor, which scales other values.
    """
    assert seen.histogram is not None
    x, p = seen.histogram.centers, seen.histogram.counts / seen.histogram.counts.sum()
    error = squared_errors(seen.histogram, choose(seen, grid), grid)
    below = p.cumsum(0)
    bulk = torch.where((below >= (1 - BULK) / 2) & (below - p <= (1 + BULK) / 2), p, 0.0)
    mean = (x * bulk).sum() / bulk.sum() if centred else 0.0
    signal = ((x - mean).square() * bulk).sum() / bulk.sum()
    return float((error * p).sum() / signal) if signal > 0 else 0.0
