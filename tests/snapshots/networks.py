"""Small networks with weights and data by formula: sums of few binary digits, so that most of their floats are exact.

Between them they hold what real networks are made of; each is quantized in a moment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.build import model_of


def dyadic(*shape: int, salt: int = 0, unit: float = 1 / 32, reach: int = 12) -> Tensor:
    """Return multiples of `unit` between plus and minus `reach`, in no visible order."""
    k = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.int64) + 41 * salt
    mixed = ((k * 2654435761) % 4294967296 // 65536 * 40503) % 65536  # the high digits of a product look like noise
    return ((mixed * (2 * reach + 1) // 65536) - reach).reshape(shape).float() * unit


def image(salt: int, n: int = 3, c: int = 3, side: int = 8) -> Tensor:
    return dyadic(n, c, side, side, salt=100 + salt, unit=1 / 16, reach=20 + 6 * salt)


def numbered(model: nn.Module) -> nn.Module:
    """Set weights by formula, with exact deviations of batch norms; return the model in eval mode."""
    for k, p in enumerate(model.parameters()):
        p.data = dyadic(*p.shape, salt=k + 1, unit=1 / 32 if p.dim() > 1 else 1 / 64)
    for k, m in enumerate(m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))):
        m.eps = 0.25
        c = len(m.running_mean)
        m.running_mean = dyadic(c, salt=50 + k, unit=1 / 16)
        m.running_var = torch.tensor([0.75, 3.75, 0.0, 0.75])[torch.arange(c) % 4]  # and epsilon: 1, 4, 1/4, 1
        m.weight.data = torch.tensor([1.0, 0.5, 0.75, -0.5, 1.5])[torch.arange(c) % 5]
    for k, m in enumerate(m for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.PReLU))):
        m.weight.data = 1 + dyadic(*m.weight.shape, salt=70 + k) if isinstance(m, nn.LayerNorm) else m.weight.data.abs()
    return model.eval()


def residual() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(m.bn1(m.conv1(x))), 3, 2, 1, ceil_mode=True)
        x = F.relu(m.bn3(m.conv3(F.relu(m.bn2(m.conv2(x))))) + x)
        return m.head(x.mean((2, 3)))

    return model_of(
        f,
        conv1=nn.Conv2d(3, 6, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(6),
        conv2=nn.Conv2d(6, 6, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(6),
        conv3=nn.Conv2d(6, 6, 1),
        bn3=nn.BatchNorm2d(6),
        head=nn.Linear(6, 4),
    )


def mobile() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        y = F.relu6(m.bn(m.wide(x)))
        y = F.hardswish(m.depthwise(y))
        y = y * torch.sigmoid(m.up(F.relu(m.down(F.adaptive_avg_pool2d(y, 1)))))
        return (m.narrow(y) + m.skip(x)).flatten(1)

    return model_of(
        f,
        wide=nn.Conv2d(3, 8, 1),
        bn=nn.BatchNorm2d(8),
        depthwise=nn.Conv2d(8, 8, 3, 2, 1, groups=8),
        down=nn.Conv2d(8, 4, 1),
        up=nn.Conv2d(4, 8, 1),
        narrow=nn.Conv2d(8, 5, 1),
        skip=nn.Conv2d(3, 5, 2, 2),
    )


def branches() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        x = torch.cat([F.relu(m.a(x)), m.b(x), F.leaky_relu(m.c(pooled), 0.125)], 1)
        return F.avg_pool2d(m.last(F.max_pool2d(x, 3, 2, ceil_mode=True)), 3, 2, 1, ceil_mode=True)

    return model_of(
        f,
        stem=nn.Conv2d(3, 4, 3, stride=(1, 2), padding=(1, 2)),
        a=nn.Conv2d(4, 3, 1),
        b=nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
        c=nn.Conv2d(4, 5, (1, 3), padding=(0, 1)),
        last=nn.Conv2d(12, 4, 1, bias=False),
    )


def sizes() -> nn.Module:
    def f(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a = F.relu(m.down(F.pad(x, (1, 0, 2, 1))))
        b = F.relu(m.up(F.max_pool2d(a, 2)))
        c = F.interpolate(m.mid(b), scale_factor=2.0, mode="nearest")
        d = F.interpolate(c[:, :, 1::2], size=(8, 8), mode="bilinear", align_corners=False)
        e, g = d.chunk(2, 1)
        return torch.cat([e, g], 3).transpose(2, 3), m.out(d).permute(0, 2, 3, 1).reshape(x.shape[0], -1)

    return model_of(
        f,
        down=nn.Conv2d(3, 4, 3, 2),
        up=nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
        mid=nn.Conv2d(6, 4, 1),
        out=nn.Conv2d(4, 2, 1),
    )


def attention() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = m.patch(x).flatten(2).transpose(1, 2) + m.position
        q, k, v = m.qkv(m.norm1(x)).reshape(n, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = ((q @ k.transpose(-2, -1)) * 0.5).softmax(-1) @ v
        x = x + m.proj(y.transpose(1, 2).reshape(n, 4, 8))
        return m.head((x + m.fc2(F.gelu(m.fc1(m.norm2(x)))))[:, 0])

    return model_of(
        f,
        patch=nn.Conv2d(3, 8, 4, 4),
        norm1=nn.LayerNorm(8),
        qkv=nn.Linear(8, 24),
        proj=nn.Linear(8, 8),
        norm2=nn.LayerNorm(8),
        fc1=nn.Linear(8, 12),
        fc2=nn.Linear(12, 8),
        head=nn.Linear(8, 3),
        position=torch.zeros(1, 4, 8),
    )


def words() -> nn.Module:
    def f(m: Any, i: Tensor) -> Tensor:
        x = m.norm(m.table(i) + m.place.weight[:6])
        x = F.relu(m.fc(x)) * m.gain
        return m.out(torch.cat([x.mean(1), x.amax(1)], -1)).log_softmax(-1)

    return model_of(
        f,
        table=nn.Embedding(20, 8),
        place=nn.Embedding(9, 8),
        norm=nn.LayerNorm(8),
        fc=nn.Linear(8, 8),
        gain=torch.ones(8),
        out=nn.Linear(16, 5),
    )


def moves() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.first(x))
        x = x.reshape(x.shape[0], 2, 3, 8, 8).transpose(1, 2).flatten(1, 2)  # shuffled channels
        x = F.pixel_shuffle(m.second(x), 2)[:, :, 2:-1, ::2]
        x = torch.index_select(x, 1, torch.tensor([1, 0])) + x.roll(1, 1)
        return torch.stack([x.amax((2, 3)), x.unsqueeze(1).sum((1, 3, 4))], 1)

    return model_of(f, first=nn.Conv2d(3, 6, 1), second=nn.Conv2d(6, 8, 1))


def gates() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        x = F.hardswish(m.conv(x))
        x = torch.tanh(m.a(x)) * torch.sigmoid(m.b(x)) + F.elu(m.c(m.prelu(x)))
        return m.head(F.avg_pool1d(F.silu(x), 2).flatten(1)).softmax(-1)

    return model_of(
        f,
        conv=nn.Conv1d(3, 6, 3, padding=1),
        prelu=nn.PReLU(6),
        a=nn.Conv1d(6, 4, 1),
        b=nn.Conv1d(6, 4, 1),
        c=nn.Conv1d(6, 4, 1),
        head=nn.Linear(16, 3),
    )


def shared() -> nn.Module:
    def f(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(m.first(x))
        y = F.relu(m.conv(F.relu(m.conv(x))))
        z = F.conv2d(y, m.other.weight, m.conv.bias, padding=1)
        return m.tied(z) - x, y

    model = model_of(
        f,
        first=nn.Conv2d(3, 4, 1),
        conv=nn.Conv2d(4, 4, 3, padding=1),
        other=nn.Conv2d(4, 4, 3, bias=False),
        tied=nn.Conv2d(4, 4, 3, padding=1),
    )
    model.tied.weight = model.conv.weight
    return model


def chain() -> nn.Module:
    """Return a chain in whose middle a layer can be kept in float or be given other widths."""

    def f(m: Any, x: Tensor) -> Tensor:
        a = F.relu(m.one(x))
        b = m.two(a)
        c = F.relu6(m.three(a) + b.clamp(-1.0, 1.5))
        return m.head(F.relu(m.four(c)).flatten(1))

    return model_of(
        f,
        one=nn.Conv2d(3, 6, 3, 2, 1),
        two=nn.Conv2d(6, 6, 1),
        three=nn.Conv2d(6, 6, 3, padding=1),
        four=nn.Conv2d(6, 4, 1),
        head=nn.Linear(64, 4),
    )


def rows() -> nn.Module:
    """Return patterns of optional rewrites: two linear operators in a row, a shortcut around one, clips between."""

    def f(m: Any, x: Tensor) -> Tensor:
        x = F.relu6(m.two(m.one(x)))
        x = F.relu6(m.three(x) + x)
        x = F.hardswish(m.four(F.relu(m.wide(x))))
        return m.last(m.head(x.flatten(1))).softmax(-1)

    return model_of(
        f,
        one=nn.Conv2d(3, 4, 3, padding=1),
        two=nn.Conv2d(4, 5, 1),
        three=nn.Conv2d(5, 5, 3, padding=1),
        wide=nn.Conv2d(5, 6, 1),
        four=nn.Conv2d(6, 3, 3, 2),
        head=nn.Linear(27, 4),
        last=nn.Linear(4, 4),
    )


def foreign() -> nn.Module:
    """Return a network with operators that only PyTorch knows."""

    def f(m: Any, x: Tensor) -> Tensor:
        x = m.patch(x).flatten(2).transpose(1, 2)
        return m.head(torch.cat([m.token.expand(x.shape[0], 1, 4), F.relu(x).flip(1)], 1))[:, 1]

    return model_of(f, patch=nn.Conv2d(3, 4, 4, 4), token=torch.zeros(1, 1, 4), head=nn.Linear(4, 3))


def constants() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        x = (x - torch.tensor([0.25, 0.5, -0.125]).view(1, 3, 1, 1)) / 2.0
        y = m.conv(x) * 0.5 + 0.25
        y = torch.maximum(y, m.floor).flatten(1) @ m.matrix
        return torch.where(y > 0, y, -y) + y.square().mean(1, keepdim=True)

    return model_of(f, conv=nn.Conv2d(3, 2, 3), floor=torch.zeros(2, 1, 1), matrix=torch.zeros(72, 4))


@dataclass(frozen=True)
class Network:
    """A network and its calibration data."""

    make: Callable[[], nn.Module]
    data: Callable[[int], Tensor] = image  #: makes data by number, each of another range
    exact: bool = True  #: its floats are sums of few binary digits: the same on every processor, but for the last bit
    overrides: dict[Any, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()  #: platforms; all when empty
    suffix: str = ""  #: of its files; the platforms' own when empty

    def batches(self) -> list[list[Tensor]]:
        """Return three batches of different ranges, the widest in the middle."""
        return [[self.data(0)], [self.data(2)], [self.data(1)]]

    def unseen(self) -> Tensor:
        return self.data(1).flip(0) * 0.75 if self.data(0).is_floating_point() else self.data(1).flip(1)


def _sound(salt: int) -> Tensor:
    return image(salt, side=3)[..., :8].reshape(3, 3, 9)[..., :8]


def _indices(salt: int) -> Tensor:
    return (dyadic(3, 6, salt=salt, unit=1.0, reach=9) + 10).long()


NETWORKS = {
    "residual": Network(residual),
    "mobile": Network(mobile, exact=False),
    "branches": Network(branches),
    "sizes": Network(sizes),
    "attention": Network(attention, exact=False),
    "words": Network(words, _indices, exact=False),
    "moves": Network(moves),
    "gates": Network(gates, _sound, exact=False),
    "shared": Network(shared),
    "chain": Network(chain, overrides={"three": "float"}),
    "constants": Network(constants),
    "rows": Network(rows, exact=False, only=("ort_cpu",)),
    "foreign": Network(foreign, only=("ort_cpu", "imx500", "tflite_int8"), suffix=".tflite"),  # torch's export is slow
}


def made(name: str) -> nn.Module:
    return numbered(NETWORKS[name].make())
