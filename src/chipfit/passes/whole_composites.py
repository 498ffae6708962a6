"""Choose which opened composites cost less as a whole, in float: by the minimum cut that `float_regions` describes.

The parts of a composite are one kernel of the cut, unless each of them may run in float by itself. In integers it costs
the rounding of its inner values, in float the conversions at its ends.
"""

from collections.abc import Collection, Mapping
from functools import partial

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import multiplications
from chipfit.passes.composites import composites_in
from chipfit.passes.float_regions import FLOAT, INTEGER, NOISE_COST, PRODUCT_COST, Cut, relative_noise
from chipfit.quantizers.grids import Grid
from chipfit.ranges import choose

#: operators whose result grows without limit near 0
_INVERSE = ("Rsqrt",)
#: least ratio of errors for which parts replace one kernel
_WORTHWHILE = 2.0


def whole_composites(
    graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats], asked: str | None, names: Collection[str]
) -> set[str]:
    """Return the opened composites that cost less as a whole, in float.

    Args:
        asked: see `float_regions`.
        names: of composites all of whose parts run in integers.
    """
    if asked is not None or not names:
        return {*names} if asked == "float" else set()
    heads, modes = Cut(graph, assignment, stats), assignment.modes
    kernels = {
        name: {heads.kernel(p) for p in parts if assignment.nodes[p.name].exec != "follow"}
        for name, parts in composites_in(graph).items()
        if name in names
    }
    free = {c: ks for c, ks in kernels.items() if ks and all("whole" in modes.get(k, ()) for k in ks)}
    joint = kernels.keys() - free.keys()
    chosen = _CompositeCut(graph, assignment, stats, joint).modes()
    whole = {c for c, ks in free.items() if all(chosen[k] == "whole" for k in ks)}
    return whole | {c for c in joint if chosen[c] == "whole"}


def exact_kernels(
    graph: Graph,
    assignment: Assignment,
    stats: Mapping[str, TensorStats],
    asked: str | None,
    scales: Mapping[str, float],
) -> set[str]:
    """Return the opened composites that their own kernels round about as little as their parts do, or less.

    Args:
        asked: see `float_regions`; no composite is left open for "float".
        scales: composite's name -> the scale that its kernel dictates for the result.
    """
    cut, out = Cut(graph, assignment, stats), set[str]()
    for name, parts in composites_in(graph).items():
        if name in scales:
            whole = cut.noise(parts[-1].output, partial(_noise_on_scale, scale=scales[name]))
            by_parts = cut.noise(parts[-1].output, partial(relative_noise, centred=False))
            by_parts += sum(_noise_by_value(cut, parts).values())
            out |= {name} if asked == "float" or whole < _WORTHWHILE * by_parts else set()
    return out


def _noise_by_value(cut: Cut, parts: Collection[Node]) -> dict[str, float]:
    """Return inner value of a composite -> the relative error of the result of a part that its rounding makes."""
    made, out = {n.output for n in parts}, dict[str, float]()
    for n in parts:
        for value in made & {*n.inputs} if cut.assignment.nodes[n.name].exec != "follow" else ():
            if n.op in _INVERSE:
                noise = cut.noise(value, noise_of_inverse)
            else:  # sums average rounding errors out
                share = min(1.0, cut.size(n.output) / cut.size(value))
                noise = share * cut.noise(value, partial(relative_noise, centred=False))
            out[value] = max(noise, out.get(value, 0.0))
    return out


def _noise_on_scale(seen: TensorStats, grid: Grid, scale: float) -> float:
    """Return the mean squared rounding error of a value on a scale, relative to its mean square."""
    assert seen.histogram is not None
    power = (seen.histogram.centers.square() * seen.histogram.counts).sum() / seen.histogram.counts.sum()
    return scale**2 / 12 / float(power) if power > 0 else 0.0


class _CompositeCut(Cut):
    """The cut of a network in which some composites are one kernel each."""

    def __init__(
        self, graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats], joint: Collection[str]
    ) -> None:
        super().__init__(graph, assignment, stats)
        parts = {n.name: n.composite for n in graph.nodes if n.composite in joint}
        self._head |= {n.name: parts[k] for n in graph.nodes if (k := self.kernel(n)) in parts}
        self.can |= dict.fromkeys(joint, ("codes", "whole"))
        self._counted = dict[str, float]()  #: inner value -> its cost in integers so far
        #: results of pass-through operators, which round nothing
        self._moved = {o for n in graph.nodes if assignment.nodes[n.name].exec == "follow" for o in n.outputs}

    def _add_node(self, n: Node, inputs: list[str]) -> None:
        super()._add_node(n, inputs)
        if n.composite == self.kernel(n):
            side = self._side(n.composite, "")
            self._capacity[INTEGER, side] += PRODUCT_COST * multiplications(self.graph, n)
            for value in {i for i in n.inputs if i is not None} - {*inputs, *self.graph.weights, *self._moved}:
                cost, counted = NOISE_COST * self._noise_of_part(n, value), self._counted.get(value, 0.0)
                self._capacity[side, FLOAT] += max(cost - counted, 0.0)
                self._counted[value] = max(cost, counted)

    def _noise_of_part(self, n: Node, value: str) -> float:
        """Return the rounding error of a factor inside a composite, summed over the numbers that a part reads."""
        seen = self.stats.get(value)
        if n.step == 0 and seen is not None and seen.low == seen.high == 0:
            return 0.0  # a recurrent layer starts from zeros, which every grid holds
        size = min(self.size(value), self.size(n.output))  # a mean averages rounding errors out
        noise = size * self.noise(value, partial(relative_noise, centred=False))
        return noise + (self.size(n.composite) * self.noise(value, noise_of_inverse) if n.op in _INVERSE else 0.0)


def noise_of_inverse(seen: TensorStats, grid: Grid) -> float:
    """Return the mean squared relative error of 1 / sqrt(x) where x >= 0 is on a grid: (step / x)^2 / 48.

    What is rounded to 0 counts as half a step.
    """
    assert seen.histogram is not None
    step = float(choose(seen, grid).scale)
    x, counts = seen.histogram.centers.clamp(min=step / 2), seen.histogram.counts
    return float(((step / x).square() / 48 * counts).sum() / counts.sum())
