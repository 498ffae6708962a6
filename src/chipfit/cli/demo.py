"""A demo on one small network: train, quantize, export, run, verify."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from chipfit.bench.config import Data
from chipfit.bench.data import digits
from chipfit.bench.networks.papers import InvertedResiduals
from chipfit.calibration.progress import Progress
from chipfit.files import check_writable
from chipfit.pipeline import quantize
from chipfit.platform.builtin import DEFAULT
from chipfit.registry import require_modules
from chipfit.report.report import Report
from chipfit.report.terminal import accuracies, size
from chipfit.result import Result


def train(epochs: int, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Return a small network of inverted residuals, trained on images x and labels y; weights are deterministic."""
    torch.manual_seed(0)
    model = InvertedResiduals(24, [(2, 3, 24, 2, 1), (2, 3, 32, 1, 2)], 48, classes=10, stride=1, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * (len(x) // 64))
    for _ in range(epochs):
        for pick in torch.randperm(len(x))[: len(x) // 64 * 64].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[pick]), y[pick]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def run(out: Path, epochs: int = 12, *, quiet: bool = False) -> tuple[Result, dict[str, Path]]:
    """Run the demo, print its progress, and write files to `out`: (the result, the files).

    Args:
        quiet: print nothing.

    Raises:
        ExportError: files cannot be written there.
        RuntimeUnavailable: scikit-learn, ONNX or ONNX Runtime is not installed; names all that are missing.
    """
    require_modules({"chipfit demo": [(library, "demo") for library in ("sklearn", "onnx", "onnxruntime")]})
    check_writable(out)
    progress = Progress(not quiet)
    sets: Any = digits(Data())  # both halves are tensors
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))  # more are slower on 8x8 images
    try:
        with progress.stage("training a small residual network on handwritten digits"):
            model = train(epochs, sets.train.x, sets.train.y)
        with progress.stage(f"quantizing it for ONNX Runtime (platform {DEFAULT}), calibrated on 128 images"):
            result = quantize(model, sets.train.x[:128], progress=False)
        with progress.stage("writing the file that the runtime loads"):
            file = result.export(out / "digits.onnx")
        with progress.stage(f"running the network in its four forms on {len(sets.test)} test images"):
            result.verify(list(zip(sets.test.x.split(50), sets.test.y.split(50), strict=True)))
    finally:
        torch.set_num_threads(threads)
    result.save(out / "plan")
    report, console = result.report, Console()
    page = report.save(out / "report.html")
    files = {"model": file, "plan": out / "plan", "report": page}
    if quiet:
        return result, files
    report.show()
    console.print(_table(report))
    for text in (
        f"\nmodel   {file}  ({size(file.stat().st_size)})\nplan    {out / 'plan'}\nreport  {page}",
        f"\nnext  open {page} in a browser\n      chipfit explain {out} features.1.conv.1.0",
        "      chipfit platforms\n      chipfit quantize your_model.pt2 --data your_images/",
    ):
        console.print(text, soft_wrap=True, markup=False)
    return result, files


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
