"""Accuracy of few bits without training: closed-form rounding beside the plain plan, on networks of procedural images.

    python benchmarks/accuracy.py [--networks resnet20 mobilenetv2] [--rows W4A8 W3A8 ...] [--ablation W3A8] [--sets 3]

Each row calibrates on 512 unlabelled images, drawn anew for each set, and shows means over the sets: top-1 on 20,000
images that calibration has not seen; processor seconds of `quantize` on one thread without the capture; and the KL
divergence of class probabilities from the float network's, in thousandths of a nat, which tells variants apart that
accuracy does not. First and last layers have the width of the rest. The plain plan rounds weights to the nearest
quantized value, without repairs (`Settings(rounding="off", repairs="off")`). Limits stand beside the figures. The best
of other tools on such networks lose, in points below float: W4A8 0.7 and 2.0, W3A8 5.3, W4A4 2.8 and 12.3.

The float networks are trained first, some minutes each, and kept below `.bench`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from benchmarks.small import SMALL, logits, trained
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit import Settings
from chipfit.bench.data.procedural import images

#: images that run at a time when accuracy is measured
BATCH = 50
HERE = Path(__file__).parent / "platforms"


@dataclass(frozen=True)
class Row:
    """A bit width and the accuracy that it may lose."""

    weights: int
    activations: int
    platform: str | Path = HERE / "inputs.yaml"
    points: tuple[float, float] | None = None  #: allowed loss in points below float: residual and depthwise network
    seconds: float = 10.0
    limits: chipfit.Limits | None = None  #: widths of weights are searched


ROWS = {
    "W4A8": Row(4, 8, points=(0.3, 0.8), seconds=4),
    "W3A8": Row(3, 8, points=(0.6, 2.0), seconds=4),
    "W4A4": Row(4, 4, points=(1.2, 4.0), seconds=5),
    "W4A4 everywhere": Row(4, 4, HERE / "everywhere.yaml", (2.3, 5.2), 5),
    "half memory": Row(4, 8, points=(0.1, 0.4), seconds=4, limits=chipfit.Limits(weights="50%")),
    "W2A8": Row(2, 8),
    "W4A8 tflite_int8": Row(4, 8, "tflite_int8"),
    "W4A8 imx500": Row(4, 8, "imx500"),
}
#: neither compared on held-out images nor with grids other than the plan's
ALONE: dict[str, Any] = {"rounding_guard": False, "effect_ranges": False}
#: without the rewrites of the network that few bits need
AS_IT_IS: dict[str, Any] = {"rounding": "gptq", "centre": "off", "equalize_groups": "off"}
#: rounding to the nearest quantized value alone
PLAIN: dict[str, Any] = {"rounding": "off", "repairs": "off"}
#: settings that an ablation removes or adds, one at a time
STEPS: dict[str, Settings] = {
    "plain": Settings(**PLAIN),
    "ranges by hmse": Settings(**PLAIN),
    "bias correction": Settings(correct_bias=True, repairs="off"),
    "bias correction, ranges by hmse": Settings(correct_bias=True, repairs="off"),
    "nearest, bias and scale by moments": Settings(
        rounding="nearest", correct_weights=None, score_ranges=False, **ALONE
    ),
    "gptq": Settings(rounding="gptq", correct_weights=None, repair_residual=False, score_ranges=False, **ALONE),
    "+ corrected weights": Settings(rounding="gptq", repair_residual=False, score_ranges=False, **ALONE),
    "+ residual target": Settings(rounding="gptq", score_ranges=False, **ALONE),
    "+ grid of the scores": Settings(rounding="gptq", **ALONE),
    "+ grids by effect": Settings(rounding="gptq", rounding_guard=False),
    "+ guard": Settings(**AS_IT_IS),
    "+ centre": Settings(**AS_IT_IS | {"centre": "always"}),
    "+ equalize groups": Settings(**AS_IT_IS | {"equalize_groups": "always"}),
    "+ both, where held-out images gain": Settings(rounding="gptq"),
}
#: range rules of weights, beside mse
RULES = {step: "hmse" for step in STEPS if step.endswith("ranges by hmse")}


def overrides(row: Row) -> dict[str, Any]:
    """Return the overrides for a row's widths: of all tensors on a platform with free widths, of weights on a chip."""
    width: dict[str, Any] = {} if row.limits else {"bits": row.weights}
    if isinstance(row.platform, Path):
        width["activation_bits"] = row.activations
    return {"*": width}


