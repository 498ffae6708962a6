"""Train a small residual network on handwritten digits, quantize it, export it, verify it, tune what was lost.

python examples/quantize_resnet.py [folder for the files]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import chipfit


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride) if stride > 1 or c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def network() -> nn.Module:
    return nn.Sequential(
        Block(1, 8), Block(8, 16, 2), Block(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] in 0..1 and labels."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> nn.Module:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    model.train()
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(100):
            loss = F.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.inference_mode():
        return float((model(x).argmax(1) == y).float().mean())


def main(folder: Path) -> dict[str, float]:
    """Returns the accuracies on held-out digits."""
    torch.manual_seed(0)
    x, y = digits()
    (x, x_test), (y, y_test) = x.split([1500, 297]), y.split([1500, 297])
    model = train(network(), x, y, epochs=6, lr=1e-2)
    found = {"float": accuracy(model, x_test, y_test)}

    result = chipfit.quantize(model, x[:128].split(32), platform="ort_cpu")
    found["8 bit"] = accuracy(result.model, x_test, y_test)

    print("wrote", result.export(folder / "digits.onnx"))
    check = result.verify(x_test[:128].split(64))
    print(check.summary())
    found["exact"] = float(check.exact)

    result.save(folder / "result")
    found["tuned"] = accuracy(train(result.model, x, y, epochs=1, lr=1e-4), x_test, y_test)
    for name, value in found.items():
        print(f"{name:>8}: {value:.3f}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
