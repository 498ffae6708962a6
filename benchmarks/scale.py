"""Estimate the cost of the full matrix on ImageNet from measured unit costs and stated assumptions.

python benchmarks/scale.py --measure   # takes minutes: writes unit costs of this machine into benchmarks/scale.yaml
python benchmarks/scale.py             # writes docs/scale.md from it
"""

from __future__ import annotations

import argparse
import heapq
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from prose import wrapped

UNITS, PAGE = ROOT / "benchmarks/scale.yaml", ROOT / "docs/scale.md"
#: accelerators for one experiment, and accelerators in all
TOGETHER, COUNTS = (1, 2, 4, 8), (8, 64, 512)


@dataclass(frozen=True)
class Cost:
    """The cost of one experiment."""

    compute: float  #: time of one accelerator that never waits [s]
    decode: float  #: time of one processor core for reading images [s]
    validate: float  #: share of `compute` that is spent on tests
    deploy: float  #: time of one processor core for runtimes [s]

    def seconds(self, n: int, told: dict[str, Any]) -> float:
        """Return the time on n accelerators with their own cores, where the slower of the two determines it [s]."""
        assumed = told["assumed"]
        efficiency = assumed["efficiency_of_twice_as_many"] ** (n.bit_length() - 1)
        cores = n * assumed["cores_per_accelerator"]
        fixed = told["measured"]["start_seconds"] + self.deploy / cores
        return max(self.compute / (n * efficiency), self.decode / cores) + fixed


def cost(model: str, told: dict[str, Any]) -> Cost:
    """Return the cost of an experiment with a model.

    A forward pass takes one multiplication and one addition for each of `macs`, a training step three times as much.

    >>> assumed = {"epochs": 1, "train_images": 100, "test_images": 10, "tests": 2, "peak_flops": 1e3, "platforms": 1}
    >>> measured = {"rounding_ratio": 1.5, "read_seconds": 0.1, "device_macs_per_second": 50.0}
    >>> models = {"m": {"macs": 50, "utilisation": 0.1}}
    >>> c = cost("m", {"assumed": assumed, "measured": measured, "models": models})
    >>> # 100 images x 3 x 1.5 + 20 x 1.5, each of 100 operations at 100 a second
    >>> (c.compute, c.decode, c.deploy)
    (480.0, 12.0, 10.0)
    """
    assumed, measured, macs = told["assumed"], told["measured"], told["models"][model]["macs"]
    train = assumed["epochs"] * assumed["train_images"]
    test = assumed["tests"] * assumed["test_images"]
    forward = 2 * macs * measured["rounding_ratio"] / (assumed["peak_flops"] * told["models"][model]["utilisation"])
    compute = forward * (3 * train + test)
    device = assumed["platforms"] * assumed["test_images"] * macs / measured["device_macs_per_second"]
    return Cost(compute, (train + test) * measured["read_seconds"], forward * test / compute, device)


def makespan(jobs: list[float], places: int) -> float:
    """Return when the last job ends if jobs start in order of length, longest first, each on the first free place [s].

    Source: Graham 1969, Bounds on multiprocessing timing anomalies; at most 4/3 of the best order.

    >>> makespan([3, 3, 2, 2, 2], 2)  # 3 and 2 and 2, beside 3 and 2
    7.0
    """
    free = [0.0] * places
    for job in sorted(jobs, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + job)
    return max(free)


