"""Networks of a person who does not know chipfit: none of them is one of the tutorials'."""

import torch
from torch import Tensor, nn


class Squeeze(nn.Module):
    """A residual block with squeeze-and-excitation, for grey images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
        )
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid()
        )
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 49, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.body(x)
        return self.head(torch.relu(x + y * self.gate(y)))


class Sensor(nn.Module):
    """Depthwise-separable convolutions over windows of an accelerometer."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Conv1d(6, 24, 5, stride=2, padding=2), nn.BatchNorm1d(24), nn.ReLU6()]
        for width, out in ((24, 32), (32, 48)):
            parts += [nn.Conv1d(width, width, 5, padding=2, groups=width), nn.Conv1d(width, out, 1), nn.LeakyReLU(0.1)]
            parts += [nn.MaxPool1d(2)]
        self.layers, self.head = nn.Sequential(*parts), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(-1)).log_softmax(-1)


class Branches(nn.Module):
    """Three branches of different scale, concatenated, and a decoder's upsampling with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, (5, 3), padding=(2, 1))
        self.far = nn.Conv2d(3, 8, 3, padding=2, dilation=2)
        self.down, self.up = nn.Conv2d(24, 24, 3, stride=2, padding=1), nn.ConvTranspose2d(24, 24, 2, stride=2)
        self.mix, self.head = nn.Conv2d(48, 16, 1), nn.Linear(16, 10)
        self.act = nn.ELU()

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([self.narrow(x), self.wide(x), self.far(x)], 1).relu()
        around = self.up(self.act(self.down(seen)))
        return self.head(self.act(self.mix(torch.cat([seen, around], 1))).amax((2, 3)))
