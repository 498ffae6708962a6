"""Decompose composite operators into simpler ones, for file formats without an operator of that kind.

A rule receives a `NewNodes`, which creates nodes, and the composite; it returns the name of the result, or of each.
Rules support both layouts (`Graph.data_format`). Their nodes compute in float.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from chipfit.engine.curves import CURVE, steps_of, text_of_formula
from chipfit.engine.shapes import Shape
from chipfit.graph.edit import taken_names
from chipfit.graph.folds import batch_norm_terms
from chipfit.graph.hidden_scores import HIDDEN_SCORE, split_mask
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import by_name, read_column, resolve
from chipfit.passes.grid_sample import grid_sample
from chipfit.passes.new_nodes import NewNodes, Refusal
from chipfit.passes.recurrent import gru, lstm, rnn
from chipfit.passes.rewriting import NodeTest
from chipfit.plan.record import Plan

#: distance from the largest score: the share of a softmax is lost in float32, but the exponential is a normal number
LOST_IN_SOFTMAX = -80.0
_MOST_COPIES = 16  #: of an operand that a concatenation joins in place of a repetition
LINEAR_SOFTPLUS = 17.0  #: from here on log(1 + exp(x)) equals x in float32


def decompose(
    graph: Graph, plan: Plan, holds: Container[str], besides: Container[str] = ()
) -> tuple[Graph, Plan, dict[str, str]]:
    """Decompose every composite that has a rule and is not supported, and its parts in turn.

    The last of the new nodes has the name of the composite, and results keep their names, so that they are stored as
    before; intermediate values have no entry in the plan and stay float.

    Args:
        graph: in either layout.
        holds: operators that the format supports, which stay; rules also use it to choose between alternatives.
        besides: names of nodes that are decomposed although their operator is supported.

    Returns:
        Graph, plan, and node name -> why its rule does not apply; such a node stays.
    """
    opening = Decomposition(graph.copy(), holds, lambda _, n: n.op in holds and n.name not in besides)
    became = {n.name: opening.parts(n) for n in graph.nodes}
    opening.graph.nodes = [m for made in became.values() for m in made]
    return opening.graph, _plan_of_parts(plan, graph, became), opening.reasons


class Decomposition:
    """The decomposition of nodes of one graph, whose values and constants it edits."""

    def __init__(
        self,
        graph: Graph,
        holds: Container[str],
        stays: NodeTest,
        constants: Mapping[Any, str] | None = None,
        taken: set[str] | None = None,
        integers: bool = False,
    ) -> None:
        """
        Args:
            holds: operators that rules may choose between.
            integers: the new nodes shall compute in integers.
            stays: whether a node needs no decomposition.
            constants: constants of earlier decompositions, by their numbers.
            taken: names that are not free, to which new ones are added; those of the graph when omitted.
        """
        self.graph, self.holds, self.stays, self.constants = graph, holds, stays, dict(constants or {})
        self.integers = integers
        self.reasons: dict[str, str] = {}  #: node -> why its rule does not apply
        self._taken = taken_names(graph) if taken is None else taken

    def parts(self, node: Node) -> list[Node]:
        """Return the nodes that replace a node; the node alone if it stays or its rule does not apply."""
        if node.op not in RULES or self.stays(self.graph, node):
            return [node]
        new = NewNodes(self.graph, node, self.holds, self._taken, self.constants, self.integers)
        try:
            made = new.named(RULES[node.op](new, node))
        except Refusal as e:
            self.reasons[node.name] = str(e)
            return [node]
        return [m for part in made for m in ([part] if part.op == node.op else self.parts(part))]


def _plan_of_parts(plan: Plan, graph: Graph, became: dict[str, list[Node]]) -> Plan:
    """Return the plan of a graph in which nodes were replaced by others."""
    last = {n.name: became[n.name][-1] for n in graph.nodes if became[n.name] != [n]}
    nodes = {name: replace(p, op=last[name].op, exec="float") for name, p in plan.nodes.items() if name in last}
    edges = {(v, m.name) for v, reader in plan.float_edges for m in became.get(reader, ()) if v in m.inputs}
    opened = [n for n in graph.nodes if n.name in last]  # their results are rounded for what reads them outside
    edges |= {(v, m.name) for n in opened for m in became[n.name] for v in {*n.outputs}.intersection(m.inputs)}
    groups = tuple(tuple(m.name for n in group for m in became[n]) for group in plan.groups)
    return replace(plan, nodes={**plan.nodes, **nodes}, groups=groups, float_edges=frozenset(edges))


# ---------------------------------------------------------------- element by element


#: log(1 + exp(x)) in a form that does not overflow
_SOFTPLUS = "tail = log(exp(-abs(x)) + 1.0); soft = relu(x) + tail"


def _softplus(new: NewNodes, n: Node) -> str:
    """Return log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""
    beta, threshold = n.attrs["beta"], n.attrs["threshold"]
    chosen = "above = relu(sign(x - threshold)); above * data + (1.0 - above) * soft"
    formula = f"x = data * beta; {_SOFTPLUS}; soft = soft * inverse; "
    formula += "soft" if threshold >= LINEAR_SOFTPLUS else chosen
    return new.formula(formula, data=n.data, beta=beta, inverse=1.0 / beta, threshold=threshold)


