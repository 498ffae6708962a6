"""What a user names on the command line as tests.cli.mine:NAME: models, data and training loops."""

import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3)).eval()


def normed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3)
    ).eval()


def spotter():
    torch.manual_seed(0)
    return nn.GRU(3, 4, batch_first=True).eval()


def broken():
    raise ValueError("no such depth")


def number():
    return 3


class Two(nn.Module):
    def forward(self, x):
        return x, x * 2


ready = nn.Linear(2, 3)
once = (torch.ones(1, 2) for _ in range(3))


def data():
    return [torch.randn(4, 3, 8, 8) for _ in range(2)]


def loop(model, data):
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def broken_loop(model, data):
    return data[0][0] @ model
