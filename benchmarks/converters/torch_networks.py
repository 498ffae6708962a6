"""Thirty small PyTorch networks of all kinds, with batches.

Weights are random, and norms have statistics as after training.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from benchmarks.converters import enters
from benchmarks.models import BasicBlock, conv_bn
from benchmarks.small import SMALL
from torch import Tensor, nn

Batch = Callable[[int], Tensor | tuple[Tensor, ...]]
#: name -> network, and batches of a number of samples
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {}
network = enters(NETWORKS)


def images(size: int = 24, channels: int = 3) -> Batch:
    """Return smooth images with noise, [N, channels, size, size]."""

    def batch(n: int) -> Tensor:
        coarse = torch.randn(n, channels, size // 4, size // 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
        return coarse + 0.3 * torch.randn(n, channels, size, size)

    return batch


def walks(length: int = 40, channels: int = 8) -> Batch:
    """Return random walks, [N, channels, length]."""
    return lambda n: (0.3 * torch.randn(n, channels, length)).cumsum(-1)


def tokens(length: int = 16, words: int = 64) -> Batch:
    return lambda n: torch.randint(0, words, (n, length))


def vectors(size: int = 32) -> Batch:
    return lambda n: torch.randn(n, size) @ torch.randn(size, size, generator=torch.Generator().manual_seed(5)) / 4


@torch.no_grad()
def with_statistics(model: nn.Module) -> nn.Module:
    """Set statistics of batch norms, biases and slopes as after training."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
            m.running_mean.normal_(0, 0.3), m.running_var.uniform_(0.3, 2)
        if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.LayerNorm | nn.GroupNorm) and m.weight is not None:
            m.weight.uniform_(0.5, 1.5), m.bias.normal_(0, 0.3)
        if isinstance(m, nn.PReLU):
            m.weight.uniform_(0.05, 0.4)
    return model.eval()


def head(channels: int, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


# ---------------------------------------------------------------- MLPerf Tiny's shapes


@network(images(32))
def resnet8() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 16, 3), *(BasicBlock(i, o, s) for i, o, s in ((16, 16, 1), (16, 32, 2), (32, 64, 2))), head(64)
    )


@network(images(48, 1))
def ds_cnn() -> nn.Module:
    pairs = [m for _ in range(4) for m in (conv_bn(64, 64, 3, groups=64), conv_bn(64, 64, 1))]
    return nn.Sequential(nn.Conv2d(1, 64, (10, 4), 2, (5, 1)), nn.ReLU(), *pairs, head(64, 12))


@network(vectors(128))
def autoencoder() -> nn.Module:
    sizes = [128, 64, 64, 64, 8, 64, 64, 64]
    layers = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 128))


@network(images(48))
def mobilenet_v1() -> nn.Module:
    rows = [(8, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    pairs = [m for i, o, s in rows for m in (conv_bn(i, i, 3, s, groups=i), conv_bn(i, o, 1))]
    return nn.Sequential(conv_bn(3, 8, 3, 2), *pairs, head(128, 2))


@network(walks(60, 40))
def wake_word() -> nn.Module:
    def block(i: int, o: int, kernel: int, dilation: int = 1) -> list[nn.Module]:
        return [nn.Conv1d(i, i, kernel, groups=i, dilation=dilation), nn.Conv1d(i, o, 1), nn.BatchNorm1d(o), nn.ReLU()]

    layers = [*block(40, 64, 3), *block(64, 64, 5), *block(64, 64, 5, 2), *block(64, 64, 9)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 3))


# ---------------------------------------------------------------- convolutional networks


@network(images(32))
def resnet20() -> nn.Module:
    return SMALL["resnet20"]()


@network(images(32))
def mobilenet_v2() -> nn.Module:
    return SMALL["mobilenetv2"]()


class Gate(nn.Module):
    """A squeeze-and-excite gate.  Hu et al. 2018, arXiv:1709.01507, eq. 2-4."""

    def __init__(self, channels: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.act(self.down(F.adaptive_avg_pool2d(x, 1)))))


def _gated(act: type[nn.Module], gate: type[nn.Module]) -> nn.Module:
    def block(c: int, stride: int) -> list[nn.Module]:
        depthwise = conv_bn(2 * c, 2 * c, 3, stride, groups=2 * c, act=act)
        return [conv_bn(c, 2 * c, 1, act=act), depthwise, Gate(2 * c, act(), gate()), conv_bn(2 * c, c, 1, act=None)]

    return nn.Sequential(conv_bn(3, 16, 3, 2, act=act), *block(16, 1), *block(16, 2), *block(16, 1), head(16))


@network(images(32))
def mobilenet_v3() -> nn.Module:
    return _gated(nn.Hardswish, nn.Hardsigmoid)


@network(images(32))
def efficientnet() -> nn.Module:
    return _gated(nn.SiLU, nn.Sigmoid)


