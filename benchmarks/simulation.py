"""Measure what the simulation in integers costs (`Result.device_model`, `Result.verify`), beside sums in float64.

    python benchmarks/simulation.py [--images 8] [--repeats 5]

ResNet-18 and MobileNetV2 with random weights, 224x224, for `ort_cpu` and `tflite_int8`. Figures are processor
seconds of one thread, the median over interleaved repeats: the float network, the simulation that sums products of
8-bit integers in int32, and the simulation that computes all products in float64, whose outputs must be equal.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any
from unittest import mock

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from benchmarks.measure import both_clocks
from benchmarks.models import build
from rich.console import Console
from rich.table import Table

import chipfit
from chipfit.simulate import sums

NETWORKS = {"ResNet-18": "resnet18", "MobileNetV2": "mobilenetv2"}
PLATFORMS = "ort_cpu", "tflite_int8"
COLUMNS = "network", "platform", "float [s]", "device_model [s]", "in float64 [s]", "verify [s]", "in float64 [s]"


def in_float64() -> Any:
    return mock.patch.object(sums, "fits", return_value=False)


def seconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return processor seconds in integers and in float64, measured in turns."""
    spent: tuple[list[float], list[float]] = [], []
    for _ in range(repeats):
        spent[0].append(both_clocks(work)[1])
        with in_float64():
            spent[1].append(both_clocks(work)[1])
    return median(spent[0]), median(spent[1])


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--images", type=int, default=8)
    p.add_argument("--repeats", type=int, default=5)
    a = p.parse_args()
    table, unequal = Table(*COLUMNS), 0
    for (label, name), platform in product(NETWORKS.items(), PLATFORMS):
        model, images = build(name), torch.randn(a.images, 3, 224, 224)
        result = chipfit.quantize(model, [images], platform, progress=False)
        device = result.device_model
        with torch.inference_mode():
            plain = seconds(partial(model, images), a.repeats)[0]
            simulated = seconds(partial(device, images), a.repeats)
        verified = seconds(partial(result.verify, [images]), a.repeats)
        table.add_row(label, platform, *(f"{s:.2f}" for s in (plain, *simulated, *verified)))
        fast = device(images)
        with in_float64():
            unequal += not torch.equal(fast, device(images))
    Console().print(table)
    print(f"outputs that differ from float64: {unequal}")
    return unequal


if __name__ == "__main__":
    raise SystemExit(main())
