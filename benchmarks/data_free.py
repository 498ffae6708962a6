"""Accuracy with calibration data generated from batch norms, beside real images and noise.

    python benchmarks/data_free.py [--networks resnet20 mobilenetv2] [--images 128] [--steps N] [--test 4000]

Top-1 in percent of the small networks of procedural images in W8A8 and W4A8, on images that calibration has not seen.
The generated images may lose 1 point against real ones in W8A8, and 3 in W4A8. The float networks are trained first,
some minutes each, and kept below `.bench`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from benchmarks.small import SMALL, accuracy, trained
from rich.console import Console
from rich.table import Table

import chipfit
from chipfit.bench.data.procedural import images

PLATFORM = Path(__file__).parent / "platforms/inputs.yaml"
#: bits of weights, with activations of 8 bits -> points that generated images may lose against real ones
LIMITS = {8: 1.0, 4: 3.0}


def top1(model: torch.nn.Module, data: Any, bits: int, test: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the accuracy of a model that was quantized with some data."""
    overrides = {"*": {"bits": bits, "activation_bits": 8}}
    result = chipfit.quantize(model, data, PLATFORM, overrides=overrides, progress=False)
    return accuracy(result.model.eval(), *test)


def main() -> int:
    """Print one row for each network and width; return 1 if a limit is missed."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--networks", nargs="+", choices=SMALL, default=list(SMALL))
    args.add_argument("--images", type=int, default=128)
    args.add_argument("--steps", type=int)
    args.add_argument("--test", type=int, default=4000)
    asked = args.parse_args()
    table = Table("network", "bits", "float", "real images", "generated", "noise", "lost", "limit", "generated in")
    test, missed = images(asked.test, 1), False
    for name in asked.networks:
        model, begun = trained(name), time.perf_counter()
        options = chipfit.Generation(steps=asked.steps)
        made = chipfit.generated(model, asked.images, example=test[0][:2], options=options)
        seconds, plain = time.perf_counter() - begun, accuracy(model, *test)
        noise = list(torch.randn(asked.images, 3, 32, 32, generator=torch.Generator().manual_seed(0)).split(32))
        for bits, limit in LIMITS.items():
            data = list(images(asked.images, 5000)[0].split(32)), made, noise
            real, generated, random = (top1(model, d, bits, test) for d in data)
            missed |= real - generated > limit
            row = plain, real, generated, random, real - generated
            table.add_row(name, f"W{bits}A8", *(f"{x:.2f}" for x in row), f"{limit:.1f}", f"{seconds:.0f} s")
    Console(width=120).print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
