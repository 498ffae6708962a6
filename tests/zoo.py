"""Small networks of many kinds, each built, quantized and verified in a moment."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.build import model_of


def conv_bn(i: int, o: int, k: int = 3, act: nn.Module | None = None, **kw: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, bias=False, **kw), nn.BatchNorm2d(o), act or nn.ReLU())


class Residual(nn.Module):
    def __init__(self, c: int = 8, act: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv_bn(3, c), conv_bn(c, c, act=act), conv_bn(c, c, act=nn.Identity())
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(c, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.b(self.a(x))
        y += x
        return self.head(self.relu(y).mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, c: int = 8, act: type[nn.Module] = nn.ReLU6, squeeze: bool = False) -> None:
        super().__init__()
        h = 3 * c
        self.stem, self.expand = conv_bn(3, c, act=act()), conv_bn(c, h, 1, act())
        self.depthwise, self.gate = conv_bn(h, h, 3, act(), groups=h), None
        if squeeze:
            gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(h, 4, 1), nn.ReLU(), nn.Conv2d(4, h, 1), nn.Sigmoid()
            self.gate = nn.Sequential(*gate)
        self.project = conv_bn(h, c, 1, nn.Identity())

    def forward(self, x):
        x = self.stem(x)
        y = self.depthwise(self.expand(x))
        if self.gate is not None:
            y = y * self.gate(y)
        return F.adaptive_avg_pool2d(x + self.project(y), 1).flatten(1)


class Fire(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.one = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1)
        self.three, self.last = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(12, 5, 1)

    def forward(self, x):
        x = F.relu(self.squeeze(x))
        x = torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)
        return F.avg_pool2d(self.last(F.max_pool2d(x, 3, 2, ceil_mode=True)), 2).flatten(1)


class UNet(nn.Module):
    def __init__(self, up: str = "nearest") -> None:
        super().__init__()
        self.down, self.deep, self.out, self.up = conv_bn(3, 6), conv_bn(6, 8), nn.Conv2d(14, 2, 1), up
        self.transposed = nn.ConvTranspose2d(8, 8, 2, 2) if up == "transposed" else None

    def forward(self, x):
        a = self.down(x)
        b = self.deep(F.max_pool2d(a, 2))
        b = self.transposed(b) if self.transposed is not None else F.interpolate(b, scale_factor=2, mode=self.up)
        return self.out(torch.cat((b, a), 1))


def split() -> nn.Module:
    def forward(m, x):
        a, b = m.first(x).chunk(2, 1)
        return F.silu(m.last(torch.cat((a, b, F.leaky_relu(m.branch(b), 0.1)), 1)))

    branch = nn.Conv2d(4, 4, 3, padding=1)
    return model_of(forward, first=nn.Conv2d(3, 8, 1), branch=branch, last=nn.Conv2d(12, 4, 1))


class Attention(nn.Module):
    def __init__(self, fused: bool = True, d: int = 16) -> None:
        super().__init__()
        self.patch, self.qkv, self.out = nn.Conv2d(3, d, 4, 4), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.position, self.fused, self.d = nn.Parameter(torch.randn(1, 4, d) * 0.1), fused, d

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        q, k, v = self.qkv(self.n1(x)).reshape(x.shape[0], 4, 3, 2, self.d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = (
            F.scaled_dot_product_attention(q, k, v)
            if self.fused
            else ((q @ k.transpose(-2, -1)) * (self.d // 2) ** -0.5).softmax(-1) @ v
        )
        x = x + self.out(y.transpose(1, 2).reshape(x.shape[0], 4, self.d))
        return (x + self.down(F.gelu(self.up(self.n2(x))))).mean(1)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.relu = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
        self.tied = nn.Conv2d(6, 6, 3, padding=1)
        self.tied.weight = self.conv.weight

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.relu(self.conv(x))
        return self.tied(x)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.3), nn.Parameter(torch.zeros(8))
        self.linear = nn.Linear(8 * 16, 4)
        self.register_buffer("mean", torch.full((1, 3, 1, 1), 0.1))

    def forward(self, x):
        y = F.relu6(F.conv2d((x - self.mean) / 2.0, self.weight, self.bias, padding=1))
        y += 1
        a, b = F.hardtanh(y, -2, 2).chunk(2, 1)
        z = F.leaky_relu(torch.cat([a * b, torch.add(a, b, alpha=2)], 1), 0.2, inplace=True)
        z = torch.relu_(F.avg_pool2d(z, 2).flatten(1))
        return self.linear(z * torch.sigmoid(z)).softmax(-1)


def in_place_index() -> nn.Module:
    def forward(m, x):
        y = m.conv(x)
        y[:, 0] = 0
        y[:, 1:3] *= 2
        return y

    return model_of(forward, conv=nn.Conv2d(3, 8, 1))


class Shapes(nn.Module):
    """A network with control flow on shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        y = self.conv(x)
        return (F.relu(y) if y.shape[1] > 4 else y).mean((-1, -2))


