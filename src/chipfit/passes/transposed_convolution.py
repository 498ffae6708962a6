"""Compute transposed convolutions as convolutions; with strides, output channels are the places between two inputs.

Source: sub-pixel convolution [Shi et al., Is the deconvolution layer the same as a convolutional layer?, 2016].
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from chipfit.graph.edit import new_name, replace_node
from chipfit.graph.folds import checksum
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import TRANSPOSED, bias_or_zero, is_linear, with_bias
from chipfit.passes.rewriting import NodeTest, Readers, Rewritten
from chipfit.registry import register


@register("pass", "transposed_convolution", stage="rewrite", after=("collapse_linear",), needs=("in_integers",))
def transposed_convolution(graph: Graph, in_integers: NodeTest) -> Rewritten:
    """Replace transposed convolutions without an integer kernel where convolutions and DepthToSpace have one.

    With stride s and a kernel of k <= s M elements, y[s q + r - p] = sum over m of W[s m + r] x[q - m]: each r is an
    output channel of a convolution of M elements over x, padded by M - 1 zeros; DepthToSpace interleaves them, and p
    elements are cut off in front. The products are as many if s divides k. With stride 1 it is one convolution by the
    kernel turned around, with groups and dilation, which few kernels of transposed convolutions have.
    """
    graph, notes = graph.copy(), list[str]()
    of_images = [n for n in graph.nodes if n.op in TRANSPOSED and len(n.attrs["stride"]) == 2]
    for n in [n for n in of_images if is_linear(graph, n)]:
        trial, turns = graph.copy(), set(n.attrs["stride"]) == {1}
        if Readers(graph).why_fixed(n) or in_integers(graph, n):
            continue
        made = _turned(trial, n) if turns else _replaced(trial, n) if _fits(graph, n) else []
        if made and all(in_integers(trial, m) for m in made):
            graph = trial
            how = "a convolution" if turns else "a convolution and DepthToSpace"
            notes.append(f"'{n.display_name}' runs as {how}, which {'has an' if turns else 'have'} integer kernel")
    return Rewritten(graph, notes)


def _turned(graph: Graph, n: Node) -> list[Node]:
    """Replace a transposed convolution of stride 1, in place, if no zeros at its border are cut off."""
    a, w = n.attrs, graph.weights[n.weight].detach()  # [C, O / groups, *k]
    reach = [d * (k - 1) for d, k in zip(a["dilation"], w.shape[2:], strict=True)]
    ends = zip(reach, a["padding"], a["output_padding"], strict=True)
    padding = tuple((r - low, r - high + more) for r, (low, high), more in ends)
    if min(p for pair in padding for p in pair) < 0:
        return []
    w = w.unflatten(0, (a["groups"], -1)).transpose(1, 2).flatten(0, 1).flip(*range(2, w.dim()))
    attrs = {"stride": a["stride"], "padding": padding, "dilation": a["dilation"], "groups": a["groups"]}
    conv = n.with_(op="DepthwiseConv2D" if w.shape[1] == 1 < a["groups"] else "Conv2D", attrs=attrs)
    fold, bias = graph.folds.get(n.weight), graph.weights[n.bias or n.weight]
    if fold is not None and checksum(graph.weights[n.weight], bias) == fold.checksum:
        graph.folds[n.weight] = replace(fold, checksum=checksum(w, bias))
    graph.weights[n.weight] = w.contiguous()
    replace_node(graph, n, conv)
    return [conv]


def _fits(graph: Graph, n: Node) -> bool:
    """Check for equal strides, and an output that only windows reach.

    A batch norm that is folded into the weights, for training to fold it anew, belongs to their channels.
    """
    a = n.attrs
    s = a["stride"][0]
    plain = set(a["stride"]) == {s} and s > 1 and set(a["dilation"]) == {1}
    reached = all(back >= 0 for _, back in _cuts(graph, n))
    return plain and reached and n.weight not in graph.folds


def _elements(graph: Graph, n: Node) -> list[int]:
    """Return M, the elements of the convolution along each axis."""
    return [-(-k // n.attrs["stride"][0]) for k in graph.weights[n.weight].shape[2:]]


def _cuts(graph: Graph, n: Node) -> list[tuple[int, int]]:
    """Return what is cut off in front of and behind the interleaved numbers along each axis."""
    s, sizes = n.attrs["stride"][0], graph.weights[n.weight].shape[2:]
    ends = zip(_elements(graph, n), sizes, n.attrs["padding"], n.attrs["output_padding"], strict=True)
    return [(low, s * m - k + high - more) for m, k, (low, high), more in ends]


def _replaced(graph: Graph, n: Node) -> list[Node]:
    """Replace a transposed convolution, in place; return what computes its output instead.

    A clip that alone reads the result is computed before its numbers are interleaved: convolutions fuse it.
    """
    s, sizes = n.attrs["stride"][0], graph.shape(n.data)[2:]
    kernel, cuts = _elements(graph, n), _cuts(graph, n)
    out_channels = graph.weights[n.weight].shape[1] * n.attrs["groups"]
    conv = _convolution(graph, n, s, kernel)
    grown = [None if size is None else size + m - 1 for size, m in zip(sizes, kernel, strict=True)]
    made, last = [conv], n.output
    channels = graph.weights[n.weight].shape[0]
    _add_value(graph, conv.output, n, channels, grown)
    act = Readers(graph).only(n.output)
    if act is not None and act.clip_range is not None:
        clip = act.with_(inputs=(conv.output,), outputs=(new_name(graph, f"{act.output}_parts"),))
        _add_value(graph, clip.output, n, channels, grown)
        graph.nodes.remove(act)
        del graph.values[n.output]
        made, last = [*made, clip], act.output
    shape = [None if size is None else s * size for size in grown]
    steps: list[tuple[str, str, dict[str, Any], list[int | None]]] = [("depth", "DepthToSpace", {"block": s}, shape)]
    for axis, (front, back) in enumerate(cuts, 2):
        if front or back:
            cut = {"axis": axis, "start": front, "end": -back or None, "step": 1}
            shape = [d if k != axis - 2 or d is None else d - front - back for k, d in enumerate(shape)]
            steps.append((f"slice{axis}", "Slice", cut, shape))
    for k, (suffix, op, attrs, shape) in enumerate(steps, 1):
        out = last if k == len(steps) else new_name(graph, f"{n.output}_{suffix}")
        if out != last:
            _add_value(graph, out, n, out_channels, shape)
        name = new_name(graph, f"{n.name}_{suffix}")
        made.append(n.with_(name=name, op=op, inputs=(made[-1].output,), outputs=(out,), attrs=attrs))
    replace_node(graph, n, *made)
    return made


def _convolution(graph: Graph, n: Node, s: int, kernel: list[int]) -> Node:
    """Return the convolution, whose output channels are [groups, O / groups, s, s]; rearrange weight and bias."""
    groups, w = n.attrs["groups"], graph.weights[n.weight].detach()  # [C, O / groups, *k]
    w = F.pad(w, [0, s * kernel[1] - w.shape[3], 0, s * kernel[0] - w.shape[2]])
    parts = w.reshape(groups, -1, w.shape[1], kernel[0], s, kernel[1], s).flip(3, 5)  # [G, C / G, O / G, M, s, M, s]
    graph.weights[n.weight] = parts.permute(0, 2, 4, 6, 1, 3, 5).reshape(-1, parts.shape[1], *kernel).contiguous()
    padding = tuple((m - 1, m - 1) for m in kernel)
    attrs = {"stride": (1, 1), "padding": padding, "dilation": (1, 1), "groups": groups}
    op = "DepthwiseConv2D" if parts.shape[1] == 1 < groups else "Conv2D"
    conv = n.with_(op=op, attrs=attrs, outputs=(new_name(graph, f"{n.output}_parts"),))
    if n.bias is None:
        return conv
    return with_bias(graph, conv, bias_or_zero(graph, n).repeat_interleave(s * s))


def _add_value(graph: Graph, name: str, like: Node, channels: int, sizes: Sequence[int | None]) -> None:
    """Add a value [N, channels, *sizes] of the type of a node's data."""
    shape = (graph.shape(like.data)[0], channels, *sizes)
    graph.values[name] = replace(graph.values[like.data], name=name, shape=shape)
