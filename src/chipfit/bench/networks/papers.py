"""Networks of papers. Parameters of MobileNetV2 and of ResNets are named as torchvision names them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from chipfit.registry import register


def conv(c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, with padding, and He initialization by fan-out."""
    made = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def conv_bn(
    c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU6
) -> nn.Sequential:
    """Return convolution, batch norm, and an activation unless `act` is None."""
    after = [act(inplace=True)] if act else []
    return nn.Sequential(conv(c_in, c_out, kernel, stride, groups), nn.BatchNorm2d(c_out), *after)


#: a stage: expansion, kernel, output channels, number of blocks, stride of the first
Stage = tuple[int, int, int, int, int]


# ---------------------------------------------------------------- ResNets: He et al. 2016, arXiv:1512.03385


class Block(nn.Module):
    """A residual block of convolutions with batch norms; fig. 2 (basic), fig. 5 (bottleneck).

    The 3x3 convolution of a bottleneck has the stride, as in published weights; in the paper the first one has it.
    """

    def __init__(self, c_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        basic = [(c_in, width, 3, stride), (width, width, 3, 1)]
        rows = [(c_in, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)] if bottleneck else basic
        self.rows = len(rows)
        for k, (i, o, kernel, s) in enumerate(rows, 1):
            setattr(self, f"conv{k}", conv(i, o, kernel, s))
            setattr(self, f"bn{k}", nn.BatchNorm2d(o))
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and c_in == out
        self.downsample = None if same else nn.Sequential(conv(c_in, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for k in range(1, self.rows + 1):
            y = getattr(self, f"bn{k}")(getattr(self, f"conv{k}")(y))
            y = self.relu(y) if k < self.rows else y
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A classifier of images [N, 3, H, W].

    Args:
        depths: number of blocks of each stage; the width doubles with each stage.
        width: channels of the first stage.
        small: for images of 32 pixels (section 4.2): the stem is one 3x3 convolution without stride.
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        width: int = 64,
        *,
        bottleneck: bool = False,
        small: bool = False,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.conv1 = conv(3, width, 3 if small else 7, 1 if small else 2)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        c, out = width, 0
        self.stages = [f"layer{k}" for k in range(1, len(depths) + 1)]
        for k, depth in enumerate(depths):
            blocks = []
            for j in range(depth):
                blocks.append(Block(c, width << k, 2 if j == 0 and k else 1, bottleneck))
                c = out = (width << k) * (4 if bottleneck else 1)
            setattr(self, self.stages[k], nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(out, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(self.avgpool(x).flatten(1))


#: ResNet-18, table 1; 11.7 M parameters, 1.8 G multiplications at 224 pixels
register("network", "resnet18")(partial(ResNet, (2, 2, 2, 2)))
#: ResNet-50, table 1; 25.6 M parameters, 4.1 G multiplications at 224 pixels
register("network", "resnet50")(partial(ResNet, (3, 4, 6, 3), bottleneck=True))
#: ResNet-20, section 4.2, for images of 32 pixels; 0.27 M parameters, 41 M multiplications
register("network", "resnet20")(partial(ResNet, (3, 3, 3), 16, small=True, classes=10))


# ---------------------------------------------------------------- RegNetX: Radosavovic et al. 2020, arXiv:2003.13678


class XBlock(nn.Module):
    """A block of 1x1, grouped 3x3 and 1x1 convolutions of one width, with a shortcut; arXiv:2003.13678, fig. 4."""

    def __init__(self, c_in: int, width: int, stride: int, group: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(c_in, width, 1, act=nn.ReLU),
            conv_bn(width, width, 3, stride, groups=width // group, act=nn.ReLU),
            conv_bn(width, width, 1, act=None),
        )
        same = stride == 1 and c_in == width
        self.shortcut = nn.Identity() if same else conv_bn(c_in, width, 1, stride, act=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


@register("network", "regnetx_600m")
def regnetx_600m(classes: int = 1000) -> nn.Module:
    """Return RegNetX-600MF, section 3.3 and table 8: groups of 24 channels; 6.2 M parameters, 0.6 G multiplications."""
    layers, c = [conv_bn(3, 32, 3, 2, act=nn.ReLU)], 32
    for depth, width in ((1, 48), (3, 96), (5, 240), (7, 528)):
        for k in range(depth):
            layers.append(XBlock(c, width, 1 if k else 2, group=24))  # type: ignore[arg-type]  # both are modules
            c = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))


# ---------------------------------------------------------------- networks of inverted residuals
# MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381). EfficientNet-Lite0 is EfficientNet-B0 (Tan and Le 2019,
# arXiv:1905.11946, table 1) without squeeze-and-excitation and with ReLU6, as its authors released it for chips.


class InvertedResidual(nn.Module):
    """A block of 1x1 expansion, depthwise convolution and 1x1 projection; arXiv:1801.04381, fig. 3b."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int, widen: int) -> None:
        super().__init__()
        c = c_in * widen
        wide = [conv_bn(c_in, c, 1)] if widen > 1 else []
        self.conv = nn.Sequential(
            *wide, conv_bn(c, c, kernel, stride, groups=c), conv(c, c_out, 1), nn.BatchNorm2d(c_out)
        )
        self.keeps_shape = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.keeps_shape else self.conv(x)


class InvertedResiduals(nn.Module):
    """A classifier of images [N, 3, H, W].

    Args:
        stem: channels of the first convolution.
        stages: stages of inverted residuals.
        last: channels of the last convolution.
        stride: of the first convolution.
        dropout: dropout probability before the classifier.
    """

    def __init__(
        self, stem: int, stages: Sequence[Stage], last: int, classes: int = 1000, stride: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, stem, 3, stride)]
        c = stem
        for widen, kernel, out, times, first in stages:
            for k in range(times):
                layers.append(InvertedResidual(c, out, kernel, first if k == 0 else 1, widen))
                c = out
        self.features = nn.Sequential(*layers, conv_bn(c, last, 1))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


_MOBILENET_V2 = [(1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 3, 32, 3, 2), (6, 3, 64, 4, 2), (6, 3, 96, 3, 1)]
_MOBILENET_V2 += [(6, 3, 160, 3, 2), (6, 3, 320, 1, 1)]
_LITE = [(1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1), (6, 5, 192, 4, 2)]
_SMALL = [(1, 3, 16, 1, 1), (4, 3, 24, 2, 2), (4, 3, 32, 3, 2), (4, 3, 48, 2, 1), (4, 3, 64, 2, 2)]
#: MobileNetV2, arXiv:1801.04381, table 2; 3.5 M parameters, 300 M multiplications at 224 pixels
register("network", "mobilenet_v2")(partial(InvertedResiduals, 32, _MOBILENET_V2, 1280))
#: EfficientNet-Lite0, arXiv:1905.11946, table 1; 4.7 M parameters, 0.39 G multiplications
register("network", "efficientnetlite_b0")(partial(InvertedResiduals, 32, [*_LITE, (6, 3, 320, 1, 1)], 1280))
#: ten inverted residuals for images of 32 pixels; 0.14 M parameters, 9.5 M multiplications
_FOR_32_PIXELS: dict[str, Any] = {"classes": 10, "stride": 1, "dropout": 0.0}
register("network", "mobilenet_v2_small")(partial(InvertedResiduals, 16, _SMALL, 192, **_FOR_32_PIXELS))