def _mish(new: NewNodes, n: Node) -> str:
    soft = "soft = softplus(x, beta=1.0, threshold=20.0)" if "Softplus" in new.holds else _SOFTPLUS
    return new.formula(f"{soft}; x * tanh(soft)", x=n.data)


def _elu(new: NewNodes, n: Node, alpha: str = "", scale: str = "1") -> str:
    """Return scale (max(x, 0) + alpha (exp(min(x, 0)) - 1)); alpha is an attribute unless it is given."""
    below = float(alpha or n.attrs["alpha"]) * float(scale)
    branches = "y = (exp(min(x, 0.0)) - 1.0) * below; relu(x) * scale + y"
    return new.formula(branches, x=n.data, scale=float(scale), below=below)


def _clamp(new: NewNodes, n: Node) -> str:
    x, (low, high) = n.data, (n.attrs["min"], n.attrs["max"])
    if low is not None:
        x = new("Relu", x) if low == 0 else new("Max", x, low)
    return x if high is None else new("Min", x, high)


def _gelu(new: NewNodes, n: Node) -> str:
    tanh = "cube = x * x * x; gate = tanh((x + cube * 0.044715) * steepness)"
    gate = tanh if n.attrs["approximate"] == "tanh" else "gate = erf(x / root)"
    given = {"x": n.data, "steepness": math.sqrt(2 / math.pi), "root": math.sqrt(2)}
    return new.formula(f"{gate}; x * (gate + 1.0) * 0.5", **given)


def _erf(new: NewNodes, n: Node) -> str:
    """Return sign(x) (1 - (a1 t + ... + a5 t^5) exp(-x^2)) with t = 1 / (1 + p |x|); the error is below 1.5e-7.

    Source: Abramowitz and Stegun 1964, 7.1.26.
    """
    powers = "t * 1.061405429"
    for a in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        powers = f"({powers} + {a}) * t"
    tail = f"size = abs(x); t = 1.0 / (size * 0.3275911 + 1.0); tail = {powers} * exp(-(size * size))"
    return new.formula(f"{tail}; sign(x) * (1.0 - tail)", x=n.data)


def _divide(new: NewNodes, n: Node) -> str:
    """Return the product with the reciprocal of a constant; in integers of any divisor, by a table of reciprocals."""
    by = new.graph.weights.get(n.inputs[1] or "")
    if by is None and new.integers and CURVE in new.holds:
        inverse = new(CURVE, n.inputs[1], steps=text_of_formula("reciprocal(x)"))
        return new("Mul", n.data, inverse, gives=new.shape(n.output))
    if n.data not in new.graph.values or by is None or not by.is_floating_point() or bool((by == 0).any()):
        new.refuse("its divisor is not a constant, or holds 0")
    return new("Mul", n.data, new.constant((1 / by.detach().double()).to(by.dtype)), gives=new.shape(n.output))


