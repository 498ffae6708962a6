"""Layers that the networks share."""

from torch import nn


def conv(c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, with padding, and He initialization by fan-out."""
    made = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def conv_bn(
    c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU6
) -> nn.Sequential:
    """Return convolution, batch norm, and an activation unless `act` is None."""
    return nn.Sequential(
        conv(c_in, c_out, kernel, stride, groups), nn.BatchNorm2d(c_out), *([act(inplace=True)] if act else [])
    )


#: a stage: expansion, kernel, output channels, number of blocks, stride of the first
Stage = tuple[int, int, int, int, int]
