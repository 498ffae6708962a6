"""ResNet-18, MobileNetV2 and a transformer block with random weights: speed depends on shapes, not on values."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(
    c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU
) -> nn.Sequential:
    """Return a convolution without bias, a batch norm, and an activation unless `act` is None."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), *([act()] if act else []))


class BasicBlock(nn.Module):
    """A residual block: two 3x3 convolutions and a shortcut.  He et al. 2016, arXiv:1512.03385, fig. 2."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first = conv_bn(c_in, c_out, 3, stride)
        self.second = conv_bn(c_out, c_out, 3, act=None)
        self.shortcut = conv_bn(c_in, c_out, 1, stride, act=None) if stride > 1 or c_in != c_out else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.first(x)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18, images [N, 3, 224, 224] to logits [N, classes].  arXiv:1512.03385, table 1; 11.7 M parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.stages = nn.Sequential(*(nn.Sequential(BasicBlock(i, o, s), BasicBlock(o, o, 1)) for i, o, s in widths))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


class InvertedResidual(nn.Module):
    """An inverted residual: 1x1, 3x3 depthwise, 1x1.  Sandler et al. 2018, arXiv:1801.04381, fig. 3b."""

    def __init__(self, c_in: int, c_out: int, stride: int, widen: int) -> None:
        super().__init__()
        c = c_in * widen
        expand = [conv_bn(c_in, c, 1, act=nn.ReLU6)] if widen > 1 else []
        self.body = nn.Sequential(
            *expand, conv_bn(c, c, 3, stride, groups=c, act=nn.ReLU6), conv_bn(c, c_out, 1, act=None)
        )
        self.keeps_shape = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.keeps_shape else self.body(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 1.0, images [N, 3, 224, 224] to logits [N, classes].  arXiv:1801.04381, table 2; 3.5 M parameters."""

    #: expansion, output channels, repetitions, stride of the first
    ROWS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 32, 3, 2, act=nn.ReLU6)]
        c = 32
        for widen, out, times, stride in self.ROWS:
            for i in range(times):
                layers.append(InvertedResidual(c, out, stride if i == 0 else 1, widen))
                c = out
        self.features = nn.Sequential(*layers, conv_bn(c, 1280, 1, act=nn.ReLU6))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class AttentionBlock(nn.Module):
    """A transformer block: attention and an MLP, each behind a layer norm and with a skip connection; [N, T, width].

    Args:
        heads: number of attention heads.
        widen: width of the MLP's hidden layer, as a multiple of `width`.
    """

    def __init__(self, width: int, heads: int, widen: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** 0.5
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, widen * width), nn.Linear(widen * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the block; `mask` is added to the attention scores."""
        y = self.first(x)
        q, k, v = (f(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) / self.scale
        scores = (scores if mask is None else scores + mask).softmax(3)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def keras_mobilenetv2() -> Any:
    """Return the MobileNetV2 of keras.applications, images [N, 224, 224, 3]; on torch unless KERAS_BACKEND is set."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(weights=None)
    for v in model.non_trainable_variables:  # statistics of batch norms
        v.assign(keras.random.uniform(v.shape, *((0.8, 1.2) if "variance" in v.name else (-0.1, 0.1)), seed=0))
    return model


#: name -> (class, parameters in millions as published)
MODELS: dict[str, tuple[type[nn.Module], float]] = {"resnet18": (ResNet18, 11.7), "mobilenetv2": (MobileNetV2, 3.5)}


def build(name: str, seed: int = 0) -> nn.Module:
    """Return one of `MODELS` in eval mode; batch norms get random statistics, so that folding them changes weights."""
    torch.manual_seed(seed)
    model = MODELS[name][0]().eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            for tensor, low, high in (
                (m.running_mean, -0.1, 0.1),
                (m.running_var, 0.8, 1.2),
                (m.weight, 0.8, 1.2),
                (m.bias, -0.1, 0.1),
            ):
                nn.init.uniform_(tensor, low, high)
    return model
