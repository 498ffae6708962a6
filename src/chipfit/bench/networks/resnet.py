"""ResNets.  He et al. 2016, arXiv:1512.03385. Parameters are named as torchvision names them."""

from torch import Tensor, nn

from chipfit.bench.networks.layers import conv
from chipfit.registry import register


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
        self, depths: tuple[int, ...], width: int = 64, *, bottleneck: bool = False, small: bool = False, classes: int
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


@register("network", "resnet18")
def resnet18(classes: int = 1000) -> nn.Module:
    """Return ResNet-18, table 1; 11.7 M parameters, 1.8 G multiplications at 224 pixels."""
    return ResNet((2, 2, 2, 2), classes=classes)


@register("network", "resnet50")
def resnet50(classes: int = 1000) -> nn.Module:
    """Return ResNet-50, table 1; 25.6 M parameters, 4.1 G multiplications at 224 pixels."""
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=classes)


@register("network", "resnet20")
def resnet20(classes: int = 10) -> nn.Module:
    """Return ResNet-20, section 4.2, for images of 32 pixels; 0.27 M parameters, 41 M multiplications."""
    return ResNet((3, 3, 3), 16, small=True, classes=classes)