def page(told: dict[str, Any]) -> str:
    """Return the text of docs/scale.md."""
    assumed, measured = told["assumed"], told["measured"]
    each = assumed["algorithms"] * assumed["backends"] * assumed["widths"]
    costs = {m: cost(m, told) for m in told["models"]}
    total = each * len(costs)
    lines = [
        "# What the full matrix costs",
        "",
        "An estimate, which `python benchmarks/scale.py` computes from `benchmarks/scale.yaml`: that file holds unit"
        " costs that `python benchmarks/scale.py --measure` has measured on a busy server, and assumptions about"
        " accelerators that were not measured. For other accelerators, change that file.",
        "",
        f"{len(costs)} models x {assumed['algorithms']} algorithms x {assumed['backends']} backends x"
        f" {assumed['widths']} widths = {total:,} experiments of {assumed['epochs']} passes over"
        f" {assumed['train_images']:,} images, {assumed['tests']} tests of {assumed['test_images']:,}.",
        "",
        "| assumed | |",
        "|---|---|",
        f"| accelerator, peak | {assumed['peak_flops'] / 1e12:.0f} TFLOP/s in bfloat16 |",
        f"| processor cores beside each accelerator | {assumed['cores_per_accelerator']} |",
        f"| relative speed when twice as many share an experiment | {assumed['efficiency_of_twice_as_many']:.0%} |",
        f"| most platforms whose runtime tests a result | {assumed['platforms']} |",
        "",
        "| measured, one core | |",
        "|---|---|",
        f"| reading an image: decode, crop, colours | {1e3 * measured['read_seconds']:.1f} ms |",
        f"| training step with quantization, relative to one without | {measured['rounding_ratio']:.2f}x |",
        f"| integers on ONNX Runtime | {measured['device_macs_per_second'] / 1e9:.1f} G multiplications/s |",
        f"| start of an experiment's process | {measured['start_seconds']:.1f} s |",
        f"| storing an outcome among {measured['store_runs']:,.0f} | {1e3 * measured['store_seconds']:.1f} ms |",
        "",
        "## One experiment",
        "",
        "The last column is the number of cores that keep one accelerator busy.",
        "",
        "| model | multiplications | share of the peak, assumed | accelerator | share of tests | one core, images |"
        " one core, runtimes | cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, c in costs.items():
        m = told["models"][name]
        lines.append(
            f"| {name} | {m['macs'] / 1e9:.2f} G | {m['utilisation']:.0%} | {_hours(c.compute)} | {c.validate:.1%} |"
            f" {_hours(c.decode)} | {_hours(c.deploy)} | {c.decode / c.compute:.0f} |"
        )
    busy = sum(each * c.compute for c in costs.values())
    starved = sum(each * max(c.compute, c.decode / assumed["cores_per_accelerator"]) for c in costs.values())
    lines += [
        "",
        f"All {total:,}: {busy / 3600:,.0f} accelerator hours if images are always ready, {starved / 3600:,.0f} if"
        f" {assumed['cores_per_accelerator']} cores of each accelerator read them.",
        "",
        "## All of them",
        "",
        "The longest experiments start first, each on the first free group of accelerators of one machine:",
        "",
        "| accelerators | "
        + " | ".join(f"{n} per experiment" for n in TOGETHER)
        + " | best if images are always ready |",
        "|---|" + "---|" * (len(TOGETHER) + 1),
    ]
    plenty, placed = {**told, "measured": {**measured, "read_seconds": 0.0}}, []
    for count in COUNTS:
        spans = [_span(told, count, n, each) for n in TOGETHER]
        free = min(_span(plenty, count, n, each) for n in TOGETHER)
        shown = [f"**{_hours(s)}**" if s == min(spans) else _hours(s) for s in spans]
        lines.append(f"| {count} | " + " | ".join(shown) + f" | {_hours(free)} |")
        placed.append(
            f"{TOGETHER[spans.index(min(spans))]} on {count} ({1 - min(spans) / spans[0]:.0%} sooner than one)"
        )
    filed = total * measured["store_seconds"]
    lines += ["", "## Bottlenecks", "", *_held_up(costs, told, starved / busy, filed, ", ".join(placed))]
    return wrapped("\n".join(lines))


def _span(told: dict[str, Any], count: int, together: int, each: int) -> float:
    jobs = [cost(m, told).seconds(together, told) for m in told["models"] for _ in range(each)]
    return makespan(jobs, count // together)


def _held_up(costs: dict[str, Cost], told: dict[str, Any], starved: float, filed: float, placed: str) -> list[str]:
    """Return the conclusions from the figures, in words."""
    cores = told["assumed"]["cores_per_accelerator"]
    short = [m for m, c in costs.items() if c.decode / c.compute > cores]
    most = max(c.decode / c.compute for c in costs.values())
    tests = max(c.validate for c in costs.values())
    runtimes = max(c.deploy / cores / max(c.compute, c.decode / cores) for c in costs.values())
    return [
        f"- **Reading images.** {', '.join(short) or 'No model'} would wait for images with {cores} cores per"
        f" accelerator (`data.num_workers`); the fastest model needs {most:.0f}. That takes {starved:.1f} times the"
        " hours. Storing images at 256 pixels, or decoding them on the accelerator, saves more than further"
        " accelerators.",
        f"- **Tests** are {tests:.1%} of an accelerator's time, **runtimes** add at most {runtimes:.1%} on the cores"
        " beside it.",
        f"- **The store** stores all outcomes in {filed:.0f} s and limits nothing. Checkpoints go to a disk that all"
        f" machines share: {2 * 25_557_032 * 4 / 1e6:.0f} MB of a ResNet-50 with momentum at every test.",
        f"- **Placement.** The best numbers of accelerators per experiment: {placed}. With many more experiments than"
        " accelerators it makes no difference, and one per experiment needs no communication; when the last round is"
        " half empty, sharing fills it. `chipfit bench sweep --ray ADDRESS --gpus N` places experiments,"
        " `torchrun` shares one.",
    ]


def _hours(seconds: float) -> str:
    """Return a duration as text."""
    return f"{seconds / 86400:.1f} d" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} h"


# ----------------------------------------------------------------------------------------------- measured


def best(act: Callable[[], Any], times: int = 3) -> float:
    """Return the least processor seconds of several calls."""
    taken = []
    for _ in range(times):
        begun = time.process_time()
        act()
        taken.append(time.process_time() - begun)
    return min(taken)


def measure() -> dict[str, float]:
    """Measure unit costs of this machine, on one core, in processor seconds."""
    import numpy as np
    import torch
    from PIL import Image

    import chipfit
    from chipfit.bench.data.folders import Folder
    from chipfit.bench.networks import model_entry
    from chipfit.bench.store import Store
    from chipfit.quantize_fx import get_backend_params, get_qconfig, prepare_qat_fx

    torch.set_num_threads(1)
    torch.manual_seed(0)
    out: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        photo = Path(name, "a.jpeg")  # of the mean size of ImageNet's, as smooth as photographs are
        rough = Image.fromarray(np.random.default_rng(0).integers(0, 255, (38, 50, 3), np.uint8))
        rough.resize((500, 375), Image.Resampling.BICUBIC).save(photo, quality=95)
        images, draw = Folder([(photo, 0)], "STANDARD", 224, 256), torch.Generator().manual_seed(0)
        out["read_seconds"] = best(lambda: [images.read(0, draw) for _ in range(20)]) / 20
        store, told = Store(Path(name, "runs.sqlite")), {"curves": {"loss": [[k, 0.5] for k in range(2500)]}}
        count = 1260
        out["store_runs"] = count
        out["store_seconds"] = best(lambda: [store.put(f"{k}", "n", "s", told) for k in range(count)], 1) / count

    def step(model: torch.nn.Module) -> Callable[[], Any]:
        x, optimizer = torch.randn(16, 3, 32, 32), torch.optim.SGD(model.train().parameters(), 1e-3)

        def one() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return one

    network = model_entry({"type": "resnet20"})
    plain = best(step(network), 5)
    setting = get_qconfig("lsq", "lsq", 4, **get_backend_params("tensorrt"))
    out["rounding_ratio"] = best(step(prepare_qat_fx(network.eval(), {"": setting})), 5) / plain
    network, x = model_entry({"type": "resnet18"}).eval(), torch.randn(4, 3, 224, 224)
    device = chipfit.quantize(network, [x], progress=False).device_model
    device(x)
    out["device_macs_per_second"] = 4 * 1.814e9 / best(lambda: device(x))
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import chipfit.bench.run, onnxruntime"], check=True)
    out["start_seconds"] = time.perf_counter() - begun
    return {k: float(f"{v:.3g}") for k, v in out.items()}


def main() -> None:
    """Write docs/scale.md, after measuring with `--measure`."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--measure", action="store_true")
    told = yaml.safe_load(UNITS.read_text())
    if options.parse_args().measure:
        measured = measure()
        head, mark, rest = UNITS.read_text().partition("measured:")
        UNITS.write_text(f"{head}{mark} {json.dumps(measured)}\n{rest.partition(chr(10))[2]}")
        told = yaml.safe_load(UNITS.read_text())
    PAGE.write_text(page(told))


if __name__ == "__main__":
    main()
