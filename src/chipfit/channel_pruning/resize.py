"""The network without some of its channels: smaller weights and values, and attributes that fit them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_depthwise

#: an axis of a value or weight
Axis = tuple[str, int]


class Kept(NamedTuple):
    """The channels of a value that stay."""

    axis: int
    rank: int  #: of the value
    mask: Tensor  #: [C] bool

    @property
    def number(self) -> int:
        return int(self.mask.sum())


def resized(node: Node, kept: Mapping[str, Kept]) -> Node:
    """Return a node whose attributes fit values without some channels.

    Args:
        kept: value -> its channels that stay.
    """
    attrs: dict[str, Any] = dict(node.attrs)
    made, read = kept.get(node.output), kept.get(node.inputs[0] or "")
    if made and "shape" in attrs and (attrs["shape"][made.axis] or -1) > 0:
        attrs["shape"] = tuple(made.number if k == made.axis else s for k, s in enumerate(attrs["shape"]))
    if made and len(attrs.get("normalized_shape", ())) == 1 and made.axis == made.rank - 1:
        attrs["normalized_shape"] = (made.number,)
    along = (
        read is not None and "axis" in attrs and attrs["axis"] is not None and attrs["axis"] % read.rank == read.axis
    )
    if read and along and "sizes" in attrs:
        ends = [sum(attrs["sizes"][: k + 1]) for k in range(len(attrs["sizes"]))]
        parts = zip([0, *ends], ends, strict=False)
        attrs["sizes"] = tuple(int(read.mask[start:end].sum()) for start, end in parts)
    if read and along and "start" in attrs and attrs["step"] == 1:
        start, end, _ = slice(attrs["start"], attrs["end"]).indices(len(read.mask))
        attrs["start"], attrs["end"] = int(read.mask[:start].sum()), int(read.mask[:end].sum())
    return node.with_(attrs=attrs)


def stays(units: Mapping[Axis, Tensor], removed: set[int]) -> dict[Axis, Tensor]:
    """Return for each axis which channels stay, [C] bool, if these units are removed."""
    gone = torch.tensor(sorted(removed), dtype=torch.int64)
    return {axis: ~torch.isin(of, gone) for axis, of in units.items()}


def kept_channels(graph: Graph, masks: Mapping[Axis, Tensor]) -> dict[str, Kept]:
    """Return the channels of each value that stay."""
    return {v: Kept(a, len(graph.shape(v)), mask) for (v, a), mask in masks.items() if v in graph.values}


def without(graph: Graph, units: Mapping[Axis, Tensor], removed: set[int]) -> Graph:
    """Return the graph without the channels of these units.

    Args:
        units: axis of a value or weight -> the unit of each channel.
    """
    masks = stays(units, removed)
    out, kept = graph.copy(), kept_channels(graph, masks)
    by_tensor: dict[int, Tensor] = {}  # tied weights stay one tensor
    for (name, axis), mask in masks.items():
        if name in graph.weights:
            w = out.weights[name].detach()
            out.weights[name] = w.index_select(axis, mask.nonzero()[:, 0])
    for name, w in graph.weights.items():
        if out.weights[name] is not w:
            out.weights[name] = by_tensor.setdefault(id(w), out.weights[name])
    for name, k in kept.items():
        value = out.values[name]
        shape = tuple(k.number if a == k.axis else s for a, s in enumerate(value.shape))
        out.values[name] = replace(value, shape=shape)
    out.nodes = [_with_groups(graph, resized(n, kept), kept) for n in graph.nodes]
    return out


def _with_groups(graph: Graph, node: Node, kept: Mapping[str, Kept]) -> Node:
    """Return a depthwise convolution with as many groups as it reads channels."""
    if "groups" not in node.attrs or not is_depthwise(graph, node) or node.data not in kept:
        return node
    return node.with_(attrs={**node.attrs, "groups": kept[node.data].number})
