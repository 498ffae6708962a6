"""Accuracy in 8 bits by default of networks with unequal channels, which repairs without training can mend.

    python benchmarks/repairs.py [--seeds 0 1 2] [--platforms ort_cpu tflite_int8 vitis_dpu]

A small MobileNet of the handwritten digits of scikit-learn is trained in float (half a minute on one thread), and its
channels are made unequal without a change of its function: channel c of an inner activation is multiplied by a factor
between 0.01 and 1, and its readers' weights are divided by it. A ReLU commutes with that; behind a ReLU6 only channels
that stay below 6 are changed. Each row shows top-1 of the float network, of the quantized one by default and with all
repairs off, the loss that the report states, and the repairs that were taken.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from benchmarks.models import InvertedResidual, conv_bn
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit

#: number of digits for training; the others measure accuracy
TRAINED_ON = 1000
#: allowed loss of accuracy by default [points]
LIMIT = 0.5


def digits() -> tuple[Tensor, Tensor]:
    """Return all digits as images of mean about 0, [1797, 1, 16, 16], and labels, in a fixed order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 0.6
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return F.interpolate(x, scale_factor=2, mode="bilinear")[order], torch.tensor(found.target)[order]


def mobilenet(act: type[nn.Module]) -> nn.Sequential:
    """Return an untrained MobileNetV2 of images [N, 1, 16, 16]: four inverted residuals with this activation."""
    blocks = [InvertedResidual(*row) for row in ((8, 8, 1, 4), (8, 16, 2, 4), (16, 16, 1, 4), (16, 24, 2, 4))]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    model = nn.Sequential(conv_bn(1, 8, 3), *blocks, conv_bn(24, 64, 1), *head)
    for m in model.modules():
        for name, child in m.named_children():
            if isinstance(child, (nn.ReLU, nn.ReLU6)):
                setattr(m, name, act())
    return model


def trained(act: type[nn.Module], seed: int, epochs: int = 25) -> nn.Sequential:
    """Return a network trained on the first `TRAINED_ON` digits."""
    torch.manual_seed(seed)
    (x, y), model = digits(), mobilenet(act).train()
    steps = TRAINED_ON // 50
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * steps)
    for _ in range(epochs):
        for k in torch.randperm(TRAINED_ON)[: steps * 50].split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[k]), y[k]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def make_unequal(model: nn.Sequential, x: Tensor, seed: int) -> None:
    """Scale the channels inside each inverted residual; the function on `x` stays.

    A channel with values above 6 / 1.5 before a ReLU6 keeps its scale.
    """
    random = torch.Generator().manual_seed(seed)
    for block in (b for b in model if isinstance(b, InvertedResidual)):
        for first, after in zip(block.body[:-1], block.body[1:], strict=True):
            convs = after if isinstance(after[0], nn.Conv2d) else first
            scale_channels(model, x, first, convs[0], random)


def scale_channels(model: nn.Sequential, x: Tensor, first: nn.Sequential, reader: nn.Conv2d, random: Any) -> None:
    """Scale the channels between a normalised convolution and the convolution that reads its activation."""
    seen: list[Tensor] = []
    hook = first[1].register_forward_hook(lambda module, args, out: seen.append(out.amax((0, 2, 3))))
    model(x)
    hook.remove()
    s = 10 ** (-2 * torch.rand(len(seen[0]), generator=random))
    if isinstance(first[2], nn.ReLU6):
        s = torch.where(seen[0] < 4, s, 1.0)
    first[1].weight.mul_(s)
    first[1].bias.mul_(s)
    reader.weight.div_(s.view(-1, 1, 1, 1) if reader.groups > 1 else s.view(1, -1, 1, 1))


@torch.inference_mode()
def top1(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return accuracy [%]."""
    return 100 * float((model(x).argmax(1) == y).float().mean())


def row(act: type[nn.Module], seed: int, platform: str, model: nn.Module) -> list[str]:
    """Quantize by default and without repairs; return a row of the table."""
    x, y = digits()
    data, test = list(x[:128].split(32)), (x[TRAINED_ON:], y[TRAINED_ON:])
    result = chipfit.quantize(model, data, platform, progress=False)
    plain = chipfit.quantize(model, data, platform, settings=chipfit.Settings(repairs="off"), progress=False)
    real, got, left = (top1(m, *test) for m in (model, result.model.eval(), plain.model.eval()))
    notes = (n for n in result.plan.rewrites if " taken:" in n and " not taken:" not in n)
    taken = [n.partition(" taken")[0] for n in notes]
    merit = result.plan.provenance["merit"]["sqnr_db"]
    over = "over" if real - got > LIMIT else ""
    figures = f"{real:.2f}", f"{got:.2f}", f"{left:.2f}", f"{merit:.1f}"
    return [act.__name__, str(seed), platform, *figures, ", ".join(taken), over]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    p.add_argument("--platforms", nargs="+", default=["ort_cpu", "tflite_int8", "vitis_dpu"])
    a = p.parse_args()
    torch.set_num_threads(1)
    table = Table("activation", "seed", "platform", "float", "default", "without repairs", "SQNR [dB]", "repairs", "")
    over = 0
    for act in (nn.ReLU, nn.ReLU6):
        for seed in a.seeds:
            model = trained(act, seed)
            make_unequal(model, digits()[0][:TRAINED_ON], seed)
            for platform in a.platforms:
                found = row(act, seed, platform, model)
                print(" | ".join(found), flush=True)
                table.add_row(*found)
                over += bool(found[-1])
    Console(width=150).print(table)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
