"""A demo on one small network: train, quantize, export, run, verify."""

from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from chipfit.calibration.progress import Progress
from chipfit.errors import RuntimeUnavailable, import_optional
from chipfit.pipeline import quantize
from chipfit.platform.builtin import DEFAULT
from chipfit.report.report import Report
from chipfit.report.terminal import accuracies, size
from chipfit.result import Result


def _layer(
    c_in: int, c_out: int, kernel: int = 1, groups: int = 1, activation: type[nn.Module] | None = nn.ReLU6
) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), *([activation()] if activation else []))


class Block(nn.Module):
    """A residual block with a depthwise convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = _layer(channels, 2 * channels)
        self.depthwise = _layer(2 * channels, 2 * channels, 3, groups=2 * channels)
        self.project = _layer(2 * channels, channels, activation=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.project(self.depthwise(self.expand(x))))


class DigitsNet(nn.Module):
    """A classifier of ten digits, images [N, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _layer(1, 24, 3, activation=nn.ReLU)
        self.block1, self.block2 = Block(24), Block(24)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block2(self.pool(self.block1(self.stem(x))))
        return self.head(x.mean((2, 3)))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images in [0, 1] and labels of scikit-learn's digits: train x, train y, test x, test y (1,347 and 450).

    Raises:
        RuntimeUnavailable: scikit-learn is not installed.
    """
    datasets = import_optional("sklearn.datasets", "The demo", RuntimeUnavailable, "scikit-learn")
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16, torch.tensor(y)[order]
    return images[:1347], labels[:1347], images[1347:], labels[1347:]


def train(epochs: int = 12) -> nn.Module:
    """Return a trained DigitsNet with about 98 % accuracy on the test images; weights are deterministic."""
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


def run(out: Path, epochs: int = 12) -> Result:
    """Run the demo, print its progress, and write files to `out`.

    Raises:
        RuntimeUnavailable: scikit-learn or ONNX Runtime is not installed.
    """
    progress = Progress(True)
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))  # more are slower on 8x8 images
    try:
        with progress.stage("training a small residual network on handwritten digits"):
            model = train(epochs)
        x, _, test_x, test_y = digits()
        with progress.stage(f"quantizing it for ONNX Runtime (platform {DEFAULT}), calibrated on 128 images"):
            result = quantize(model, x[:128], progress=False)
        with progress.stage("writing the file that the runtime loads"):
            file = result.export(out / "digits.onnx")
        with progress.stage(f"running the network in its four forms on {len(test_y)} test images"):
            result.verify(list(zip(test_x.split(50), test_y.split(50), strict=True)))
    finally:
        torch.set_num_threads(threads)
    result.save(out / "plan")
    report, console = result.report, Console()
    page = report.save(out / "report.html")
    report.show()
    console.print(_table(report))
    for text in (
        f"\nmodel   {file}  ({size(file.stat().st_size)})\nplan    {out / 'plan'}\nreport  {page}",
        f"\nnext  open {page} in a browser\n      chipfit explain {out} block1.depthwise.0",
        "      chipfit platforms\n      chipfit quantize your_model.pt2 --data your_images/",
    ):
        console.print(text, soft_wrap=True, markup=False)
    return result


def _table(report: Report) -> Table:
    """Return a table with the top-1 accuracy of the network in its four forms."""
    what = {
        "float": "the trained network",
        "simulated": "result.model: trainable simulation of the chip",
        "integer": "the chip's integers, computed by chipfit",
        "device": "the file, run by ONNX Runtime",
    }
    table = Table("digits, top-1", "", "what it is", show_edge=False, header_style="bold")
    for name, share in accuracies(report).items():
        table.add_row(name, f"{100 * share:.2f} %", what[name])
    return table