def dict_out() -> nn.Module:
    def forward(m, batch):
        u, v = m.a(batch["x"]), m.b(batch["y"]["z"])
        return {"sum": u + v, "parts": [u, v]}

    return model_of(forward, a=nn.Linear(8, 8), b=nn.Linear(4, 8))


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def dataclass_out() -> nn.Module:
    return model_of(lambda m, x, y: Pair(m.a(x) + m.a(y), m.a(x)), a=nn.Conv2d(3, 4, 1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.GRU) -> None:
        super().__init__()
        self.rnn, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def perceptron() -> nn.Module:
    first, second = (nn.Linear(192, 16), nn.ReLU()), (nn.Linear(16, 16), nn.Sigmoid())
    return nn.Sequential(nn.Flatten(), *first, *second, nn.Linear(16, 4), nn.Softmax(-1))


def grouped() -> nn.Module:
    first, second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 2, 2, groups=2)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))


def padded() -> nn.Module:
    first, second = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 3, padding="same")
    return nn.Sequential(first, nn.ReLU(), second, nn.ZeroPad2d(1), nn.Conv2d(4, 2, 2))


def chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def _image(n: int = 4, side: int = 8) -> torch.Tensor:
    return torch.randn(n, 3, side, side)


#: name -> (factory, example batch)
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], object]]] = {
    "residual": (Residual, _image),
    "residual_leaky": (lambda: Residual(act=nn.LeakyReLU(0.1)), _image),
    "residual_hardswish": (lambda: Residual(act=nn.Hardswish()), _image),
    "residual_silu": (lambda: Residual(act=nn.SiLU()), _image),
    "residual_gelu": (lambda: Residual(act=nn.GELU()), _image),
    "residual_tanh": (lambda: Residual(act=nn.Tanh()), _image),
    "residual_sigmoid": (lambda: Residual(act=nn.Sigmoid()), _image),
    "residual_hardsigmoid": (lambda: Residual(act=nn.Hardsigmoid()), _image),
    "residual_prelu": (lambda: Residual(act=nn.PReLU(8)), _image),
    "residual_elu": (lambda: Residual(act=nn.ELU()), _image),
    "inverted_residual": (InvertedResidual, _image),
    "inverted_residual_hardswish": (lambda: InvertedResidual(act=nn.Hardswish), _image),
    "squeeze_excite": (lambda: InvertedResidual(squeeze=True), _image),
    "fire": (Fire, _image),
    "unet_nearest": (UNet, _image),
    "unet_bilinear": (lambda: UNet("bilinear"), _image),
    "unet_transposed": (lambda: UNet("transposed"), _image),
    "split": (split, _image),
    "attention_fused": (Attention, _image),
    "attention_manual": (lambda: Attention(fused=False), _image),
    "shared_and_tied": (Shared, _image),
    "functional": (Functional, _image),
    "in_place_index": (in_place_index, _image),
    "shapes": (Shapes, lambda: torch.randn(4, 3, 7, 7)),
    "dict_out": (dict_out, lambda: {"x": torch.randn(4, 8), "y": {"z": torch.randn(4, 4)}}),
    "dataclass_out": (dataclass_out, lambda: (_image(), _image())),
    "gru": (Recurrent, lambda: torch.randn(4, 5, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(4, 5, 6)),
    "conv1d": (
        chain(nn.Conv1d(3, 8, 3, padding=2, dilation=2), nn.BatchNorm1d(8), nn.ReLU(), nn.ConvTranspose1d(8, 4, 2, 2)),
        lambda: torch.randn(4, 3, 12),
    ),
    "conv3d": (chain(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1)), lambda: torch.randn(2, 2, 4, 4, 4)),
    "padding_modes": (padded, _image),
    "pixel_shuffle_norms": (
        chain(nn.Conv2d(3, 12, 3, 1, 1), nn.PixelShuffle(2), nn.InstanceNorm2d(3, affine=True), nn.GroupNorm(1, 3)),
        _image,
    ),
    "mlp": (perceptron, _image),
    "grouped_strided": (grouped, lambda: _image(side=12)),
}


def make(name: str) -> tuple[nn.Module, object]:
    """Return a network with plausible batch-norm statistics and one batch for it, reproducibly."""
    torch.manual_seed(0)
    factory, example = ZOO[name]
    model, batch = factory(), example()
    for m in model.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            nn.init.uniform_(m.running_mean, -0.5, 0.5)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.uniform_(m.bias, -0.3, 0.3)
    return model.eval(), batch


def unseen(batch, seed: int = 1):
    """Return other samples with a batch's mean and spread, or other indices up to its largest."""
    draw = torch.Generator().manual_seed(seed)

    def other(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return torch.randint(0, int(x.max()) + 1, x.shape, generator=draw, dtype=x.dtype)
        return torch.randn(x.shape, generator=draw) * x.std() + x.mean()

    return torch.utils._pytree.tree_map(other, batch)
