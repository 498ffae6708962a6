"""Networks of inverted residuals: MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381), EfficientNet-Lite0.

EfficientNet-Lite0 is EfficientNet-B0 (Tan and Le 2019, arXiv:1905.11946, table 1) without squeeze-and-excitation and
with ReLU6, as its authors released it for chips. Parameters are named as torchvision names MobileNetV2's.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from chipfit.bench.networks.layers import Stage, conv, conv_bn
from chipfit.registry import register


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
        self, stem: int, stages: Sequence[Stage], last: int, classes: int, stride: int = 2, dropout: float = 0.2
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


@register("network", "mobilenet_v2")
def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """Return MobileNetV2, arXiv:1801.04381, table 2; 3.5 M parameters, 300 M multiplications at 224 pixels."""
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    return InvertedResiduals(32, [(w, 3, c, n, s) for w, c, n, s in rows], 1280, classes)


@register("network", "efficientnetlite_b0")
def efficientnetlite_b0(classes: int = 1000) -> nn.Module:
    """Return EfficientNet-Lite0: arXiv:1905.11946, table 1; 4.7 M parameters, 0.39 G multiplications."""
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 40, 2, 2), (6, 80, 3, 2), (6, 112, 3, 1), (6, 192, 4, 2), (6, 320, 1, 1))
    stages = [(w, k, c, n, s) for (w, c, n, s), k in zip(rows, (3, 3, 5, 3, 5, 5, 3), strict=True)]
    return InvertedResiduals(32, stages, 1280, classes)


@register("network", "mobilenet_v2_small")
def mobilenet_v2_small(classes: int = 10) -> nn.Module:
    """Return ten inverted residuals for images of 32 pixels; 0.14 M parameters, 9.5 M multiplications."""
    rows = ((1, 16, 1, 1), (4, 24, 2, 2), (4, 32, 3, 2), (4, 48, 2, 1), (4, 64, 2, 2))
    return InvertedResiduals(16, [(w, 3, c, n, s) for w, c, n, s in rows], 192, classes, stride=1, dropout=0.0)
