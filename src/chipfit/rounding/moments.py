"""Second moments of a linear operator: of its inputs, and of its inputs with its wanted outputs.

An operator is seen as g groups of y = W x + b, W [g, O/g, K]: x are the K inputs that one output position reads in one
group, K = input channels per group x kernel size. A transposed convolution is seen as a convolution of stride 1 over
an input with zeros in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.graph.ir import Node
from chipfit.graph.linear import TRANSPOSED, from_groups, in_groups, places


def as_rows(node: Node, w: Tensor) -> Tensor:
    """Return a weight as [g, O/g, K], in the order of the inputs that `patches` returns."""
    parts = in_groups(node, w)
    if node.op in TRANSPOSED:
        parts = parts.flip(list(range(3, parts.dim())))
    return parts.flatten(2)


def from_rows(node: Node, rows: Tensor, like: Tensor) -> Tensor:
    """Return rows as a weight of the shape of `like`: the inverse of `as_rows`."""
    parts = rows.view(in_groups(node, like).shape)
    if node.op in TRANSPOSED:
        parts = parts.flip(list(range(3, parts.dim())))
    return from_groups(node, parts).contiguous()


def positions(node: Node, y: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Return at most `most` positions of an output, drawn without replacement; for Linear, within one sample.

    Args:
        generator: of the CPU, so that positions do not depend on the device.
    """
    size = places(node, y.shape)
    found = torch.randperm(size, generator=generator)[:most] if most < size else torch.arange(size)
    return found.to(y.device, non_blocking=True)


def targets(node: Node, y: Tensor, where: Tensor) -> Tensor:
    """Return an output at these positions, [g, O/g, samples x positions]."""
    if node.facts.kind == "linear":
        return y.reshape(y.shape[0], -1, y.shape[-1])[:, where].flatten(0, 1).t()[None]
    g, y = node.attrs["groups"], _select_positions(y, where) if len(where) < places(node, y.shape) else y.flatten(2)
    return y.transpose(0, 1).reshape(g, y.shape[1] // g, -1)


def patches(node: Node, x: Tensor, w: Tensor, where: Tensor, zero: float = 0.0) -> Tensor:
    """Return the inputs of these output positions, [g, K, samples x positions]; `zero` stands for 0 in `x`."""
    if node.facts.kind == "linear":
        return x.reshape(x.shape[0], -1, x.shape[-1])[:, where].flatten(0, 1).t()[None]
    kernel, dims = w.shape[2:], w.dim() - 2
    stride, dilation, padding, g = (node.attrs[k] for k in ("stride", "dilation", "padding", "groups"))
    if node.op in TRANSPOSED:
        x = _insert_zeros(x, stride, zero)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        extra = node.attrs["output_padding"]
        padding = [(r - lo, r - hi + e) for r, (lo, hi), e in zip(reach, padding, extra, strict=True)]
        stride = (1,) * dims
    around = [p for lo_hi in reversed(list(padding)) for p in lo_hi]
    x = F.pad(x, around, value=zero) if any(around) else x
    sizes = list(zip(x.shape[2:], dilation, kernel, stride, strict=True))
    # not torch.unravel_index, which loads a computer algebra system
    at, reads, left = where.new_zeros(1), where.new_zeros(1), prod(_output_size(*size) for size in sizes)
    for n, d, k, s in sizes:  # start of a patch in one image, and offsets of its inputs from there
        left //= _output_size(n, d, k, s)
        at, where = at * n + where // left * s, where % left
        reads = (reads.unsqueeze(1) * n + torch.arange(k, device=where.device) * d).flatten()
    read = _select_positions(x, (reads.unsqueeze(1) + at).flatten()).unflatten(2, (-1, len(at)))  # [N, C, kernel, P]
    return read.permute(1, 2, 0, 3).reshape(g, x.shape[1] // g * prod(kernel), -1)


def _select_positions(x: Tensor, where: Tensor) -> Tensor:
    """Return some positions of images [N, C, *S], as [N, C, P]; whole rows of channels in channels-last memory."""
    if x.stride(1) == 1:
        return x.movedim(1, -1).flatten(1, -2).index_select(1, where).transpose(1, 2)
    flat = x.flatten(2)
    return flat.gather(2, where.expand(*flat.shape[:2], -1))


def _output_size(size: int, dilation: int, kernel: int, stride: int) -> int:
    """Return the number of output positions along one axis of a padded image."""
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def _insert_zeros(x: Tensor, stride: tuple[int, ...], zero: float) -> Tensor:
    """Insert zeros between the positions of an image."""
    if all(s == 1 for s in stride):
        return x
    out = x.new_full((*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True))), zero)
    index = [slice(None), slice(None), *(slice(None, None, s) for s in stride)]
    out[tuple(index)] = x
    return out


#: rows of a symmetric matrix that are summed at a time: few, so that little of its mirror image is computed
ROWS = 144


@dataclass
class Moments:
    """Sums over positions, per group; float32, shapes [g, K, K], [g, O/g, K], [g, K] and [g, O/g]."""

    xx: Tensor
    tx: Tensor
    x: Tensor
    t: Tensor
    count: int = 0

    @classmethod
    def empty(cls, w: Tensor) -> Moments:
        """Return empty moments for a weight [g, O/g, K]."""
        g, o, k = w.shape
        return cls(w.new_zeros(g, k, k), w.new_zeros(g, o, k), w.new_zeros(g, k), w.new_zeros(g, o))

    def add(self, x: Tensor, t: Tensor) -> None:
        """Add inputs [g, K, n] and their wanted outputs [g, O/g, n]."""
        for start in range(0, x.shape[1], ROWS):  # one triangle; the other is its mirror image, see `_squares`
            rows = slice(start, start + ROWS)
            self.xx[:, rows, start:].baddbmm_(x[:, rows], x[:, start:].transpose(1, 2))
        self.tx.baddbmm_(t, x.transpose(1, 2))
        self.x += x.sum(2)
        self.t += t.sum(2)
        self.count += x.shape[2]

    def means(self) -> tuple[Tensor, Tensor]:
        """Return E[x] and E[t]."""
        return self.x / self.count, self.t / self.count

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return the covariances H of x with itself and C of t with x, for an operator whose bias fits the means."""
        x, t = self.means()
        return (
            self._squares().sub_(x.unsqueeze(2) * x.unsqueeze(1)),
            self.tx / self.count - t.unsqueeze(2) * x.unsqueeze(1),
        )

    def with_fixed_bias(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[x x'] and E[(t - b) x'], for an operator whose bias b [g, O/g] stays."""
        x, _ = self.means()
        return self._squares(), self.tx / self.count - bias.unsqueeze(2) * x.unsqueeze(1)

    def _squares(self) -> Tensor:
        """Return E[x x'] in the memory of the sums, to which nothing can be added afterwards."""
        upper, self.xx = self.xx.triu_(), self.xx.new_zeros(())
        return upper.add_(upper.triu(1).transpose(1, 2)).div_(self.count)
