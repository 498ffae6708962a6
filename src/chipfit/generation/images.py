"""Images as trainable noise: where they start, and how noise becomes an input of the network."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.generation.options import Generation
from chipfit.graph.ir import Graph
from chipfit.quantizers.tables import constant

#: (offset, deviation) that inputs may have: standardised, -1..1, 0..1 and 0..255
RANGES = ((0.0, 1.0), (0.0, 0.5), (0.5, 0.25), (127.5, 64.0))
#: weights of the smoothing filter along an axis
_BINOMIAL = (1 / 4, 1 / 2, 1 / 4)


@dataclass(frozen=True)
class Input:
    """One input of a graph, as images are made for it."""

    shape: tuple[int, ...]  #: of one sample, as the network takes it
    dtype: torch.dtype
    channels_last: bool
    options: Generation
    offset: float = 0.0
    deviation: float = 1.0

    @property
    def is_image(self) -> bool:
        """True if a sample has channels and two spatial axes."""
        return len(self.shape) == 3

    def start(self, count: int, draw: torch.Generator) -> Tensor:
        """Return noise for a number of images, [count, C, H + extra, W + extra], or [count, *shape] if not images."""
        shape = list(self.shape)
        if self.is_image:
            shape = [shape[-1], *shape[:-1]] if self.channels_last else shape
            shape[1:] = [s + extra for s, extra in zip(shape[1:], self.options.extra_pixels, strict=True)]
        noise = torch.randn(count, *shape, generator=draw)
        if self.options.start == "diverse":
            own = (count, shape[0], *(1 for _ in shape[1:]))
            noise = noise * torch.randn(own, generator=draw) + torch.randn(own, generator=draw)
        return noise

    def __call__(self, noise: Tensor, draw: torch.Generator | None = None) -> Tensor:
        """Return the images of noise, as the network takes them.

        Args:
            draw: mirrors and cuts at random; None: the image as it is, of the middle.
        """
        x = self._filtered(noise, draw) if self.is_image else noise
        x = self.offset + self.deviation * x
        if self.options.bounds is not None:
            low, high = (_per_channel(b, x) for b in self.options.bounds)
            inside = x.clamp(low, high)
            x = inside if draw is None else x + (inside - x).detach()  # beyond the bounds, gradients still lead back
        if self.is_image and self.channels_last:
            x = x.permute(0, 2, 3, 1)
        return x.to(self.dtype)

    def _filtered(self, x: Tensor, draw: torch.Generator | None) -> Tensor:
        """Return images smoothed, mirrored and cut to their size."""
        if self.options.smooth:
            x = smoothed(x)
        if draw is not None and self.options.flip and torch.rand((), generator=draw) < 0.5:
            x = x.flip(-1)
        for axis, extra in zip((2, 3), self.options.extra_pixels, strict=True):
            first = extra // 2 if draw is None else int(torch.randint(extra + 1, (), generator=draw))
            x = x.narrow(axis, first, x.shape[axis] - extra)
        return x


def smoothed(x: Tensor) -> Tensor:
    """Return images [N, C, H, W] averaged over 3 x 3 pixels with binomial weights; edges continue outwards."""
    row = constant(_BINOMIAL, x)
    kernel = (row[:, None] * row).expand(x.shape[1], 1, 3, 3).contiguous()
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, groups=x.shape[1])


def _per_channel(bound: Any, x: Tensor) -> Tensor:
    """Return a bound that broadcasts against inputs with channels on axis 1."""
    numbers = torch.as_tensor(bound, dtype=x.dtype)
    values = constant(tuple(numbers.reshape(-1).tolist()), x)
    return values.reshape(-1, *(1 for _ in x.shape[2:])) if numbers.dim() else values


def is_channels_last(graph: Graph, name: str) -> bool:
    """Return whether every reader of an input first moves its last axis to the place of channels."""
    last = len(graph.shape(name)) - 1
    moves = [n.op == "Transpose" and tuple(n.attrs["perm"])[1:2] == (last,) for n in graph.users().get(name, [])]
    return all(moves) and bool(moves)
