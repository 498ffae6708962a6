"""The whole way on one small network: train, quantize, export, run, prove."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from chipfit.errors import RuntimeUnavailable


class Block(nn.Module):
    """Residual block with a depthwise convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1, bias=False), nn.BatchNorm2d(2 * channels), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels, bias=False), nn.BatchNorm2d(2 * channels), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(2 * channels, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.project(self.depthwise(self.expand(x))))


class DigitsNet(nn.Module):
    """Ten digits from images [N, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.block1, self.block2 = Block(24), Block(24)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block2(self.pool(self.block1(self.stem(x))))
        return self.head(x.mean((2, 3)))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images in [0, 1] and labels of scikit-learn's digits: train x, train y, test x, test y (1,347 and 450).

    Raises:
        RuntimeUnavailable: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise RuntimeUnavailable("The demo needs scikit-learn for its images", hint="pip install scikit-learn") from e
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16, torch.tensor(y)[order]
    return images[:1347], labels[:1347], images[1347:], labels[1347:]


def train(epochs: int = 12) -> nn.Module:
    """A trained DigitsNet, about 98 % right on the test images."""
    torch.manual_seed(0)
    x, y, *_ = digits()
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * (len(x) // 64))
    for _ in range(epochs):
        for pick in torch.randperm(len(x))[: len(x) // 64 * 64].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[pick]), y[pick]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def run(out: Path) -> None:
    """Run the demo; files go to `out`."""
    from chipfit.pipeline import quantize

    console = Console()
    start = time.perf_counter()
    console.print("[bold]1[/] training a small residual network on handwritten digits")
    model = train()
    x, _, test_x, test_y = digits()
    console.print(f"  {time.perf_counter() - start:.1f} s")
    console.print("[bold]2[/] quantizing it for ONNX Runtime on the CPU (platform 'ort_cpu'), calibrated on 128 images")
    result = quantize(model, x[:128], platform="ort_cpu")
    console.print("[bold]3[/] writing the file that the runtime loads")
    file = result.export(out / "digits.onnx")
    console.print("[bold]4[/] running float, simulated, integer and ONNX Runtime side by side on 450 test images")
    checked = result.verify(list(zip(test_x.split(50), test_y.split(50), strict=True)))
    page = result.report.save(out / "report.html")
    result.save(out / "plan")
    result.report.show()
    console.print(checked.summary())
    console.print(f"\nmodel   {file}  ({file.stat().st_size / 1000:.0f} kB)\nreport  {page}\nplan    {out / 'plan'}")
    console.print(
        "\nnext: open the report; [bold]chipfit explain "
        f"{out} block1.depthwise.0[/]; [bold]chipfit platforms[/]; or quantize your own model as README.md shows"
    )
