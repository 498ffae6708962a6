"""Measure what structured pruning costs in accuracy, on networks trained on procedural images.

    python benchmarks/pruning.py [--networks resnet20 mobilenetv2] [--share 0.7] [--epochs 2] [--seeds 2] [--reference]

Removes channels with `chipfit.prune` until 30 % fewer multiplications are left, from 512 images without labels, and
measures top-1 on 10,000 images that were not trained on: without training, and after two epochs of 16,000 images with
labels. `--reference` does so with the pruning of the Model Compression Toolkit, where it can be imported: in groups of
one channel, as here, at the limit on memory at which the same share of multiplications is left, with the same images
and the same training.

Training draws the order of images by a seed; figures are the mean of all seeds. Where the reference has no network of
that share, since its smallest is larger, that one is shown and not compared. Limits in points below float: ResNet-20 4
and 1, the small MobileNetV2 6 and 2, and never below the reference by more than `--noise`, twice the standard error of
a difference. The float networks are trained first, minutes each, and kept below `.bench`.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import re
import sys
import time
from collections.abc import Callable

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from benchmarks.small import SMALL, accuracy, trained
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.bench.data.procedural import images

#: limits in points below float: network -> without training, and after it
LIMITS = {"resnet20": (4.0, 1.0), "mobilenetv2": (6.0, 2.0)}
BATCH = 64
#: learning rate of the epochs after pruning, which falls to 0 along a cosine
RATE = 0.02


@torch.no_grad()
def multiplications(model: nn.Module) -> int:
    """Return the multiplications of convolutions and linear layers for one image [3, 32, 32]."""
    total = 0

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        total += layer.weight.numel() * math.prod(out.shape[2:])

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    model(torch.zeros(1, 3, 32, 32))
    for h in handles:
        h.remove()
    return total


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    """Return a copy that was trained on labels for some epochs, in evaluation mode."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for k in torch.randperm(len(x))[: len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[k]), y[k]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def pruned(model: nn.Module, data: list[Tensor], share: float) -> nn.Module:
    """Return the network after `chipfit.prune`."""
    found: nn.Module = chipfit.prune(model, data, limits=chipfit.Limits(bops=f"{100 * share}%")).model
    return found


def reference(model: nn.Module, data: list[Tensor], share: float) -> nn.Module:
    """Return the network after the pruning of the Model Compression Toolkit, at this share of multiplications.

    Its limit is one on memory, which is searched by bisection.
    """
    import model_compression_toolkit as mct

    whole = multiplications(model)
    numbers = sum(p.numel() for p in model.parameters())
    chip = mct.get_target_platform_capabilities()
    text = re.sub(r'("simd_size": ?)\d+', r"\g<1>1", chip.model_dump_json())
    chip = type(chip).model_validate_json(text).model_copy(update={"is_simd_padding": False})
    low, high, best = 0.2, 1.0, model
    for _ in range(6):
        middle = (low + high) / 2
        limit = mct.core.ResourceUtilization(weights_memory=middle * numbers * 4)
        try:
            small, _ = mct.pruning.pytorch_pruning_experimental(
                copy.deepcopy(model), limit, lambda: ([x.numpy()] for x in data), target_platform_capabilities=chip
            )
        except Exception as e:  # it raises no other type
            if "Insufficient memory" not in str(e):
                raise
            low = middle
            continue
        small = small.cpu().eval()
        enough = multiplications(small) <= share * whole
        low, high = (middle, high) if enough else (low, middle)
        best = small if enough or multiplications(small) < multiplications(best) else best
    return best


def row(name: str, tool: str, small: nn.Module, whole: int, real: float, a: argparse.Namespace) -> tuple[float, float]:
    """Print and return the points below float without training, and after it."""
    x_test, y_test = images(a.test, 1)
    share, begun = multiplications(small) / whole, time.perf_counter()
    before = real - accuracy(small, x_test, y_test)
    x, y = images(16000, 1000)
    trained_ones = (train(small, x, y, a.epochs, seed) for seed in range(a.seeds))
    after = real - sum(accuracy(m, x_test, y_test) for m in trained_ones) / a.seeds
    seconds = time.perf_counter() - begun
    words = f"{share:.1%} of the multiplications, {before:.2f} points below float, trained {after:.2f} below"
    print(f"{name} {tool}: {words} ({seconds:.0f} s)", flush=True)
    return before, after


def main() -> bool:
    """Print the table; return whether all figures are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(SMALL), default=list(SMALL))
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.5, help="points")
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--reference", action="store_true", help="prune with the Model Compression Toolkit too")
    a = parser.parse_args()
    tools: dict[str, Callable[[nn.Module, list[Tensor], float], nn.Module]] = {"chipfit": pruned}
    tools |= {"reference": reference} if a.reference else {}
    data, within = list(images(512, 3000)[0].split(BATCH)), True
    table = Table("network", "float", "tool", "below float", "limit", "trained", "limit", "s to prune")
    for name in a.networks:
        model = trained(name)
        real, whole, found, shares = accuracy(model, *images(a.test, 1)), multiplications(model), {}, {}
        for tool, prune in tools.items():
            begun = time.perf_counter()
            small = prune(model, data, a.share)
            seconds = time.perf_counter() - begun
            shares[tool] = multiplications(small) / whole
            before, after = found[tool] = row(name, tool, small, whole, real, a)
            limits = LIMITS[name] if tool == "chipfit" else (math.inf, math.inf)
            within &= before <= limits[0] and after <= limits[1]
            cells = (before, limits[0], after, limits[1], seconds)
            table.add_row(name, f"{real:.2f}", tool, *(f"{v:.2f}" for v in cells))
        if a.reference and shares["reference"] <= 1.01 * a.share:
            within &= all(x <= y + a.noise for x, y in zip(found["chipfit"], found["reference"], strict=True))
    Console().print(table)
    return within


if __name__ == "__main__":
    sys.exit(not main())
