"""RegNetX-600MF.  Radosavovic et al. 2020, arXiv:2003.13678, section 3.3 and table 8."""

from torch import Tensor, nn

from chipfit.bench.networks.layers import conv_bn
from chipfit.registry import register


class XBlock(nn.Module):
    """A block of 1x1, grouped 3x3 and 1x1 convolutions of one width, with a shortcut; fig. 4."""

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
    """Return RegNetX-600MF: groups of 24 channels; 6.2 M parameters, 0.6 G multiplications."""
    layers, c = [conv_bn(3, 32, 3, 2, act=nn.ReLU)], 32
    for depth, width in ((1, 48), (3, 96), (5, 240), (7, 528)):
        for k in range(depth):
            layers.append(XBlock(c, width, 1 if k else 2, group=24))  # type: ignore[arg-type]  # both are modules
            c = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))
