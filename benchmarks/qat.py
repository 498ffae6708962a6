"""Measure the accuracy of quantization-aware training in few bits, on networks trained on procedural images.

    python benchmarks/qat.py [--networks resnet20 mobilenetv2] [--bits 4 3] [--seeds 3] [--epochs 3]
    python benchmarks/qat.py --algorithms [--networks resnet20] [--resume]

Starts from `chipfit.quantize` with default settings on 512 images (platform mqbench_academic: weights per channel and
inputs of layers in `--bits`, first and last layer in 8), and trains on 8,000 images an epoch with distillation from the
float model. Top-1 is measured on 20,000 images that were not trained on. All accuracy figures share one float network
of each kind; a seed draws the calibration images and the order of training images. The reference is the float network;
the best of five other tools, at 4 bits on such a residual network in two epochs, ends 2.2 points below it.

`--algorithms` trains every registered algorithm in the hardware settings of `chipfit.quantize_fx` in `--bits`, and
shows top-1 behind that of the float network. It is shortened to one seed, one epoch of 2,000 images, labels alone and
4,000 test images, so it compares settings and shows no algorithm at its best. Reasons of unsupported cells stand below
the table. Each cell is written to `.bench/algorithms.json` when it is known; `--resume` continues an interrupted run.

The float networks are trained first, a quarter of an hour each, and kept below `.bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from benchmarks.small import KEPT, SMALL, accuracy, trained
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.bench.data.procedural import images
from chipfit.errors import ChipfitError
from chipfit.quantize_fx import enable_calibration, enable_quantization, get_backend_params, get_qconfig, prepare_qat_fx
from chipfit.registry import registered
from chipfit.training import Distillation

#: limits in points below float: (network, bits)
LIMITS = {("resnet20", 4): 1.0, ("resnet20", 3): 3.0, ("mobilenetv2", 4): 2.5, ("mobilenetv2", 3): 6.0}
#: learning rates of weights, and of scales relative to their size
RATES = (0.0007, 0.001)
#: networks for which three epochs at these rates are too few
FASTER = {("mobilenetv2", 3): (0.0015, 0.002)}
PLATFORM = "mqbench_academic"
#: method that trains activations alone -> its usual method for weights
PARTNERS = {"pact": "dorefa"}
SETTINGS = ("academic", "tensorrt", "snpe")  #: options of the table of algorithms
BATCH = 64


def fitted(model: nn.Module, calibration: Tensor, bits: int, training: object = "lsq") -> chipfit.Result:
    """Return the starting point: post-training quantization, with trainable quantizers."""
    width = {"*": {"bits": bits, "activation_bits": bits}}
    data = list(calibration.split(BATCH))
    settings = chipfit.Settings(rounding="off")  # training starts from weights rounded to the nearest quantized value
    return chipfit.quantize(
        model, data, PLATFORM, overrides=width, settings=settings, training=training, progress=False
    )


def optimizer_of(network: nn.Module, rate: float, of_scales: float) -> torch.optim.Optimizer:
    """Return Adam; parameters of quantizers, which differ by orders of magnitude, move relative to their size.

    Args:
        rate: learning rate of weights and biases.
        of_scales: relative learning rate of quantizers; of those that start at 0, the absolute rate.
    """
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    own = [p for name, p in named if "quant" in name]
    groups = [{"params": [p], "lr": of_scales * (float(p.detach().abs().mean()) or 1.0)} for p in own]
    return torch.optim.Adam([{"params": [p for name, p in named if "quant" not in name]}, *groups], rate)


def train(result: chipfit.Result, x: Tensor, y: Tensor, epochs: int, rate: float, of_scales: float, seed: int) -> None:
    """Train with a cosine schedule, on labels and on the outputs of the float network."""
    torch.manual_seed(seed)
    distill = Distillation(result)
    optimizer = optimizer_of(result.model, rate, of_scales)
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


def accuracies(a: argparse.Namespace, console: Console) -> bool:
    """Print the table of networks and bits; return whether all figures are within their limits."""
    x_test, y_test = images(a.test, 1)
    x, y = images(a.images, 2000)
    training = a.method if a.bn_fold is None else {"method": a.method, "bn_fold": a.bn_fold}
    within = True
    table = Table("network", "bits", "float", "quantized", "trained", "below float", "limit", "at worst", "s")
    for name in a.networks:
        model = trained(name)
        real = accuracy(model, x_test, y_test)
        for bits in a.bits:
            rows, begun = [], time.perf_counter()
            rates = _rates(a, FASTER.get((name, bits), RATES))
            for seed in range(a.first_seed, a.first_seed + a.seeds):
                result = fitted(model, images(512, 3000 + seed)[0], bits, training)
                before = accuracy(result.model.eval(), x_test, y_test)
                train(result, x, y, a.epochs, *rates, seed)
                after = accuracy(result.trained().model.eval(), x_test, y_test)
                rows.append((before, after))
                words = f"float {real:.2f}, quantized {before:.2f}, trained {after:.2f}"
                print(f"{name} W{bits}A{bits} seed {seed}: {words}", flush=True)
            before, after = (sum(r) / len(rows) for r in zip(*rows, strict=True))
            worst, limit = max(real - r[1] for r in rows), LIMITS.get((name, bits), 100.0)
            within &= real - after <= limit and all(r[1] >= r[0] for r in rows)
            numbers = (real, before, after, real - after, limit, worst, time.perf_counter() - begun)
            table.add_row(name, f"W{bits}A{bits}", *(f"{v:.2f}" for v in numbers))
    console.print(table)
    return within


def _rates(a: argparse.Namespace, usual: tuple[float, float]) -> tuple[float, float]:
    return a.rate or usual[0], a.scale_rate or usual[1]


def in_setting(model: nn.Module, method: str, setting: str, a: argparse.Namespace, x: Tensor, y: Tensor) -> nn.Module:
    """Return a network that an algorithm has trained in a hardware setting, for an epoch of x [N, 3, 32, 32], y [N].

    Raises:
        ChipfitError: the setting does not support the algorithm, or training diverged.
    """
    torch.manual_seed(0)
    qconfig = get_qconfig(PARTNERS.get(method, method), method, a.bits[0], **get_backend_params(setting))
    network = prepare_qat_fx(model, {"": qconfig}).eval()
    enable_calibration(network)
    with torch.no_grad():
        for part in images(512, 3000)[0].split(BATCH):
            network(part)
    enable_quantization(network)
    network.train()
    optimizer = optimizer_of(network, *_rates(a, RATES))
    steps = torch.randperm(len(x))[: len(x) // BATCH * BATCH].split(BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps))
    for k in steps:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(network(x[k]), y[k]).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def algorithms(a: argparse.Namespace, console: Console) -> None:
    """Print the table of algorithms and hardware settings."""
    x_test, y_test = images(a.test, 1)
    x, y = images(a.images, 2000)
    file = KEPT / "algorithms.json"
    known = json.loads(file.read_text()) if a.resume and file.exists() else {}
    for name in a.networks:
        model, refused = trained(name), dict[str, list[str]]()
        real = accuracy(model, x_test, y_test)
        table = Table(f"{name}, {a.bits[0]} bits", *SETTINGS, title=f"top-1; the float network has {real:.2f} %")
        for method in sorted(registered("training")):
            cells = []
            for setting in SETTINGS:
                key = f"{name} {method} {setting} {a.bits[0]} {a.images} {a.test} {_rates(a, RATES)}"
                if key not in known:
                    try:
                        network = in_setting(model, method, setting, a, x, y)
                        known[key] = f"{accuracy(network, x_test, y_test):.2f}", ""
                    except ChipfitError as e:
                        known[key] = "refused", str(e)
                    file.write_text(json.dumps(known))
                cell, why = known[key]
                cells.append(cell)
                if why:
                    refused.setdefault(why, []).append(f"{method} x {setting}")
                print(f"{name} {method} x {setting}: {cells[-1]}", flush=True)
            table.add_row(method, *cells)
        console.print(table)
        for why, where in refused.items():
            console.print(f"{', '.join(where)}: {why}", markup=False)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--algorithms", action="store_true", help="the table of algorithms and hardware settings")
    p.add_argument("--resume", action="store_true", help="keep the cells of an earlier, interrupted run")
    p.add_argument("--networks", nargs="+", choices=list(SMALL))
    p.add_argument("--bits", nargs="+", type=int)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--images", type=int, help="in an epoch")
    p.add_argument("--test", type=int, help="images")
    p.add_argument("--rate", type=float, help="of the weights")
    p.add_argument("--scale-rate", type=float, help="learning rate of scales, relative to their size")
    p.add_argument("--method", default="lsq")
    p.add_argument("--bn-fold", type=int, default=None)
    a = p.parse_args()
    a.networks = a.networks or (["resnet20"] if a.algorithms else list(SMALL))
    a.bits = a.bits or ([4] if a.algorithms else [4, 3])
    a.images = a.images or (2000 if a.algorithms else 8000)
    a.test = a.test or (4000 if a.algorithms else 20000)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    if a.algorithms:
        algorithms(a, Console())
        return 0
    return int(not accuracies(a, Console()))


if __name__ == "__main__":
    sys.exit(main())
