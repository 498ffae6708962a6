"""Fold factors and addends of channels into the linear operator that reads the result: W (k x + c) + b."""

import math
from collections.abc import Mapping, Sequence

import torch

from chipfit.graph.edit import replace_values
from chipfit.graph.folds import batch_norm_terms
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import TRANSPOSED, bias_or_zero, channel_axis, in_groups, is_linear, scale_inputs, with_bias
from chipfit.operators.table import OPS
from chipfit.passes.rewriting import NodeTest, Readers, Rewritten, scales_by_channel
from chipfit.registry import register

#: largest ratio of the factors of two channels: rounding a weight loses as much more where its factor is smallest
_SPREAD = 8.0
#: largest addend: where features have a deviation near 1, a greater one means that the data lie far to one side of 0,
#: and rounded weights times their mean would shift every result; those behind a ReLU lie 1 or 2 above it
_OFF_CENTRE = 3.0
#: operators that compute a step where the platform does not list it
_PARTS = {"Div": ("Mul",), "BatchNorm": ("Mul", "Add")}
Affine = tuple[torch.Tensor, torch.Tensor]  #: factor and addend of each input channel of the layer, [] or [I] float64
#: axis of a value -> index along it of the numbers that become each input channel of the layer, [I]. Numbers that
#: differ in their index along another axis become the same channel
Places = Mapping[int, torch.Tensor]


@register("pass", "fold_affine", stage="rewrite", after=("fold_batch_norm",), needs=("in_integers",))
def fold_affine(graph: Graph, in_integers: NodeTest) -> Rewritten:
    """Fold products with constants, sums with constants and batch norms into the linear operator that alone reads them.

    W' = W k and b' = b + W c, for each input channel: x / 255 in front of a convolution costs neither an operator nor a
    rounding. A batch norm crosses a pool, a dropout or a flattening on its way to the linear operator. Padding that a
    convolution adds is 0 in both networks only if c is 0. Steps that the platform does not compute in integers stay
    where it does not compute their operand either: it rounds their result alone, which may need fewer bits than their
    operand. So do steps whose factors or addends would make the rounding of weights cost more.
    """
    graph, notes, folded = graph.copy(), list[str](), list[Node]()
    readers, makers = Readers(graph), graph.producers()
    for layer in [n for n in graph.nodes if is_linear(graph, n) and n.op not in TRANSPOSED]:
        steps, (k, c) = _foldable_steps(readers, makers, layer, in_integers)
        if not steps or readers.why_fixed(layer):
            continue
        fold_into(graph, layer, k, c)
        folded += steps
        names = ", ".join(dict.fromkeys(f"'{n.display_name}'" for n in steps))
        notes.append(f"folded {names} into '{layer.display_name}'")
    return Rewritten(without_steps(graph, folded), notes)


def fold_into(graph: Graph, layer: Node, k: torch.Tensor, c: torch.Tensor) -> None:
    """Change a linear operator so that it gives for x what it gave for k x + c.

    Args:
        k, c: factor and addend of its input channels, [] or [I].
    """
    w = graph.weights[layer.weight].detach()
    channels = in_groups(layer, w)
    k, c = (v.expand(_in_channels(graph, layer)) for v in (k, c))
    sums = channels.double().reshape(*channels.shape[:3], -1).sum(3)  # [g, O/g, I/g]
    bias = bias_or_zero(graph, layer) + (sums @ c.reshape(len(sums), -1, 1)).flatten()
    graph.weights[layer.weight] = scale_inputs(layer, w.double(), k).to(w.dtype)
    folded = with_bias(graph, layer, bias) if layer.bias is not None or bool(c.any()) else layer
    graph.nodes[graph.nodes.index(layer)] = folded


def _foldable_steps(
    readers: Readers, makers: Mapping[str, Node], layer: Node, in_integers: NodeTest
) -> tuple[list[Node], Affine]:
    """Return the steps in front of a linear operator that fold into it together, nearest first, and their k and c.

    Pass-through operators may stand between them. So may pools of each channel, if the factors in front of them are
    positive: the greatest x then stays the greatest k x + c.
    """
    graph, value, pooled, steps = readers.graph, layer.data, False, list[Node]()
    places: Places = {channel_axis(layer) % len(graph.shape(value)): torch.arange(_in_channels(graph, layer))}
    factor, addend = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    foldable: tuple[list[Node], Affine] = [], (factor, addend)
    while (n := makers.get(value)) is not None and readers.only(value) is not None:
        if (before := _places_before(graph, n, places)) is not None:
            places, value, pooled = before, n.data, pooled or not OPS[n.op].view
            continue
        step = affine(graph, n, places)
        if step is None:
            break
        (data,) = graph.activations(n)
        if not (_computed(graph, n, in_integers) or _computed(graph, makers.get(data), in_integers)):
            break
        if pooled and not bool((step[0] > 0).all()):
            break
        factor, addend = factor * step[0], factor * step[1] + addend
        steps.append(n)
        value = data
        if can_fold(layer, factor, addend):
            foldable = [*steps], (factor, addend)
    return foldable