def _floor_divide(new: NewNodes, n: Node) -> str:
    """Return the quotient rounded down; integers, which files divide towards zero, are divided without remainder."""
    formula = "floor(div(a, b, gives=shape))"
    if not new.graph.is_float(n.output):
        formula = "div(sub(a, mod(a, b, gives=shape), gives=shape), b, gives=shape)"
    return new.formula(formula, a=n.inputs[0], b=n.inputs[1], shape=new.shape(n.output))


def _negative(new: NewNodes, n: Node) -> str:
    """Return -1 times x, but where a table holds that, perhaps with the functions around it."""
    new.require(new.graph.is_float(n.output), "its operand holds integers")
    new.require(CURVE not in new.holds, "a table holds it")
    return new("Mul", n.data, -1.0)


def _squared_difference(new: NewNodes, n: Node) -> str:
    shape = new.shape(n.output)
    apart = new("Sub", *n.inputs, gives=shape)
    return new("Mul", apart, apart, gives=shape)


def _reduce_l2(new: NewNodes, n: Node) -> str:
    return new("Sqrt", new("Sum", new("Mul", n.data, n.data), gives=new.shape(n.output), **n.attrs))


def _l2_norm(new: NewNodes, n: Node) -> str:
    """Return x / max(|x|, eps); in integers without division x rsqrt(max(sum x^2, eps^2))."""
    shape = list(new.shape(n.data))
    shape[n.attrs["axis"]] = 1
    if new.integers and "Div" not in new.holds:
        square = new("Sum", new("Mul", n.data, n.data), gives=tuple(shape), axes=(n.attrs["axis"],), keepdims=True)
        return new("Mul", n.data, new("Rsqrt", new("Max", square, float(n.attrs["eps"]) ** 2)))
    length = new("ReduceL2", n.data, gives=tuple(shape), axes=(n.attrs["axis"],), keepdims=True)
    return new("Div", n.data, new("Clamp", length, gives=tuple(shape), min=n.attrs["eps"], max=None))


def _curve(new: NewNodes, n: Node) -> str:
    """Return the steps of a curve as nodes."""
    results = {"0": n.data}
    for k, step in enumerate(steps_of(n.attrs["steps"]), 1):
        operands = (results[x] if isinstance(x, str) else x for x in step.operands)
        results[str(k)] = new(step.op, *operands, **step.attrs)
    return results[str(len(results) - 1)]


# ---------------------------------------------------------------- windows and groups


