"""Procedural images of 20 classes, five shapes with four textures each, without a download.

Position, size, rotation, colours, background and noise are random, so that networks can learn the classes, but not
perfectly: small residual networks reach 85 to 90 %.
"""

import math

import torch
from torch import Tensor

CLASSES = 20
SIDE = 32
#: standard deviation of the noise on every pixel
NOISE = 0.55


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` images float32 [N, 3, 32, 32] of mean about 0, and labels int64 [N], determined by `seed`."""
    g = torch.Generator().manual_seed(seed)
    parts = [_batch(min(1000, count - start), g) for start in range(0, count, 1000)]
    x, y = zip(*parts, strict=True)
    return torch.cat(x), torch.cat(y)


def _batch(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *(shape or (1, 1)), generator=g)

    label = torch.randint(CLASSES, (n,), generator=g)
    row, column = torch.meshgrid(torch.arange(SIDE) + 0.5, torch.arange(SIDE) + 0.5, indexing="ij")
    size, turn = uniform(6, 11), uniform(0, 2 * math.pi)
    dy, dx = row - uniform(11, 21), column - uniform(11, 21)
    u, v = (turn.cos() * dx + turn.sin() * dy) / size, (turn.cos() * dy - turn.sin() * dx) / size
    shapes = torch.stack(_shapes(u, v))
    inside = torch.sigmoid(-4 * shapes[label % 5, torch.arange(n)] * size)  # soft edge, about a pixel wide
    waves, phase = uniform(0.45, 0.7) * math.pi, uniform(0, 2 * math.pi)
    a, b = torch.sin(waves * u * size + phase), torch.sin(waves * v * size + phase)
    textures = torch.stack([torch.ones_like(u), (a > 0).float(), (a * b > 0).float(), (a + b > 0.4).float()])
    ink = inside * textures[label // 5, torch.arange(n)]
    slope = uniform(-0.6, 0.6, 3, 1, 1) * (row / SIDE - 0.5) + uniform(-0.6, 0.6, 3, 1, 1) * (column / SIDE - 0.5)
    back, fore = uniform(-0.7, 0.7, 3, 1, 1), uniform(0.5, 1.2, 3, 1, 1)
    sign = torch.where(uniform(0, 1, 1, 1, 1) < 0.5, -1.0, 1.0)  # lighter or darker than the background
    x = back + slope + sign * fore * ink.unsqueeze(1)
    return x + NOISE * torch.randn(x.shape, generator=g), label


def _shapes(u: Tensor, v: Tensor) -> list[Tensor]:
    """Return signed distances (negative inside) in units of the size: disk, square, triangle, cross, ring."""
    r, au, av = (u * u + v * v).sqrt(), u.abs(), v.abs()
    triangle = torch.maximum(-v - 0.5, 0.866 * au + 0.5 * v - 0.5)
    cross = torch.maximum(torch.minimum(au, av) - 0.3, torch.maximum(au, av) - 1)
    return [r - 0.9, torch.maximum(au, av) - 0.8, triangle, cross, (r - 0.7).abs() - 0.25]
