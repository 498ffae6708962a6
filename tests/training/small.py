"""A small network, data and loop that tests of training share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_SEED = torch.Generator().manual_seed(0)
DATA = [torch.randn(8, 3, 8, 8, generator=_SEED) for _ in range(3)]
LABELS = torch.arange(8) % 5


class Net(nn.Module):
    """A convolution, a depthwise one, a residual connection whose operands share a scale on some chips, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.relu(self.body(x) + x).mean((2, 3)))


class NormedNet(nn.Module):
    """A batch norm behind a convolution, a depthwise one, a transposed one and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.body, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.BatchNorm2d(6)
        self.up, self.bn3 = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.BatchNorm2d(4)
        self.fc, self.bn4 = nn.Linear(64, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)
        for m in self.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                nn.init.uniform_(m.weight, 0.5, 1.5)
                nn.init.uniform_(m.bias, -0.5, 0.5)
                m.momentum = 0.5
        with torch.no_grad():
            self.bn1.weight[1].neg_()
            self.bn2.weight[2] = 0
            for x in DATA:  # statistics of the data
                self(x)
        for m in self.modules():
            m.momentum = 0.1

    def forward(self, x):
        x = torch.relu(self.bn1(self.stem(x)))
        x = torch.relu(self.bn2(self.body(x)) + x)
        x = nn.functional.max_pool2d(torch.relu(self.bn3(self.up(x))), 4).flatten(1)
        return self.head(torch.relu(self.bn4(self.fc(x))))


def set_share(model: nn.Module, share: float) -> None:
    """Let every quantizer round this share: of 0, the simulation is the rewritten float network."""
    for quantizer in model.quantizers:
        quantizer.share = share


def train(
    model: nn.Module,
    steps: int = 5,
    rate: float = 0.01,
    *,
    momentum: float = 0.0,
    mode: bool = True,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    after: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Take steps of gradient descent on the first batch, leave the model in eval mode, and return the losses.

    Args:
        mode: of the model while it trains.
        forward: in place of the model.
        after: is called after each step.
    """
    model.train(mode)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=momentum)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy((forward or model)(DATA[0]), LABELS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    model.eval()
    return losses