@network(images())
class DenseNet(nn.Module):
    """Concatenations of all earlier features.  Huang et al. 2017, arXiv:1608.06993, eq. 2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16 + 8 * k), nn.ReLU(), conv_bn(16 + 8 * k, 8, 3)) for k in range(4)
        )
        self.head = head(48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(F.avg_pool2d(x, 2))


@network(images())
class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16, 3, 2)
        self.a, self.b = conv_bn(16, 8, 1), nn.Sequential(conv_bn(16, 8, 1), conv_bn(8, 16, 3))
        self.c, self.d = nn.Sequential(conv_bn(16, 8, 1), conv_bn(8, 8, 5)), conv_bn(16, 8, 1)
        self.head = head(40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.cat([self.a(x), self.b(x), self.c(x), self.d(F.max_pool2d(x, 3, 1, 1))], 1))


@network(images(32))
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv_bn(3, 16, 3), conv_bn(16, 32, 3, 2), conv_bn(32, 64, 3, 2)
        self.up_b, self.up_a = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.mix_b, self.mix_a, self.out = conv_bn(64, 32, 3), conv_bn(32, 16, 3), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        b = self.mix_b(torch.cat([self.up_b(self.c(b)), b], 1))
        return self.out(self.mix_a(torch.cat([self.up_a(b), a], 1)))


@network(images())
def super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


@network(images(32))
class Pyramid(nn.Module):
    """Features of three scales, added from the top down.  Lin et al. 2017, arXiv:1612.03144, fig. 3."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv_bn(3, 16, 3, 2), conv_bn(16, 32, 3, 2), conv_bn(32, 64, 3, 2)])
        self.side = nn.ModuleList(nn.Conv2d(c, 24, 1) for c in (16, 32, 64))
        self.box, self.score = nn.Conv2d(24, 4, 3, padding=1), nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        levels = []
        for down, side in zip(self.down, self.side):
            x = down(x)
            levels.append(side(x))
        y = levels[2]
        for level in levels[1::-1]:
            y = F.interpolate(y, scale_factor=2.0) + level
        return self.box(y), self.score(y).sigmoid()


@network(images(32))
class Detector(nn.Module):
    """Boxes in pixels beside scores in one tensor [N, 5, cells], as exported detectors have them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(3, 16, 3, 2, act=nn.SiLU), conv_bn(16, 32, 3, 2, act=nn.SiLU), conv_bn(32, 32, 3, act=nn.SiLU)
        )
        self.box, self.score = nn.Conv2d(32, 4, 1), nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return torch.cat([self.box(x).flatten(2).exp() * 80.0, self.score(x).flatten(2).sigmoid()], 1)


@network(images())
class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16, 3, 2)
        self.units = nn.ModuleList(
            nn.Sequential(conv_bn(8, 8, 1), conv_bn(8, 8, 3, groups=8, act=None), conv_bn(8, 8, 1)) for _ in range(3)
        )
        self.shuffle, self.head = nn.ChannelShuffle(2), head(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            a, b = x.chunk(2, 1)
            x = self.shuffle(torch.cat([a, unit(b)], 1))
        return self.head(x)


@network(images())
class ConvNext(nn.Module):
    """Depthwise 7x7, layer norm, GELU.  Liu et al. 2022, arXiv:2201.03545, fig. 4."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 4, 4)
        self.deep = nn.ModuleList(nn.Conv2d(24, 24, 7, padding=3, groups=24) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))
        self.wide = nn.ModuleList(nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24)) for _ in range(2))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for deep, norm, wide in zip(self.deep, self.norm, self.wide):
            x = x + wide(norm(deep(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


@network(images())
def group_norm() -> nn.Module:
    def block(i: int, o: int, s: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, s, 1, bias=False), nn.GroupNorm(4, o), nn.ReLU()]

    return nn.Sequential(*block(3, 16, 1), *block(16, 32, 2), *block(32, 32, 2), head(32))


@network(images())
def discriminator() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.ELU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 32, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32 * 36, 1))


@network(images())
def prelu() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.PReLU(16), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.PReLU(), head(32, 4)
    )


@network(images())
def norm_first() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(3), conv_bn(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), conv_bn(16, 16, 3), head(16)
    )


@network(images())
class PyramidPooling(nn.Module):
    """Context of several grid sizes, enlarged and concatenated.  Zhao et al. 2017, arXiv:1612.01105, fig. 3."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Sequential(conv_bn(3, 16, 3, 2), conv_bn(16, 16, 3)), nn.Conv2d(32, 4, 1)
        self.parts = nn.ModuleList(conv_bn(16, 8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        pooled = [part(F.adaptive_avg_pool2d(x, k)) for part, k in zip(self.parts, (1, 3))]
        return self.out(torch.cat([x, *(F.interpolate(p, x.shape[2:], mode="bilinear") for p in pooled)], 1))


@network(lambda n: (images()(n), images()(n)))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = (
            nn.Sequential(conv_bn(3, 16, 3, 2), conv_bn(16, 16, 3, 2), nn.Flatten(), nn.Linear(576, 16)),
            nn.Linear(16, 1),
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out((self.body(a) - self.body(b)).abs()).sigmoid()


# ---------------------------------------------------------------- series, text and transformers


@network(walks())
def dilated_series() -> nn.Module:
    layers = [m for d in (1, 2, 4) for m in (nn.Conv1d(8 if d == 1 else 16, 16, 3, padding=d, dilation=d), nn.ReLU())]
    return nn.Sequential(*layers, nn.Conv1d(16, 2, 1))


@network(tokens())
class TextConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv, self.out = nn.Embedding(64, 32), nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.relu(self.conv(self.words(ids).transpose(1, 2))).amax(-1))


@network(walks())
class AttentionPooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score, self.out = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 1, 1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return self.out((x * self.score(x).softmax(-1)).sum(-1))


@network(lambda n: walks(16, 32)(n).transpose(1, 2))
def transformer() -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True) for _ in range(2)
    ]
    return nn.Sequential(*layers, nn.Linear(32, 4))


@network(images(32))
class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(1, 16, 32) * 0.2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x).mean(1))


@network(lambda n: walks(16, 24)(n).transpose(1, 2))
class Mixer(nn.Module):
    """Linear layers over tokens and over channels.  Tolstikhin et al. 2021, arXiv:2105.01601, eq. 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(24), nn.LayerNorm(24)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels, self.out = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.out((x + self.channels(self.second(x))).mean(1))


@network(vectors())
def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5), nn.Softmax(-1))
