"""Count the integers that differ between chipfit's simulation and ONNX Runtime, in every tensor of whole networks.

    python benchmarks/exactness.py [--random 50] [--quick]

Weights are random, statistics of batch norms plausible. Random networks draw layers, widths, strides and branches from
a seed. "departures" counts errors: operators that, given the device's own quantized inputs, do not compute the device's
quantized outputs (where the runtime itself computes in float, reals half way between two quantized values may round
either way), constants of the file that are not the plan's, and outputs that differ. "at 0" is the share of all integers
without that allowance.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # spinning threads of two runtimes would wait for each other
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})

sys.path.insert(0, str(Path(__file__).parents[1]))  # the small architectures are those of the tests

import torch
from models import MODELS, build
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.verify import Verification
from tests.zoo import ZOO, make, unseen


class Merge(nn.Module):
    """Two branches with one input, joined by addition, multiplication or concatenation."""

    def __init__(self, left: nn.Module, right: nn.Module, how: str) -> None:
        super().__init__()
        self.left, self.right, self.how = left, right, how

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        return a + b if self.how == "add" else a * b if self.how == "mul" else torch.cat([a, b], 1)


def random_network(seed: int, depth: int = 6) -> nn.Sequential:
    """Return a network of images [N, 3, 32, 32] whose layers, widths and branches are drawn from `seed`."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    activations = (nn.ReLU, nn.ReLU6, nn.Identity, nn.LeakyReLU, nn.Sigmoid, lambda: nn.Hardtanh(-0.7, 1.3))

    def conv(c_in: int, c_out: int, stride: int = 1) -> nn.Sequential:
        groups = c_in if c_in == c_out and draw.random() < 0.4 else 1
        kernel = draw.choice((1, 3, 5))
        body = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=draw.random() < 0.5)
        norm = [nn.BatchNorm2d(c_out)] if draw.random() < 0.6 else []
        return nn.Sequential(body, *norm, draw.choice(activations)())

    c, size, layers = 3, 32, []
    for _ in range(depth):
        kind = draw.choice(("conv", "conv", "add", "mul", "cat", "max", "avg"))
        wide = draw.choice((4, 8, 12, 16))
        if kind in ("max", "avg") and size >= 8:
            layers.append(nn.MaxPool2d(2) if kind == "max" else nn.AvgPool2d(2))
            size //= 2
        elif kind in ("add", "mul", "cat"):
            layers.append(Merge(conv(c, wide), conv(c, wide), kind))
            c = wide * 2 if kind == "cat" else wide
        else:
            stride = 2 if size >= 8 and draw.random() < 0.3 else 1
            layers.append(conv(c, wide, stride))
            c, size = wide, -(-size // stride)
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)).eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.running_mean, -0.2, 0.2)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
    return net


def compare(model: nn.Module, calibration: list[object], others: list[object]) -> Verification:
    """Quantize on some batches and verify on others."""
    return chipfit.quantize(model, calibration, platform="ort_cpu", progress=False).verify(others)


def images(size: int) -> tuple[list[object], list[object]]:
    """Return 4 batches for calibration and 2 for verification, [4, 3, size, size]."""
    data: list[object] = [torch.randn(4, 3, size, size) for _ in range(6)]
    return data[:4], data[4:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=50, help="number of random networks")
    parser.add_argument("--quick", action="store_true", help="10 random networks and no architecture")
    args = parser.parse_args()
    torch.set_num_threads(2)
    table = Table(title="ONNX Runtime CPU against chipfit's integers")
    for heading in (
        *("network", "tensors compared", "integers", "differing", "largest"),
        *("float operators", "at 0", "departures", "seconds"),
    ):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    bad = 0

    def add(name: str, checks: list[Verification], seconds: float) -> None:
        nonlocal bad
        rows = [r for c in checks for r in c.rows]
        wrong, integers = sum(len(c.departures) for c in checks), sum(c.integers for c in checks)
        at_zero = sum(c.exact_share * c.integers for c in checks) / max(1, integers)
        bad += wrong + sum(r.differing for c in checks for r in c.rows if not c.float_operators)
        counts = (
            f"{sum(len(c.compared) for c in checks)} of {len(rows)}",
            integers,
            sum(r.differing for r in rows),
            max(r.largest for r in rows),
        )
        table.add_row(
            name,
            *map(str, counts),
            str(sum(len(c.float_operators) for c in checks)),
            f"{100 * at_zero:.2f} %",
            str(wrong),
            f"{seconds:.1f}",
        )

    def add_split(what: str, checks: list[Verification], start: float) -> None:
        seconds = time.perf_counter() - start
        for floats, words in ((False, ", all in integers"), (True, ", some operators in float")):
            part = [c for c in checks if bool(c.float_operators) == floats]
            if part:
                add(f"{len(part)} {what}{words}", part, seconds * len(part) / len(checks))

    for name in [] if args.quick else MODELS:
        start = time.perf_counter()
        check = compare(build(name), *images(96))
        add(f"{name}, 96x96", [check], time.perf_counter() - start)
    start = time.perf_counter()
    small = [compare(model, [batch], [unseen(batch)]) for model, batch in map(make, [] if args.quick else ZOO)]
    add_split("small architectures", small, start)
    start = time.perf_counter()
    checks = [compare(random_network(seed), *images(32)) for seed in range(10 if args.quick else args.random)]
    add_split("random networks", checks, start)
    Console(width=150).print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
