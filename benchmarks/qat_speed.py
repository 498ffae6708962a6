"""Measure what a training step with quantization costs, in units of the same step of the float network.

    python benchmarks/qat_speed.py [--networks resnet20 mobilenetv2] [--threads 2] [--repeats 15] [--compiled]

A step is forward, backward and update (SGD with momentum) on 64 images of 32x32. Both steps are taken in turns in one
process, after a warm-up; the figure is the ratio of medians, of wall-clock and of processor time. `--compiled` measures
both under `torch.compile` as well. Memory is the peak resident size of ten steps minus the size before them, each in a
process of its own (Linux only). The quantized network is the one of `chipfit.quantize(..., "ort_cpu",
training="lsq")`: 8-bit weights per channel and 8-bit activations, with the platform's rules enforced in every step.
Other tools measured: 1.8x to 3.1x eager.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from benchmarks.measure import grown_mib
from benchmarks.small import SMALL
from rich.console import Console
from rich.table import Table
from torch import nn

EAGER, COMPILED, MEMORY = 1.5, 1.25, 1.5  #: limits of the ratios
BATCH = 64


def step_of(network: nn.Module) -> Callable[[], None]:
    """Return a function that takes one training step on fixed random images."""
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 20, (BATCH,))
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 1e-4, momentum=0.9)
    network.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def networks(name: str) -> tuple[nn.Module, nn.Module]:
    """Return the float network and the quantized one."""
    import chipfit

    torch.manual_seed(0)
    model = SMALL[name]()
    return model, chipfit.quantize(model, [torch.randn(64, 3, 32, 32)], "ort_cpu", training="lsq", progress=False).model


def times(name: str, repeats: int, compiled: bool) -> tuple[float, float, float]:
    """Return the median seconds of a float step, and the ratios of the quantized one: wall-clock, processor."""
    steps = [step_of(torch.compile(n) if compiled else n) for n in networks(name)]
    for step in steps:
        for _ in range(3):
            step()
    taken: list[list[tuple[float, float]]] = [[], []]
    for _ in range(repeats):
        for step, out in zip(steps, taken, strict=True):
            start = time.perf_counter(), time.process_time()
            step()
            out.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    (wall, cpu), (our_wall, our_cpu) = ([median(v) for v in zip(*t, strict=True)] for t in taken)
    return wall, our_wall / wall, our_cpu / cpu


def peak(name: str, which: int, threads: int) -> float:
    """Return the memory of ten steps, measured in a process of its own [MiB]."""
    command = [sys.executable, __file__, "--child", name, str(which), "--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def child(name: str, which: int) -> None:
    step = step_of(networks(name)[which])
    print(grown_mib(lambda: [step() for _ in range(10)]))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", nargs="+", choices=list(SMALL), default=list(SMALL))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--compiled", action="store_true", help="also under torch.compile: a minute more for each network")
    p.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    if a.child:
        child(a.child[0], int(a.child[1]))
        return 0
    table, within = Table("network", "how", "float step [ms]", "ratio", "processor time", "limit"), True
    for name in a.networks:
        for how, limit in (("eager", EAGER), ("compiled", COMPILED))[: 1 + a.compiled]:
            wall, ratio, cpu = times(name, a.repeats, how == "compiled")
            within &= min(ratio, cpu) <= limit
            table.add_row(name, how, f"{1000 * wall:.0f}", f"{ratio:.2f}x", f"{cpu:.2f}x", f"{limit}x")
        base, ours = peak(name, 0, a.threads), peak(name, 1, a.threads)
        within &= ours <= MEMORY * base
        table.add_row(name, "memory", f"{base:.0f} MiB", f"{ours / base:.2f}x", "", f"{MEMORY}x")
    Console().print(table)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
