"""Measure what quantization costs, in units of one plain float pass over the same images.

    python benchmarks/ptq_speed.py [--models resnet18 mobilenetv2] [--threads 2] [--images 128] [--repeats 3] [--quick]

The float pass runs the model unchanged: eager, in inference mode, batch norms unfolded, images in contiguous memory
format. A pass as deployed (batch norms folded, channels last) is shown beside it. `chipfit.quantize` is measured as a
whole (capture, rewrites, calibration, ranges; without export): the first call of a process, which includes all imports
except torch, and later calls. Every process measures them in turns; the least of `--repeats` processes counts, in
wall-clock seconds and in processor seconds of all threads. Memory is the peak resident size during the work minus the
size after importing and building model and images, each in a process of its own (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

if (
    os.environ.get("OMP_WAIT_POLICY") != "PASSIVE"
):  # spinning threads would time the scheduler; read once, when torch loads
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})

import torch
from measure import both_clocks, grown_mib
from models import MODELS, build, keras_mobilenetv2
from rich.console import Console
from rich.table import Table

#: limits of the ratios: first call of a process, later calls
TIME_LIMIT = {"resnet18": (1.5, 0.9), "mobilenetv2": (1.25, 0.9), "keras_mobilenetv2": (2.0, 2.0)}
MEMORY_LIMIT = 1.3
#: best ratios measured for other tools on the same task (128 images, one machine), first call
PEERS = {"resnet18": "1.45x AIMET", "mobilenetv2": "1.5x ONNX Runtime's tool", "keras_mobilenetv2": ""}
NAMES = [*MODELS, "keras_mobilenetv2"]
BATCH = 16


def make(name: str) -> Any:
    return keras_mobilenetv2() if name == "keras_mobilenetv2" else build(name)


def images(count: int, name: str = "") -> list[torch.Tensor]:
    """Return `count` random images as batches of 16, [16, 3, 224, 224], or channels last for a Keras model."""
    torch.manual_seed(1)
    shape = (BATCH, 224, 224, 3) if name.startswith("keras") else (BATCH, 3, 224, 224)
    return [torch.randn(shape) for _ in range(count // BATCH)]


def float_pass(model: Any, data: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        for x in data:
            if isinstance(model, torch.nn.Module):  # for Keras on torch as well
                model(x)
            else:
                model(x.numpy(), training=False)


def quantize(model: Any, data: list[torch.Tensor]) -> Any:
    """Quantize, check that the statistics cover every image, and return the result."""
    import chipfit

    result = chipfit.quantize(model, data, platform="ort_cpu", progress=False)
    seen = result.stats[result.graph.inputs[0]].count
    if seen != sum(x.numel() for x in data):
        raise SystemExit(f"only {seen} values of the images are in the statistics")
    return result


def folded_pass(graph: Any, data: list[torch.Tensor]) -> None:
    """Return the network after the rewrites, with the same kernels and without observers."""
    from chipfit.engine.run import run

    with torch.inference_mode():
        for x in data:
            run(graph, [x.contiguous(memory_format=torch.channels_last)], reuse=True)


def time_child(name: str, count: int) -> None:
    """Print the seconds by both clocks for each kind of work in this process, and the stages of the calls."""
    model, data = make(name), images(count, name)
    float_pass(model, data[:2])
    plain, folded, results = [], [], []
    plain.append(both_clocks(lambda: float_pass(model, data)))
    first = both_clocks(lambda: results.append(quantize(model, data)))
    plain.append(both_clocks(lambda: float_pass(model, data)))
    later = [both_clocks(lambda: results.append(quantize(model, data)))]
    folded.append(both_clocks(lambda: folded_pass(results[0].graph, data)))
    plain.append(both_clocks(lambda: float_pass(model, data)))
    later.append(both_clocks(lambda: results.append(quantize(model, data))))
    folded.append(both_clocks(lambda: folded_pass(results[0].graph, data)))
    stages = {"first call": results[0].timings, "a later call": results[-1].timings}
    print(json.dumps({"plain": plain, "folded": folded, "first": [first], "later": later, "stages": stages}))


def measure_time(name: str, count: int, threads: int, repeats: int) -> tuple[dict[str, tuple[float, float]], Any]:
    """Return the least seconds, by both clocks, of each kind of work over processes, and the stages of the last."""
    runs = [json.loads(child("--time-child", [name], count, threads)) for _ in range(repeats)]
    kinds = ("plain", "folded", "first", "later")
    best = {k: tuple(min(both[c] for r in runs for both in r[k]) for c in (0, 1)) for k in kinds}
    return best, runs[-1]["stages"]


def memory_child(name: str, what: str, count: int) -> None:
    """Print how much the peak resident size grows during `what` [MiB]."""
    quantize(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval(), [torch.randn(1, 3, 8, 8)]
    )  # loads the libraries that both need
    model, data = make(name), images(count, name)
    print(grown_mib(lambda: (float_pass if what == "float" else quantize)(model, data)))


def child(kind: str, what: list[str], count: int, threads: int) -> str:
    """Return the last line that a process of its own prints."""
    command = [sys.executable, __file__, kind, *what, "--images", str(count), "--threads", str(threads)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]


def measure_memory(name: str, what: str, count: int, threads: int) -> float:
    return float(child("--memory-child", [name, what], count, threads))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=128, help=f"calibration images, a multiple of {BATCH}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="32 images, once, to see that it runs")
    parser.add_argument("--memory-child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--time-child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    count, repeats = (32, 1) if args.quick else (args.images, args.repeats)
    if args.memory_child:
        memory_child(*args.memory_child, args.images)
        return 0
    if args.time_child:
        time_child(args.time_child, args.images)
        return 0

    title = (
        f"{count} images of 224x224 in batches of {BATCH}, {args.threads} threads, least of {repeats}; s (processor s)"
    )
    table = Table(title=title)
    headings = "model|float pass|folded, channels last|first call|limit|best peer|later calls|limit|memory|limit"
    for heading in headings.split("|"):
        table.add_column(heading, justify="left" if heading in ("model", "best peer") else "right")
    notes, within = [], True
    for name in args.models:
        seconds, stages = measure_time(name, count, args.threads, repeats)
        base, grown = (measure_memory(name, what, count, args.threads) for what in ("float", "quantize"))
        plain = seconds["plain"]
        ratios = {k: (both[0] / plain[0], both[1] / plain[1]) for k, both in seconds.items()}
        first, later = TIME_LIMIT[name]
        ok = ratios["first"][0] <= first and ratios["later"][0] <= later and grown / base <= MEMORY_LIMIT
        within &= ok
        told = {k: f"{r[0]:.2f}x ({r[1]:.2f}x)" for k, r in ratios.items()}
        table.add_row(
            name,
            f"{plain[0]:.2f} ({plain[1]:.2f})",
            told["folded"],
            told["first"],
            f"{first}x",
            PEERS[name],
            told["later"],
            f"{later}x",
            f"{grown / base:.2f}x",
            f"{MEMORY_LIMIT}x",
            style="" if ok else "red",
        )
        for call, spent in stages.items():
            notes.append(f"{name}, {call}: " + ", ".join(f"{k} {v:.2f} s" for k, v in spent.items()))
        notes.append(f"{name}: peak {base:.0f} and {grown:.0f} MiB")
    console = Console(width=180)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    return 0 if within or args.quick else 1  # a run over its limit fails, so that a script can watch it


if __name__ == "__main__":
    sys.exit(main())
