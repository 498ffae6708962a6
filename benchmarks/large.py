"""Measure time and memory of closed-form rounding on ResNet-18 with 224x224 images in W4A8, on one thread.

    python benchmarks/large.py [--images 128]

Prints the processor seconds of the first `quantize` of the process, with and without the capture, and how much the peak
of its resident size grows (Linux only). Weights and images are random, because both figures depend on shapes alone;
`accuracy.py` measures accuracy. Limits: 45 s without the capture, and 1.5 GB.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})

import torch
from measure import both_clocks, grown_mib
from models import build

import chipfit

SECONDS, MIB = 45.0, 1.5e9 / 2**20
BATCH = 16


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--images", type=int, default=128, help=f"calibration images, a multiple of {BATCH}")
    a = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, data = build("resnet18"), [torch.randn(BATCH, 3, 224, 224) for _ in range(a.images // BATCH)]
    platform, grown = Path(__file__).parent / "platforms" / "inputs.yaml", list[float]()

    def work() -> None:
        width = {"*": {"bits": 4, "activation_bits": 8}}
        chipfit.quantize(model, data, platform, overrides=width, settings=chipfit.BEST, progress=False)

    _, whole = both_clocks(lambda: grown.append(grown_mib(work)))
    _, alone = both_clocks(lambda: chipfit.capture(model, (data[0],)))
    seconds = whole - alone
    print(f"ResNet-18, {a.images} images, W4A8: {whole:.1f} processor seconds, of which a capture takes {alone:.1f}")
    print(f"without it {seconds:.1f} of {SECONDS:g} s; memory {grown[0]:.0f} of {MIB:.0f} MiB")
    return int(seconds > SECONDS or grown[0] > MIB)


if __name__ == "__main__":
    sys.exit(main())