def _computed(graph: Graph, n: Node | None, in_integers: NodeTest) -> bool:
    """Return whether the platform computes a node, or all its parts, in integers."""
    return n is not None and all(in_integers(graph, n.with_(op=op)) for op in _PARTS.get(n.op, (n.op,)))


def _places_before(graph: Graph, n: Node, places: Places) -> Places | None:
    """Return the places in the operand of a node that commutes with k x + c of each channel; None for other nodes."""
    if n.op == "Transpose":
        return {n.attrs["perm"][axis]: at for axis, at in places.items()}
    if n.op == "Reshape":
        batch, *sizes = graph.shape(n.data)
        known = [s for s in sizes if s is not None]
        flat = len(known) == len(sizes) and graph.shape(n.output) == (batch, math.prod(known))
        return _unraveled(places[1], known) if flat and 1 in places else None
    if not (scales_by_channel(n) and n.facts.shifts and n.facts.by_channel):
        return None
    return places if OPS[n.op].view else {axis: at for axis, at in places.items() if axis == 1}


def _unraveled(at: torch.Tensor, sizes: Sequence[int]) -> Places:
    """Return the indices on axes 1, 2, ... of elements that have the indices `at` behind a flattening."""
    out = dict[int, torch.Tensor]()
    for axis in range(len(sizes), 0, -1):
        at, out[axis] = at // sizes[axis - 1], at % sizes[axis - 1]
    return out


def affine(graph: Graph, n: Node, places: Places) -> Affine | None:
    """Return k and c of a node that computes k x + c, by input channel of the layer; None for others."""
    if n.op == "BatchNorm" and 1 in places and all(i is None or graph.is_weight(i) for i in n.inputs[1:]):
        k, mean, beta = batch_norm_terms(graph, n)
        return k[places[1]], (beta - mean * k)[places[1]]
    data = graph.activations(n)
    if "eltwise" not in n.facts.groups or len(data) != 1 or graph.shape(data[0]) != graph.shape(n.output):
        return None
    operand = next((i for i in n.inputs if i != data[0]), None)
    constant = _by_channel(graph, operand, len(graph.shape(data[0])), places)
    first, one, none = n.inputs[0] == data[0], torch.ones(()).double(), torch.zeros(()).double()
    if constant is None or (n.op == "Div" and not (first and bool((constant != 0).all()))):
        return None
    return {
        "Add": (one, constant),
        "Sub": (one, -constant) if first else (-one, constant),
        "Mul": (constant, none),
        "Div": (1 / constant, none),
    }[n.op]


def _by_channel(graph: Graph, name: str | None, rank: int, places: Places) -> torch.Tensor | None:
    """Return a constant operand as numbers of the layer's input channels, [] or [I] float64; None if they vary more."""
    if name is None or not graph.is_weight(name) or not graph.is_float(name):
        return None
    w = graph.weights[name].detach().double()
    w = w.reshape([1] * (rank - w.dim()) + list(w.shape))
    if w.dim() != rank or any(size > 1 and axis not in places for axis, size in enumerate(w.shape)):
        return None
    return w[tuple(places[axis] if size > 1 else 0 for axis, size in enumerate(w.shape))]


def _in_channels(graph: Graph, layer: Node) -> int:
    parts = in_groups(layer, graph.weights[layer.weight])
    return parts.shape[0] * parts.shape[2]


def can_fold(
    layer: Node, k: torch.Tensor, c: torch.Tensor, spread: float = _SPREAD, off_centre: float = _OFF_CENTRE
) -> bool:
    """Return whether k x + c can be folded into a linear operator that reads it, and weights still round as well."""
    if bool(c.any()) and any(p for pair in layer.attrs.get("padding", ()) for p in pair):
        return False  # c is not added to the zeros of the padding
    if not bool(torch.isfinite(k).all() and torch.isfinite(c).all() and (k != 0).all()):
        return False
    return float(k.abs().max() / k.abs().min()) <= spread and float(c.abs().max()) <= off_centre


def without_steps(graph: Graph, steps: Sequence[Node]) -> Graph:
    """Return a graph without steps: consumers of one read its operand, and of several in a row the first's operand."""
    operands = {n.output: graph.activations(n)[0] for n in steps}
    for result in operands:
        while (before := operands.get(operands[result])) is not None:
            operands[result] = before
    return replace_values(graph, operands)
