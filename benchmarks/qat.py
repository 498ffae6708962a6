"""Accuracy of quantization-aware training in few bits, on networks trained on procedural images.

    python benchmarks/qat.py [--networks resnet20 mobilenetv2] [--bits 4 3] [--seeds 3] [--epochs 3]

Starts from `chipfit.quantize` with default settings on 512 images (platform mqbench_academic: weights per channel and
inputs of layers in so many bits, first and last layer in 8), and trains on 8,000 images an epoch, learning from the
float model beside the labels. Top-1 on 20,000 images that neither training saw. The reference is the float network; the
best of five other tools, at 4 bits on such a residual network in two epochs, ends 2.2 points below it.

The float networks are trained first, half an hour for each seed, and kept below `.bench`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from benchmarks.images import images
from benchmarks.small import SMALL, accuracy, trained
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.training import Distillation

#: points below float that must be reached: (network, bits)
LIMITS = {("resnet20", 4): 1.0, ("resnet20", 3): 3.0, ("mobilenetv2", 4): 2.5, ("mobilenetv2", 3): 6.0}
PLATFORM = "mqbench_academic"
BATCH = 64


def fitted(model: nn.Module, calibration: Tensor, bits: int, training: object = "lsq") -> chipfit.Result:
    """The starting point: post-training quantization, with quantizers that train."""
    width = {"*": {"bits": bits, "activation_bits": bits}}
    data = list(calibration.split(BATCH))
    return chipfit.quantize(model, data, PLATFORM, overrides=width, training=training, progress=False)


def train(result: chipfit.Result, x: Tensor, y: Tensor, epochs: int, rate: float = 0.001, seed: int = 0) -> None:
    """Plain stochastic gradient descent with a cosine schedule, on labels and on what the float network returns."""
    torch.manual_seed(seed)
    distill = Distillation(result)
    parameters = [p for p in distill.parameters() if p.requires_grad]
    decay = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 1e-4}]
    rest = [{"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(decay + rest, rate, momentum=0.9, nesterov=True)
    steps = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    distill.train()
    for _ in range(epochs):
        for k in torch.randperm(len(x))[: len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad(set_to_none=True)
            out, loss = distill(x[k])
            (loss + F.cross_entropy(out, y[k])).backward()
            optimizer.step()
            schedule.step()
    distill.eval()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", nargs="+", choices=list(SMALL), default=list(SMALL))
    p.add_argument("--bits", nargs="+", type=int, default=[4, 3])
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--images", type=int, default=8000, help="in an epoch")
    p.add_argument("--test", type=int, default=20000, help="images")
    p.add_argument(
        "--rate", type=float, default=0.001, help="of the weights; ten times as much lets depthwise networks diverge"
    )
    p.add_argument("--method", default="lsq")
    p.add_argument("--bn-fold", type=int, default=None)
    a = p.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    x_test, y_test = images(a.test, 1)
    console, bad = Console(), 0
    table = Table("network", "bits", "float", "quantized", "trained", "below float", "limit", "at worst", "s")
    for name in a.networks:
        for bits in a.bits:
            rows = []
            begun = time.perf_counter()
            for seed in range(a.first_seed, a.first_seed + a.seeds):
                model = trained(name, seed)
                x, y = images(a.images, 2000 + seed)
                training = a.method if a.bn_fold is None else {"method": a.method, "bn_fold": a.bn_fold}
                result = fitted(model, images(512, 3000 + seed)[0], bits, training)
                before = accuracy(result.model.eval(), x_test, y_test)
                train(result, x, y, a.epochs, a.rate, seed)
                after = accuracy(result.trained().model.eval(), x_test, y_test)
                rows.append((accuracy(model, x_test, y_test), before, after))
                words = ", ".join(f"{w} {v:.2f}" for w, v in zip(("float", "quantized", "trained"), rows[-1]))
                print(f"{name} W{bits}A{bits} seed {seed}: {words}", flush=True)
            real, before, after = (sum(r) / len(rows) for r in zip(*rows, strict=True))
            worst, limit = max(r[0] - r[2] for r in rows), LIMITS.get((name, bits), 100.0)
            bad += real - after > limit or any(r[2] < r[1] for r in rows)
            numbers = (real, before, after, real - after, limit, worst, time.perf_counter() - begun)
            table.add_row(name, f"W{bits}A{bits}", *(f"{v:.2f}" for v in numbers))
    console.print(table)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
