"""Inputs of the network made from trainable noise: its start, and the operations that make an image of it."""

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
    """The description of one input of a graph, which makes its values from noise."""

    shape: tuple[int, ...]  #: shape of one sample, in the layout of the network
    dtype: torch.dtype
    channels_last: bool
    options: Generation
    offset: float = 0.0
    deviation: float = 1.0

    @property
    def is_image(self) -> bool:
        """True if a sample has channels and two spatial axes."""
        return len(self.shape) == 3

    def start(self, count: int, generator: torch.Generator) -> Tensor:
        """Return noise for a number of images, [count, C, H + extra, W + extra], or [count, *shape] if not images."""
        shape = list(self.shape)
        if self.is_image:
            shape = [shape[-1], *shape[:-1]] if self.channels_last else shape
            shape[1:] = [s + extra for s, extra in zip(shape[1:], self.options.extra_pixels, strict=True)]
        noise = torch.randn(count, *shape, generator=generator)
        if self.options.start == "diverse":
            own = (count, shape[0], *(1 for _ in shape[1:]))
            noise = noise * torch.randn(own, generator=generator) + torch.randn(own, generator=generator)
        return noise

    def __call__(self, noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return images made of noise, in the layout and type of the network.

        Args:
            generator: for random mirroring and cropping; None crops the centre and does not mirror.
        """
        x = self._filtered(noise, generator) if self.is_image else noise
        x = self.offset + self.deviation * x
        if self.options.bounds is not None:
            low, high = (_per_channel(b, x) for b in self.options.bounds)
            inside = x.clamp(low, high)
            # in training gradients pass the bounds, so that values beyond them can return
            x = inside if generator is None else x + (inside - x).detach()
        if self.is_image and self.channels_last:
            x = x.permute(0, 2, 3, 1)
        return x.to(self.dtype)

    def _filtered(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return images smoothed, mirrored and cut to their size."""
        if self.options.smooth:
            x = smoothed(x)
        if generator is not None and self.options.flip and torch.rand((), generator=generator) < 0.5:
            x = x.flip(-1)
        for axis, extra in zip((2, 3), self.options.extra_pixels, strict=True):
            first = extra // 2 if generator is None else int(torch.randint(extra + 1, (), generator=generator))
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
