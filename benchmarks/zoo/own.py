"""Architectures that our libraries do not have, in a few lines each: detector, diffusion, speech, vocoder ..."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(i: int, o: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(o), nn.SiLU())


class CrossStage(nn.Module):
    """A cross-stage block: two halves, one of which passes residual blocks, concatenated; as in YOLO v8."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.first, self.last = conv(i, o, 1), conv(o + o // 2, o, 1)
        self.block = nn.Sequential(conv(o // 2, o // 2), conv(o // 2, o // 2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, 1)
        return self.last(torch.cat((a, b, b + self.block(b)), 1))


class Detector(nn.Module):
    """A detector of boxes and classes at two scales, decoded on a grid of anchor points; as in YOLO."""

    def __init__(self, classes: int = 5, bins: int = 4) -> None:
        super().__init__()
        self.bins = bins
        self.stem, self.down = (
            nn.Sequential(conv(3, 8, 3, 2), conv(8, 16, 3, 2), CrossStage(16, 16)),
            conv(16, 32, 3, 2),
        )
        self.deep, self.pyramid = CrossStage(32, 32), conv(80, 32, 1)
        self.squeeze, self.neck = conv(32, 16, 1), CrossStage(32, 16)
        self.heads = nn.ModuleList(nn.Conv2d(c, 4 * bins + classes, 1) for c in (16, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.stem(x)
        deep = self.squeeze(self.deep(self.down(fine)))
        pools = [deep]
        for _ in range(4):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        deep = self.pyramid(torch.cat(pools, 1))
        fine = self.neck(torch.cat((F.interpolate(deep, scale_factor=2)[:, :16], fine), 1))
        boxes, scores = [], []
        for k, (head, y) in enumerate(zip(self.heads, (fine, deep))):
            b, _, h, w = y.shape
            y = head(y).flatten(2)
            ys, xs = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
            at = torch.stack((xs, ys)).flatten(1)
            sides = y[:, : 4 * self.bins].view(b, 4, self.bins, h * w).softmax(2)
            sides = torch.einsum("bskn,k->bsn", sides, torch.arange(self.bins, dtype=torch.float32))
            boxes.append(torch.cat((at - sides[:, :2], at + sides[:, 2:]), 1) * 2 ** (k + 2))
            scores.append(y[:, 4 * self.bins :].sigmoid())
        return torch.cat(boxes, 2), torch.cat(scores, 2)


class Diffusion(nn.Module):
    """A small U-Net with group norms, attention in the middle, and the step as sines and cosines."""

    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.c, self.enter, self.leave = c, nn.Conv2d(3, c, 3, 1, 1), nn.Conv2d(c, 3, 3, 1, 1)
        self.time = nn.Sequential(nn.Linear(c, c), nn.SiLU(), nn.Linear(c, c))
        self.norms = nn.ModuleList(nn.GroupNorm(4, c) for _ in range(5))
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, 1, 1) for _ in range(4))
        self.down, self.up = nn.Conv2d(c, c, 3, 2, 1), nn.ConvTranspose2d(c, c, 4, 2, 1)
        self.qkv, self.out = nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def block(self, x: Tensor, t: Tensor, k: int) -> Tensor:
        return x + self.convs[k](F.silu(self.norms[k](x)) + t[:, :, None, None])

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(self.c // 2) * 0.5)
        angles = step[:, None] * rates[None]
        t = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        x = skip = self.block(self.enter(x), t, 0)
        x = self.block(self.down(x), t, 1)
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norms[4](x)).reshape(b, 3, 2, c // 2, h * w).unbind(1)
        weights = torch.einsum("bhcn,bhcm->bhnm", q, k).mul((c // 2) ** -0.5).softmax(-1)
        x = x + self.out(torch.einsum("bhnm,bhcm->bhcn", weights, v).reshape(b, c, h, w))
        x = self.block(x, t, 2)
        return self.leave(self.block(self.up(x) + skip, t, 3))


class Rotary(nn.Module):
    """A decoder: RMS norms, rotary positions, grouped heads, a gate, written as its users write it."""

    def __init__(self, d: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, d // heads
        self.embed, self.head = nn.Embedding(50, d), nn.Linear(d, 50, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.RMSNorm(d),
                    "n2": nn.RMSNorm(d),
                    "q": nn.Linear(d, d, False),
                    "kv": nn.Linear(d, d, False),
                    "out": nn.Linear(d, d, False),
                    "gate": nn.Linear(d, 2 * d, False),
                    "up": nn.Linear(d, 2 * d, False),
                    "down": nn.Linear(2 * d, d, False),
                }
            )
            for _ in range(layers)
        )

    def turned(self, x: Tensor) -> Tensor:
        rates = 1.0 / 10000 ** (torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(x.shape[-2]).float(), rates)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).flatten(-2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, n, d = x.shape
        future = torch.full((n, n), float("-inf")).triu(1)
        for layer in self.layers:
            y = layer["n1"](x)
            q = self.turned(layer["q"](y).view(b, n, self.heads, -1).transpose(1, 2))
            k, v = layer["kv"](y).view(b, n, 2, self.heads // 2, self.size).permute(2, 0, 3, 1, 4)
            k, v = self.turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            weights = (q @ k.mT / self.size**0.5 + future).softmax(-1)
            x = x + layer["out"]((weights @ v).transpose(1, 2).reshape(b, n, d))
            y = layer["n2"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return self.head(x)


class Conformer(nn.Module):
    """A speech encoder: convolution and attention over frames, with a gated linear unit."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.sub = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.into, self.attend = nn.Linear(8 * 4, d), nn.MultiheadAttention(d, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.widen, self.narrow = nn.Conv1d(d, 2 * d, 1), nn.Conv1d(d, d, 1)
        self.depth, self.norm = nn.Conv1d(d, d, 7, 1, 3, groups=d), nn.BatchNorm1d(d)
        self.mlp, self.head = nn.Sequential(nn.Linear(d, 64), nn.SiLU(), nn.Linear(64, d)), nn.Linear(d, 10)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.sub(frames[:, None]).transpose(1, 2).flatten(2)
        x = self.into(x)
        x = x + 0.5 * self.mlp(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        y = F.glu(self.widen(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.narrow(F.silu(self.norm(self.depth(y)))).transpose(1, 2)
        return self.head(x).log_softmax(-1)


class Vocoder(nn.Module):
    """A vocoder: transposed convolutions with weight norm, dilated residual ones, tanh; as in HiFi-GAN."""

    def __init__(self, c: int = 16) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.enter, self.leave = norm(nn.Conv1d(20, c, 7, padding=3)), norm(nn.Conv1d(c // 4, 1, 7, padding=3))
        self.ups = nn.ModuleList(norm(nn.ConvTranspose1d(c >> k, c >> k + 1, 8, 4, 2)) for k in range(2))
        self.blocks = nn.ModuleList(
            nn.ModuleList(norm(nn.Conv1d(c >> k + 1, c >> k + 1, 3, dilation=d, padding=d)) for d in (1, 3))
            for k in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for up, block in zip(self.ups, self.blocks):
            x = up(F.leaky_relu(x, 0.1))
            for layer in block:
                x = x + layer(F.leaky_relu(x, 0.1))
        return torch.tanh(self.leave(F.leaky_relu(x)))


class Recommender(nn.Module):
    """A recommender: embeddings of categories, products of all pairs of features, an MLP; as in DLRM."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, d) for n in (30, 20, 10))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, d), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(d + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        x = self.bottom(numbers)
        rows = torch.stack([x, *(t(kinds[:, k]) for k, t in enumerate(self.tables))], 1)
        products = rows @ rows.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top(torch.cat((x, products[:, i, j]), 1)))


class Tagger(nn.Module):
    """A tagger of tokens: a bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(32, 5)
        self.rnn = nn.LSTM(16, 16, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class Matcher(nn.Module):
    """A matcher of normalized descriptors with temperature; a shifted copy is written in place by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 8, 3, 2), conv(8, 16, 3, 2))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = self.body(a), self.body(b)
        shifted = torch.zeros_like(x)
        shifted[:, :8, 1:] = x[:, :8, :-1]
        shifted[:, 8:, :-1] = x[:, 8:, 1:]
        x, y = (F.normalize(v.flatten(2), dim=1) for v in (shifted + x, y))
        return (x.transpose(1, 2) @ y * self.temperature.exp()).softmax(-1)


class Odds(nn.Module):
    """A collection of rarer operators: uneven pools, CELU, thresholds, flips, 1-D resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 5, 2, 2), nn.Conv2d(12, 12, 3, 1, 1, groups=3)
        self.up, self.head = nn.ConvTranspose2d(12, 12, 4, 2, 1, groups=3), nn.Linear(12 * 9, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.celu(self.first(x + x.flip(-1)), 0.7)
        x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        x = F.threshold(self.second(x), 0.1, 0.0) + torch.erf(x)
        x = F.adaptive_avg_pool2d(self.up(x), (7, 3))
        x = F.interpolate(x.flatten(2), scale_factor=2.0, mode="linear")
        return self.head(F.adaptive_max_pool1d(x, 9).flatten(1))