def _adaptive(new: NewNodes, n: Node, kind: str) -> str:
    """Pool windows of different sizes: gather the elements of every window along each axis, then reduce them.

    Args:
        kind: the reduction; "Sum" of elements times their shares.
    """
    x, shape = n.data, [new.shape(n.data)[0], *new.sizes(n.data)]
    for axis, count in enumerate(n.attrs["output_size"], 1 if new.channels_last else 2):
        size, shape[axis] = new.size(x, axis), count
        ends = [(k * size // count, -(-(k + 1) * size // count)) for k in range(count)]
        longest = max(high - low for low, high in ends)
        index = [[min(low + k, high - 1) for k in range(longest)] for low, high in ends]
        wide = (*shape[: axis + 1], longest, *shape[axis + 1 :])
        x = new("Gather", x, new.constant(torch.tensor(index, dtype=torch.int32)), gives=wide, axis=axis)
        if kind == "Sum":
            shares = [[1 / (high - low) if low + k < high else 0.0 for k in range(longest)] for low, high in ends]
            x = new("Mul", x, new.constant(torch.tensor(shares).reshape(-1, longest, *[1] * (len(shape) - axis - 1))))
        x = new(kind, x, gives=tuple(shape), axes=(axis + 1,), keepdims=False)
    return x


def _split_groups(new: NewNodes, n: Node) -> str:
    """Compute the groups of a convolution as convolutions of their own."""
    new.require(all(i is None or i in new.graph.weights for i in n.inputs[1:]), "its weight is computed at run time")
    groups, axis = n.attrs["groups"], len(new.shape(n.data)) - 1 if new.channels_last else 1
    tensors = [new.graph.weights[i].detach().chunk(groups) for i in n.inputs[1:] if i is not None]
    sizes = [new.size(v, axis) // groups for v in (n.data, n.output)]
    inner, outer = ((*new.shape(v)[:axis], s, *new.shape(v)[axis + 1 :]) for v, s in zip((n.data, n.output), sizes))
    results = []
    for k, parts in enumerate(zip(*tensors, strict=True)):
        part = {"start": k * sizes[0], "end": (k + 1) * sizes[0], "step": 1}
        x = new("Slice", n.data, gives=inner, axis=axis, **part)
        own = (new.constant(t.contiguous()) for t in parts)
        results.append(new(n.op, x, *own, gives=outer, **{**n.attrs, "groups": 1}))
    return new("Concat", *results, gives=new.shape(n.output), axis=axis)


# ---------------------------------------------------------------- norms and attention


def _normalised(new: NewNodes, x: str, axes: Sequence[int], eps: float, centre: bool = True) -> str:
    """Return (x - mean) / sqrt(variance + eps) over `axes`, which count from the end."""
    full = new.shape(x)
    small = tuple(1 if k - len(full) in axes else s for k, s in enumerate(full))

    def mean(of: str) -> str:
        return new("Mean", of, gives=small, axes=tuple(axes), keepdims=True)

    if centre:
        x = new("Sub", x, mean(x))
    variance = new("Add", mean(new("Mul", x, x)), eps)
    if "Rsqrt" in new.holds:
        return new("Mul", x, new("Rsqrt", variance))
    return new("Div", x, new("Sqrt", variance))


def _affine(new: NewNodes, n: Node, y: str, inner: int = 0) -> str:
    """Return y times weight plus bias, as far as they exist; `inner` axes follow their channel axis."""
    for op, p in (("Mul", n.operand("w")), ("Add", n.operand("b"))):
        if p is not None and inner and p in new.graph.weights:
            p = new.constant(new.graph.weights[p].detach().reshape(1, -1, *[1] * inner), of=[p])
        elif p is not None and inner:
            p = new.reshape(p, (1, new.size(p, 0), *[1] * inner))
        if p is not None:
            y = new(op, y, p)
    return y


def _layer_norm(new: NewNodes, n: Node, centre: bool = True) -> str:
    eps = torch.finfo(torch.float32).eps if n.attrs["eps"] is None else n.attrs["eps"]
    axes = range(-len(n.attrs["normalized_shape"]), 0)
    return _affine(new, n, _normalised(new, n.data, axes, eps, centre))


def _group_norm(new: NewNodes, n: Node) -> str:
    """Normalise groups: rows and columns are one axis, behind the groups (channels first) or before them."""
    batch, sizes = new.shape(n.data)[0], new.sizes(n.data)
    channels = sizes[-1] if new.channels_last else sizes[0]
    groups = n.attrs.get("groups", channels)
    split: Shape = (batch, groups, math.prod(sizes) // groups)
    axes: tuple[int, ...] = (-1,)
    if new.channels_last:
        split, axes = (batch, math.prod(sizes[:-1]), groups, channels // groups), (-3, -1)
    y = _normalised(new, new.reshape(n.data, split), axes, n.attrs["eps"])
    return _affine(new, n, new.reshape(y, (batch, *sizes)), inner=0 if new.channels_last else len(sizes) - 1)


def _batch_norm(new: NewNodes, n: Node) -> str:
    """Return x g + (beta - mean g) with g = gamma / sqrt(var + eps).

    Of images it is a depthwise convolution of one element, where that is held: it rounds once, and its weights, one for
    each channel and scale, not at all. A file with channels last holds float parts.
    """
    constant = all(i is None or i in new.graph.weights for i in n.inputs[1:])
    new.require(constant, "a weight or statistic is computed at run time")
    k, mean, beta = batch_norm_terms(new.graph, n)
    channels = new.shape(n.data)[1]
    if (
        "DepthwiseConv2D" in new.holds
        and len(new.shape(n.data)) == 4
        and channels is not None
        and not new.channels_last
    ):
        terms = (k.expand(channels).reshape(-1, 1, 1, 1), (beta - mean * k).expand(channels))
        weight, bias = (new.constant(v.float(), of=n.inputs[1:3], shared=False) for v in terms)
        window: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": channels}
        return new("DepthwiseConv2D", n.data, weight, bias, gives=new.shape(n.output), **window)
    shape = (-1,) if new.channels_last else (-1, *[1] * (len(new.shape(n.data)) - 2))
    factor, shift = (new.constant(v.float().reshape(shape), of=n.inputs[1:3]) for v in (k, beta - mean * k))
    return new("Add", new("Mul", n.data, factor), shift)


def _attention(new: NewNodes, n: Node) -> str:
    """Return softmax(scale q k^T + mask) v."""
    q, k, v = (i or "" for i in n.inputs[:3])
    *others, row, column = range(len(new.shape(k)))
    scores = (*new.shape(q)[:-1], new.shape(k)[-2])
    scale = new.size(q, -1) ** -0.5 if n.attrs["scale"] is None else n.attrs["scale"]
    s = _by_heads(new, q, new.transpose(k, (*others, column, row)), scores)
    s = new("Mul", s, float(scale))
    if n.attrs["is_causal"]:
        rows, columns = scores[-2:]
        if rows is None or columns is None:
            new.refuse("a causal mask needs a fixed sequence length")
        s = new("Where", new.constant(torch.ones(rows, columns, dtype=torch.bool).tril()), s, HIDDEN_SCORE)
    mask = n.operand("mask")
    if mask is not None:
        s = _masked(new, s, mask)
    in_float = "Softmax" in new.holds and not new.channels_last and not new.integers
    if in_float and (n.attrs["is_causal"] or _hides(new.graph, mask)):
        # for masked scores ONNX Runtime's softmax computes denormal numbers, which take processors seven times as long;
        # LiteRT's, whose files have channels last, computes zeros
        most = new("ReduceMax", s, gives=(*new.shape(s)[:-1], 1), axes=(-1,), keepdims=True)
        s = new("Max", s, new("Add", most, LOST_IN_SOFTMAX))
    return _by_heads(new, new("Softmax", s, axis=-1), v, new.shape(n.output))


def _masked(new: NewNodes, scores: str, mask: str) -> str:
    """Return scores with a mask: a condition, or a term; a constant term selects where it hides scores."""
    known = new.graph.weights.get(mask) if mask not in new.graph.trainable else None
    if not new.graph.is_float(mask):
        return new("Where", mask, scores, HIDDEN_SCORE)
    if known is None or (parts := split_mask(known)) is None:
        return new("Add", scores, mask)
    kept, bias = parts
    biased = new("Add", scores, new.constant(bias)) if bool(bias.any()) else scores
    return new("Where", new.constant(kept), biased, HIDDEN_SCORE)


def _hides(graph: Graph, mask: str | None) -> bool:
    """Check whether a mask may hide scores; a constant without large negative numbers is a bias."""
    known = graph.weights.get(mask or "")
    if mask is None or known is None or known.dtype == torch.bool:
        return mask is not None
    return float(known.detach().min()) < LOST_IN_SOFTMAX


def _by_heads(new: NewNodes, x: str, y: str, gives: Shape) -> str:
    """Return x y. Heads of x that share one of y are rows of one product: [.., H, T, D] becomes [.., K, T H/K, D]."""
    *lead, rows, columns = new.shape(x)
    if not new.node.attrs["enable_gqa"]:
        return new("MatMul", x, y, gives=gives)
    heads, shared = new.size(x, -3), new.size(y, -3)
    rows = None if rows is None else rows * heads // shared
    keep, group = [0] * (len(lead) - 1), (*lead[:-1], shared, rows)
    x = new("Reshape", x, gives=(*group, columns), shape=(*keep, shared, -1, 0))
    z = new("MatMul", x, y, gives=(*group, gives[-1]))
    return new("Reshape", z, gives=gives, shape=(*keep, heads, -1, 0))


# ---------------------------------------------------------------- order


def _roll(new: NewNodes, n: Node) -> str:
    """Gather the elements in their new order; where there is no kernel for that, join two slices."""
    x = n.data
    for shift, axis in zip(n.attrs["shifts"], n.attrs["axes"], strict=True):
        size, shape = new.size(x, axis), new.shape(x)
        if "Gather" in new.holds or "Slice" not in new.holds:
            index = new.constant(torch.arange(size, dtype=torch.int32).sub(shift).remainder(size))
            x = new("Gather", x, index, gives=shape, axis=axis)
        elif cut := -shift % size:
            ends = [
                new("Slice", x, gives=(*shape[:axis], to - at, *shape[axis + 1 :]), axis=axis, start=at, end=to, step=1)
                for at, to in ((cut, size), (0, cut))
            ]
            x = new("Concat", *ends, gives=shape, axis=axis)
    new.require(x != n.data, "it moves no element")
    return x


def _resize(new: NewNodes, n: Node) -> str:
    """Multiply by the matrix of cubic interpolation along each axis of space, made the last one in turn."""
    x, out, scale = n.data, new.shape(n.output), n.attrs["scale"]
    new.require(n.attrs["mode"] == "cubic" and None not in out[1:], "its interpolation is not cubic, or a size is open")
    for k, axis in enumerate((1, 2) if new.channels_last else (2, 3)):
        size, by = new.size(x, axis), scale and (scale[k], 1.0)
        how: dict[str, Any] = {"size": None if by else (out[axis], size), "scale_factor": by, "mode": "bicubic"}
        matrix = F.interpolate(torch.eye(size)[None, None], **how, align_corners=n.attrs["align_corners"])[0, 0]
        order = [*(a for a in range(4) if a != axis), axis]
        x = new.transpose(x, order) if axis < 3 else x
        x = new("Linear", x, new.constant(matrix), gives=(*new.shape(x)[:-1], out[axis]))
        x = new.transpose(x, [order.index(a) for a in range(4)]) if axis < 3 else x
    return x


def _space_to_depth(new: NewNodes, n: Node) -> str:
    """Order the new channels by (channel, row, column), as torch does."""
    b, (batch, *sizes) = n.attrs["block"], new.shape(n.data)
    if None in sizes:  # a reshape can leave one size open: join strided slices by (row, column, channel) instead
        at, axes = (3, (1, 2)) if new.channels_last else (1, (2, 3))
        parts = [p for row in _strided_parts(new, n.data, axes[0], b) for p in _strided_parts(new, row, axes[1], b)]
        return _regrouped(new, new("Concat", *parts, gives=new.shape(n.output), axis=at), b * b, at)
    h, w = new.sizes(n.data)[:2] if new.channels_last else new.sizes(n.data)[1:]
    blocks = (h // b, b, w // b, b)
    y = new.reshape(n.data, (batch, *blocks, sizes[2]) if new.channels_last else (batch, sizes[0], *blocks))
    return new.reshape(new.transpose(y, (0, 1, 3, 5, 2, 4)), new.shape(n.output))


def _strided_parts(new: NewNodes, x: str, axis: int, step: int) -> list[str]:
    """Return the elements 0, step, 2 step, .. along an axis; then 1, step + 1, .. and so on."""
    shape = tuple(s // step if s is not None and k == axis else s for k, s in enumerate(new.shape(x)))
    return [new("Slice", x, gives=shape, axis=axis, start=k, end=None, step=step) for k in range(step)]


def _channel_shuffle(new: NewNodes, n: Node) -> str:
    return _regrouped(new, n.data, n.attrs["groups"], len(new.shape(n.data)) - 1 if new.channels_last else 1)


def _regrouped(new: NewNodes, x: str, groups: int, axis: int) -> str:
    """Return groups of channels one by one: the first of each group, then the second of each."""
    shape, size = new.shape(x), new.size(x, axis)
    if None in shape[1:]:
        index = torch.arange(size, dtype=torch.int32).view(groups, -1).T.reshape(-1)
        return new("Gather", x, new.constant(index), gives=shape, axis=axis)
    y = new.reshape(x, (*shape[:axis], groups, size // groups, *shape[axis + 1 :]))
    return new.reshape(new.transpose(y, (*range(axis), axis + 1, axis, *range(axis + 2, len(shape) + 1))), shape)


def _tile(new: NewNodes, n: Node) -> str:
    """Join copies of the operand, axis by axis."""
    x, sizes, out = n.data, list(new.shape(n.data)), new.shape(n.output)
    new.require(len(sizes) == len(out), "its result has another rank than its operand")
    for axis, (have, want) in enumerate(zip(sizes, out, strict=True)):
        if have == want:
            continue
        times = want // have if have and want else 0
        why = f"it repeats axis {axis} more than {_MOST_COPIES} times, or as often as data decide"
        new.require(0 < times <= _MOST_COPIES, why)
        sizes[axis] = want
        x = new("Concat", *[x] * times, gives=tuple(sizes), axis=axis)
    return x if x != n.data else new.reshape(x, out)


def _pad(new: NewNodes, n: Node) -> str:
    """Join copies of the first and the last element of each padded axis."""
    new.require(n.attrs["mode"] == "replicate", "its padding is not a copy of the ends")
    x, sizes = n.data, list(new.shape(n.data))
    for axis, (low, high) in enumerate(n.attrs["padding"]):
        if not (low or high):
            continue
        why = f"it cuts axis {axis}, or adds more than {_MOST_COPIES} elements to it"
        new.require(0 <= min(low, high) <= max(low, high) <= _MOST_COPIES, why)
        size, one = new.size(x, axis), (*sizes[:axis], 1, *sizes[axis + 1 :])
        first, last = (new("Slice", x, gives=one, axis=axis, start=k, end=k + 1, step=1) for k in (0, size - 1))
        sizes[axis] = size + low + high
        x = new("Concat", *[first] * low, x, *[last] * high, gives=tuple(sizes), axis=axis)
    return x if x != n.data else new.reshape(x, new.shape(n.output))


def _stack(new: NewNodes, n: Node) -> str:
    axis, shape = n.attrs["axis"], list(new.shape(n.output))
    shape[axis] = 1
    return new("Concat", *(new("Unsqueeze", i, gives=tuple(shape), axes=(axis,)) for i in n.inputs), axis=axis)


def _unstack(new: NewNodes, n: Node) -> list[str]:
    axis = n.attrs["axis"]
    return [new("Select", n.data, gives=new.shape(o), axis=axis, index=k) for k, o in enumerate(n.outputs)]


# ---------------------------------------------------------------- rules by name

Rule = Callable[[NewNodes, Node], str | Sequence[str]]
_BY_NAME: dict[str, Rule] = {
    "gated": lambda new, n: new("Mul", n.data, new(n.facts.gate, n.data)),
    "rms_norm": lambda new, n: _layer_norm(new, n, centre=False),
    "hard_sigmoid": lambda new, n: new("Mul", new("Relu6", new("Add", n.data, 3.0)), 1.0 / 6.0),
    "reciprocal": lambda new, n: new("Div", 1.0, n.data),
    "rsqrt": lambda new, n: new.formula("reciprocal(sqrt(x))", x=n.data),
    "not_equal": lambda new, n: new.formula("not a == b", a=n.inputs[0], b=n.inputs[1]),
} | by_name(
    *(_curve, _softplus, _mish, _elu, _clamp, _gelu, _erf, _divide, _floor_divide, _adaptive, _split_groups),
    *(_reduce_l2, _l2_norm, _layer_norm, _group_norm, _batch_norm, _attention, _roll, _resize, _space_to_depth),
    *(_negative, _squared_difference, _channel_shuffle, _stack, _unstack, _pad, _tile, lstm, gru, rnn, grid_sample),
)
#: operator -> its rule
RULES: dict[str, Rule] = {}
read_column("decompose", lambda op, name: RULES.update({op: resolve(name, _BY_NAME)}), RULES)
