"""Fold factors and addends of channels into the linear operator that reads the result: W (k x + c) + b."""

from collections.abc import Callable, Mapping

import torch

from chipfit.graph.folds import batch_norm_terms
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import TRANSPOSED, bias_or_zero, channel_axis, in_groups, is_linear, scale_inputs, with_bias
from chipfit.passes.rewriting import Readers, Rewritten
from chipfit.registry import register

#: largest ratio of the factors of two channels: rounding a weight loses as much more where its factor is smallest
_SPREAD = 8.0

#: largest addend: where features have a deviation near 1, a greater one means that the data lie to one side of 0, and
#: rounded weights times their mean would shift every result
_OFF_CENTRE = 1.0
#: operators that compute a step where the platform does not list it
_PARTS = {"Div": ("Mul",), "BatchNorm": ("Mul", "Add")}
Test = Callable[[Graph, Node], bool]
Affine = tuple[torch.Tensor, torch.Tensor]  #: factor and addend, [] or [C] float64


@register("pass", "fold_affine", stage="rewrite", after=("fold_batch_norm",), needs=("in_integers",))
def fold_affine(graph: Graph, in_integers: Test) -> Rewritten:
    """Fold products with constants, sums with constants and batch norms into the linear operator that alone reads them.

    W' = W k and b' = b + W c, for each input channel: x / 255 in front of a convolution costs neither an operator nor a
    rounding. Padding that a convolution adds is 0 in both networks only if c is 0. Steps that the platform does not
    compute in integers stay: it rounds their result, which may need fewer bits than their operand. So do steps whose
    factors or addends would make the rounding of weights cost more.
    """
    graph, notes = graph.copy(), list[str]()
    for layer in [n for n in graph.nodes if is_linear(graph, n) and n.op not in TRANSPOSED]:
        readers, makers = Readers(graph), graph.producers()
        steps, (k, c) = _steps(readers, makers, layer, in_integers)
        if not steps or readers.why_fixed(layer):
            continue
        w = graph.weights[layer.weight].detach()
        channels = in_groups(layer, w)
        k, c = (v.expand(channels.shape[0] * channels.shape[2]) for v in (k, c))
        sums = channels.double().reshape(*channels.shape[:3], -1).sum(3)  # [g, O/g, I/g]
        bias = bias_or_zero(graph, layer) + (sums @ c.reshape(len(sums), -1, 1)).flatten()
        graph.weights[layer.weight] = scale_inputs(layer, w.double(), k).to(w.dtype)
        folded = with_bias(graph, layer, bias) if layer.bias is not None or bool(c.any()) else layer
        graph.nodes[graph.nodes.index(layer)] = folded
        for n in steps:  # the last one first: what read its result then reads that of the step before it
            _remove(graph, n)
        names = ", ".join(dict.fromkeys(f"'{n.display_name}'" for n in steps))
        notes.append(f"folded {names} into '{layer.display_name}'")
    return Rewritten(graph, notes)


def _steps(readers: Readers, makers: Mapping[str, Node], layer: Node, in_integers: Test) -> tuple[list[Node], Affine]:
    """Return the steps in front of a linear operator that fold into it, and k and c of all; transpositions stay."""
    graph, value = readers.graph, layer.data
    rank = len(graph.shape(value))
    axis, steps = channel_axis(layer) % rank, list[Node]()
    factor, addend = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    found: tuple[list[Node], Affine] = [], (factor, addend)
    while (n := makers.get(value)) is not None and readers.only(value) is not None:
        if n.op == "Transpose":
            axis, value = n.attrs["perm"][axis] % rank, n.data
            continue
        step, parts = _affine(graph, n, axis), [n.with_(op=op) for op in _PARTS.get(n.op, (n.op,))]
        if step is None or not all(in_integers(graph, part) for part in parts):
            break
        factor, addend = factor * step[0], factor * step[1] + addend
        steps.append(n)
        (value,) = graph.activations(n)
        if _folds(layer, factor, addend):
            found = [*steps], (factor, addend)
    return found


def _affine(graph: Graph, n: Node, axis: int) -> Affine | None:
    """Return k and c of a node that computes k x + c for each channel on an axis; None for others."""
    if n.op == "BatchNorm" and axis == 1 and all(i is None or graph.is_weight(i) for i in n.inputs[1:]):
        k, mean, beta = batch_norm_terms(graph, n)
        return k, beta - mean * k
    data = graph.activations(n)
    if n.op not in ("Add", "Sub", "Mul", "Div") or len(data) != 1 or graph.shape(data[0]) != graph.shape(n.output):
        return None
    constant = _by_channel(graph, next((i for i in n.inputs if i != data[0]), None), len(graph.shape(data[0])), axis)
    first, one, none = n.inputs[0] == data[0], torch.ones(()).double(), torch.zeros(()).double()
    if constant is None or (n.op == "Div" and not (first and bool((constant != 0).all()))):
        return None
    return {
        "Add": (one, constant),
        "Sub": (one, -constant) if first else (-one, constant),
        "Mul": (constant, none),
        "Div": (1 / constant, none),
    }[n.op]


def _by_channel(graph: Graph, name: str | None, rank: int, axis: int) -> torch.Tensor | None:
    """Return a constant operand, [] or [C] float64, if it differs along an axis of the data at most."""
    if name is None or not graph.is_weight(name) or not graph.is_float(name):
        return None
    w = graph.weights[name].detach().double()
    shape = [1] * (rank - w.dim()) + list(w.shape)
    fits = all(size == 1 for k, size in enumerate(shape) if k != axis) and len(shape) == rank
    return (w.reshape(-1) if w.numel() > 1 else w.reshape(())) if fits else None


def _folds(layer: Node, k: torch.Tensor, c: torch.Tensor) -> bool:
    """Return whether k x + c can be folded into a linear operator that reads it, without loss."""
    if bool(c.any()) and any(p for pair in layer.attrs.get("padding", ()) for p in pair):
        return False  # the padding is added behind it
    if not bool(torch.isfinite(k).all() and torch.isfinite(c).all() and (k != 0).all()):
        return False
    return float(k.abs().max() / k.abs().min()) <= _SPREAD and float(c.abs().max()) <= _OFF_CENTRE


def _remove(graph: Graph, n: Node) -> None:
    """Remove a step; what read its result reads its data."""
    (data,) = graph.activations(n)
    left = [m for m in graph.nodes if m.name != n.name]
    graph.nodes = [m.with_(inputs=tuple(data if i == n.output else i for i in m.inputs)) for m in left]
    del graph.values[n.output]
