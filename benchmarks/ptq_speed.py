"""What quantization costs, in units of one plain float pass over the same images.

    python benchmarks/ptq_speed.py [--models resnet18 mobilenetv2] [--threads 2] [--images 128] [--repeats 3] [--quick]

Time: `chipfit.quantize` as a whole (capture, rewrites, calibration, ranges; without export) over an eager float pass in
inference mode, same process, same threads, best of `--repeats` after a warm-up. Memory: peak resident size during the
work less that after importing and building model and images, each in a process of its own (Linux only).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if (
    os.environ.get("OMP_WAIT_POLICY") != "PASSIVE"
):  # spinning threads would time the scheduler; read once, when torch loads
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})

import torch
from models import MODELS, build, keras_mobilenetv2
from rich.console import Console
from rich.table import Table

#: ratio that we want to stay below
TIME_LIMIT = {"resnet18": 1.5, "mobilenetv2": 1.3, "keras_mobilenetv2": 2.0}
MEMORY_LIMIT = 1.3
#: best ratios measured for other tools on the same task (128 images, one machine)
PEERS = {"resnet18": "2.0x AIMET", "mobilenetv2": "1.5x ONNX Runtime quantization tool", "keras_mobilenetv2": ""}
NAMES = [*MODELS, "keras_mobilenetv2"]
BATCH = 16


def make(name: str) -> Any:
    return keras_mobilenetv2() if name == "keras_mobilenetv2" else build(name)


def images(count: int, name: str = "") -> list[torch.Tensor]:
    """`count` random images as batches of 16, [16, 3, 224, 224], or channels last for a Keras model."""
    torch.manual_seed(1)
    shape = (BATCH, 224, 224, 3) if name.startswith("keras") else (BATCH, 3, 224, 224)
    return [torch.randn(shape) for _ in range(count // BATCH)]


def float_pass(model: Any, data: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        for x in data:
            if isinstance(model, torch.nn.Module):  # Keras on torch as well
                model(x)
            else:
                model(x.numpy(), training=False)


def quantize(model: Any, data: list[torch.Tensor]) -> dict[str, float]:
    """Returns seconds per stage."""
    import chipfit

    return chipfit.quantize(model, data, platform="ort_cpu", progress=False).timings


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_time(name: str, count: int, repeats: int) -> tuple[float, float, dict[str, float]]:
    """Best seconds of the float pass and of quantize, taken in turns, and the stages of the last quantize."""
    model, data = make(name), images(count, name)
    float_pass(model, data[:2])
    stages = quantize(model, data[:1])
    plain, ours = [], []
    for _ in range(repeats):
        plain.append(seconds(lambda: float_pass(model, data)))
        start = time.perf_counter()
        stages = quantize(model, data)
        ours.append(time.perf_counter() - start)
    return min(plain), min(ours), stages


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (its peak). Not `ru_maxrss`, which a new process inherits from the one that started it."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def memory_child(name: str, what: str, count: int) -> None:
    """Print the growth of the peak resident size in MiB while doing `what`."""
    quantize(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval(), [torch.randn(1, 3, 8, 8)]
    )  # loads what both measure
    model, data = make(name), images(count, name)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building them
    before = resident_mib("VmRSS")
    float_pass(model, data) if what == "float" else quantize(model, data)
    print(resident_mib("VmHWM") - before)


def measure_memory(name: str, what: str, count: int, threads: int) -> float:
    command = [
        sys.executable,
        __file__,
        "--memory-child",
        name,
        what,
        "--images",
        str(count),
        "--threads",
        str(threads),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=128, help=f"calibration images, a multiple of {BATCH}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="32 images, once: does it run at all")
    parser.add_argument("--memory-child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    count, repeats = (32, 1) if args.quick else (args.images, args.repeats)
    if args.memory_child:
        memory_child(*args.memory_child, args.images)
        return 0

    table = Table(
        title=f"chipfit.quantize, {count} images of 224x224 in batches of {BATCH}, "
        f"{args.threads} threads, best of {repeats}"
    )
    for heading in (
        "model",
        "float pass [s]",
        "quantize [s]",
        "time ratio",
        "limit",
        "best peer",
        "memory ratio",
        "limit ",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "best peer") else "right")
    notes, within = [], True
    for name in args.models:
        plain, ours, stages = measure_time(name, count, repeats)
        base, grown = (measure_memory(name, what, count, args.threads) for what in ("float", "quantize"))
        time_ratio, memory_ratio = ours / plain, grown / base
        ok = time_ratio <= TIME_LIMIT[name] and memory_ratio <= MEMORY_LIMIT
        within &= ok
        row = (
            name,
            f"{plain:.2f}",
            f"{ours:.2f}",
            f"{time_ratio:.2f}x",
            f"{TIME_LIMIT[name]}x",
            PEERS[name],
            f"{memory_ratio:.2f}x",
        )
        table.add_row(*row, f"{MEMORY_LIMIT}x", style="" if ok else "red")
        notes.append(
            f"{name}: "
            + ", ".join(f"{k} {v:.2f} s" for k, v in stages.items())
            + f"; peak {base:.0f} and {grown:.0f} MiB"
        )
    console = Console(width=140)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    return 0 if within or args.quick else 1  # a run over its limit fails, so that a script can watch it


if __name__ == "__main__":
    sys.exit(main())