@dataclass
class Score:
    """The result of one way of quantizing over all calibration sets."""

    top1: float
    worst: float
    kl: float
    seconds: float


def measured(
    model: nn.Module, row: Row, settings: Settings, sets: int, test: Tensor, labels: Tensor, weight_rule: str = "mse"
) -> Score:
    """Quantize for each calibration set and compare on the test images."""
    want = logits(model, test, BATCH)
    tops, divergences, seconds = [], [], []
    for seed in range(sets):
        data = list(images(512, 5000 + seed)[0].split(32))
        begun = time.process_time()
        chipfit.capture(model, (data[0],))
        capture, begun = time.process_time() - begun, time.process_time()
        r = chipfit.quantize(
            model,
            data,
            row.platform,
            weight_rule=weight_rule,
            overrides=overrides(row),
            settings=settings,
            limits=row.limits if settings != STEPS["plain"] else None,
            progress=False,
            seed=seed,
        )
        seconds.append(max(time.process_time() - begun - capture, 0.0))
        got = logits(r.model.eval(), test, BATCH)
        tops.append(100 * float((got.argmax(1) == labels).float().mean()))
        p, q = want.log_softmax(1), got.log_softmax(1)
        divergences.append(1000 * float((p.exp() * (p - q)).sum(1).mean()))
    n = len(tops)
    return Score(sum(tops) / n, min(tops), sum(divergences) / n, sum(seconds) / n)


def rows(names: list[str], networks: list[str], best: Settings, sets: int, test: int, seed: int) -> Iterator[list[str]]:
    """Return table rows: the plain and the best plan at each width, each figure beside its limit."""
    x, y = images(test, 1)
    for network in networks:
        model = trained(network, seed)
        real = 100 * float((logits(model, x, BATCH).argmax(1) == y).float().mean())
        for name in names:
            row = ROWS[name]
            plain, good = (measured(model, row, s, sets, x, y) for s in (STEPS["plain"], best))
            limit = row.points[list(SMALL).index(network)] if row.points else None
            yield [
                network,
                name,
                f"{real:.2f}",
                f"{real - plain.top1:.2f}",
                f"{real - good.top1:.2f}",
                f"{real - good.worst:.2f}",
                "" if limit is None else f"{limit:g}",
                f"{plain.kl:.1f}",
                f"{good.kl:.1f}",
                f"{plain.seconds:.1f}",
                f"{good.seconds:.1f} of {row.seconds:g}",
                "over" if (limit is not None and real - good.top1 > limit) or good.seconds > row.seconds else "",
            ]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", nargs="+", choices=list(SMALL), default=list(SMALL))
    p.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    p.add_argument("--ablation", choices=list(ROWS), help="ablation at this width, instead of the rows")
    p.add_argument("--sets", type=int, default=3, help="of calibration images")
    p.add_argument("--test", type=int, default=20000, help="images")
    p.add_argument("--seed", type=int, default=0, help="of the float networks")
    a = p.parse_args()
    torch.set_num_threads(1)
    console = Console(width=150)
    if a.ablation:
        table = Table("network", "step", "below float", "KL x 1000", "s", title=a.ablation)
        x, y = images(a.test, 1)
        for network in a.networks:
            model = trained(network, a.seed)
            real = 100 * float((logits(model, x, BATCH).argmax(1) == y).float().mean())
            for step, settings in STEPS.items():
                s = measured(model, ROWS[a.ablation], settings, a.sets, x, y, RULES.get(step, "mse"))
                table.add_row(network, step, f"{real - s.top1:.2f}", f"{s.kl:.1f}", f"{s.seconds:.1f}")
        console.print(table)
        return 0
    table = Table(
        "network", "width", "float", "plain", "below float", "worst", "limit", "KL plain", "KL", "s plain", "s", ""
    )
    over = 0
    for row in rows(a.rows, a.networks, chipfit.BEST, a.sets, a.test, a.seed):
        print(" | ".join(row), flush=True)
        table.add_row(*row)
        over += bool(row[-1])
    console.print(table)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
