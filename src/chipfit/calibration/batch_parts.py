"""Parts of a calibration batch that run one after the other, so that large values need no new memory."""

from collections.abc import Sequence

import torch

from chipfit.calibration.data import count_splittable
from chipfit.graph.ir import Graph, Node

#: greatest size of a value [bytes] whose memory glibc keeps for the next one; larger blocks go back to the system,
#: which clears each of their pages again (a quarter of the time of MobileNetV2 on 16 images)
LARGE = 1 << 25
#: least number of samples of a part: convolutions of fewer are slower than new memory is
LEAST = 4
#: `OpDef.layout` of operators that work along some axes, which are given by their attributes
_ALONG_AXES = ("along", "reduce", "arg_max", "remove_axis", "concat", "squeeze", "pad", "transpose", "reshape")


def batch_parts(graph: Graph, batch: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return a batch in parts of a few samples each, where values are large and no sample depends on others."""
    samples = count_splittable(graph, batch)
    largest = 4 * samples * max(map(graph.size, graph.values))  # of float32
    count = min(-(-largest // LARGE), samples // LEAST)
    if count < 2 or graph.device.type != "cpu" or not samples_are_apart(graph):
        return [[*batch]]
    return [[*part] for part in zip(*(x.tensor_split(count) for x in batch), strict=True)]


def samples_are_apart(graph: Graph) -> bool:
    """Return whether axis 0 of every value holds the samples, and none is computed from others, as far as is known."""
    shapes = [graph.shape(v) for v in graph.values]
    return all(s[:1] == (None,) and None not in s[1:] for s in shapes) and all(_is_apart(graph, n) for n in graph)


def _is_apart(graph: Graph, n: Node) -> bool:
    """Return whether an operator computes each sample, along axis 0 of its operands and results, apart."""
    data, constants = graph.activations(n), [graph.shape(i) for i in n.inputs if i in graph.weights]
    rank, facts = len(graph.shape(n.output)), n.facts
    if not data or facts.recurrent:
        return False
    if facts.kind or facts.norm or facts.layout == "spatial":
        return len(data) == 1 and rank > 1
    if facts.layout == "elementwise":
        return all(len(graph.shape(i)) == rank for i in data) and all(len(s) < rank or s[0] == 1 for s in constants)
    return facts.layout in _ALONG_AXES and not constants and _spares_first_axis(graph, n)


def _spares_first_axis(graph: Graph, n: Node) -> bool:
    """Return whether an operator along axes leaves axis 0 as it is."""
    if n.facts.layout == "reshape":
        return graph.size(n.data) == graph.size(n.output)
    if n.facts.layout == "transpose":
        return bool(n.attrs["perm"][0] == 0)
    if n.facts.layout == "pad":
        return not any(n.attrs["padding"][0])
    axes = n.attrs.get("axes", [n.attrs.get("axis")])
    return axes is not None and None not in axes and all(a % len(graph.shape(n.data)) for a in axes)
