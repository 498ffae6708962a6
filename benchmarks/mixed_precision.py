"""Compare mixed precision with one width for all tensors and with the best choice, and time its integer program.

    python benchmarks/mixed_precision.py uniform [--networks tiny resnet20 mobilenetv2] [--limits ...] [--test 20000]
    python benchmarks/mixed_precision.py best [--seeds 4]
    python benchmarks/mixed_precision.py seconds

`uniform`: every tensor in 4 bits, against widths of 2 to 8 bits that need no more of one resource: memory of weights,
peak memory of activations, both, or bit operations. Kernels that read and write quantized values have one width for
both, so where activations alone are limited the platform's kernels read quantized values and write floats. Figures are
the KL divergence of class probabilities from the float network's in thousandths of a nat and top-1, on images that
calibration has not seen. "tiny" is trained first, in half a minute; the other two take minutes (`small.py`).

`best`: networks of three operators, for which all 729 choices of 2, 4 and 8 bits are tried. Figures are the predicted
loss of the integer program's choice over the least, and the measured loss of the final choice (the best of eight that
were tried) over the least, on the images of the search and on others.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from dataclasses import replace

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import random

import torch
import torch.nn.functional as F
from benchmarks.accuracy import HERE
from benchmarks.small import SMALL, logits, trained
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.bench.data.procedural import images
from chipfit.rounding.compare import Reference
from chipfit.search import candidates, choose
from chipfit.search.losses import losses
from chipfit.search.resources import resources
from chipfit.search.solve import Choice, solutions

OFF = chipfit.Settings(rounding="off")
#: limited resources, one at a time
LIMITS = ("weights", "activations", "total", "bops")
#: multiplications that trying choices may cost
WORK = choose.WORK


class Tiny(nn.Module):
    """A network of six layers for images [N, 3, 32, 32]; 17 thousand parameters, 1.3 M multiplications."""

    def __init__(self, classes: int = 20) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AvgPool2d(2),
            *_layer(3, 16, 3),
            *_layer(16, 16, 3, stride=2, groups=16),
            *_layer(16, 48, 1),
            *_layer(48, 48, 3, stride=2, groups=48),
            *_layer(48, 96, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(96, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _layer(i: int, o: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU()]


def tiny(steps: int = 600) -> nn.Module:
    """Return a trained `Tiny`."""
    torch.manual_seed(0)
    model = Tiny()
    x, y = images(6000, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
    for _ in range(steps):
        k = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[k]), y[k]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def uniform(networks: list[str], limits: list[str], test: int) -> Table:
    """Return rows of limits, each with one width for all tensors and with searched widths."""
    table = Table("network", "limit", "top-1", "4 bits", "mixed", "KL x 1000", "mixed", "taken", "s")
    x, y = images(test, 1)
    data = list(images(512, 5000)[0].split(32))
    for network in networks:
        model = tiny() if network == "tiny" else trained(network)
        want = logits(model, x)

        def score(result: chipfit.Result, want: Tensor = want) -> tuple[float, float]:
            got = logits(result.model.eval(), x)
            p, q = want.log_softmax(1), got.log_softmax(1)
            return 100 * float((got.argmax(1) == y).float().mean()), 1000 * float((p.exp() * (p - q)).sum(1).mean())

        real = 100 * float((want.argmax(1) == y).float().mean())
        for limit in limits:
            wide = {"weights": (4, 8), "activations": (8, 4)}.get(limit, (4, 4))
            overrides = {"*": dict(zip(("bits", "activation_bits"), wide, strict=True))}
            where = HERE / ("inputs.yaml" if limit == "activations" else "everywhere.yaml")
            plain = chipfit.quantize(model, data, where, overrides=overrides, settings=chipfit.BEST, progress=False)
            most = getattr(resources(plain.graph, plain.plan), limit)
            free = {"weights": {"activation_bits": 8}, "activations": {"bits": 8}}.get(limit)
            begun = time.process_time()
            mixed = chipfit.quantize(
                model,
                data,
                where,
                overrides={"*": free} if free else None,
                limits=chipfit.Limits(**{limit: most}),
                settings=chipfit.BEST,
                progress=False,
            )
            seconds = time.process_time() - begun
            taken = getattr(resources(mixed.graph, mixed.plan), limit) / most
            row = [score(plain), score(mixed)]
            tops, divergences = ([f"{v:.{d}f}" for v in part] for part, d in zip(zip(*row, strict=True), (2, 1)))
            figures = [network, limit, f"{real:.2f}", *tops, *divergences, f"{100 * taken:.1f} %", f"{seconds:.1f}"]
            print(" | ".join(figures), flush=True)
            table.add_row(*figures)
    return table


class Few(nn.Module):
    """A network of three operators, few enough to try all widths."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return 4 * self.c(torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3)))


def best(seeds: int, widths: tuple[int, ...] = (2, 4, 8)) -> Table:
    """Return rows of problems: the loss of the chosen widths over that of the best ones."""
    table = Table("seed", "limits", "choices", "predicted", "measured", "on others", "rank")
    candidates.FREE = widths
    data, others = (
        list(torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(k)).split(128))
        for k, n in ((1, 128), (2, 512))
    )
    given = {"platform": "mqbench_academic", "settings": OFF, "progress": False}
    for seed in range(seeds):
        model = Few(seed).eval()

        def at(bits: int, model: nn.Module = model) -> chipfit.Result:
            return chipfit.quantize(model, data, overrides={"*": {"bits": bits, "activation_bits": bits}}, **given)

        alike = {b: at(b) for b in widths}
        graph, plan = alike[8].graph, alike[8].plan
        names = [n for n, t in plan.tensors.items() if t.stored is not None and t.role != "bias"]
        found = losses(alike[8].decision, plan, [[x] for x in data], dict.fromkeys(names, widths))
        seen, new = (Reference(graph, [[x] for x in some]) for some in (data, others))
        rows = []
        for picks in itertools.product(widths, repeat=len(names)):
            bits = dict(zip(names, picks, strict=True))
            tensors = {n: alike[b].plan.tensors[n] for n, b in bits.items()}
            other = replace(plan, tensors={**plan.tensors, **tensors})
            predicted = sum(found[n][b] for n, b in bits.items())
            rows.append((bits, resources(graph, other), predicted, seen.loss(graph, other), new.loss(graph, other)))
        for limits in ({"bops": "12%"}, {"bops": "25%"}, {"total": "80%", "weights": "40%"}):
            most = {k: float(v[:-1]) / 100 * getattr(resources(graph, plan), k) for k, v in limits.items()}
            kept = [r for r in rows if all(getattr(r[1], k) <= v for k, v in most.items())]
            found_at = []
            for work in (0.0, WORK):
                choose.WORK = work
                mixed = chipfit.quantize(model, data, limits=chipfit.Limits(**limits), **given)
                found_at += [r for r in kept if r[0] == mixed.plan.provenance["chosen"]]
            by_sum, own = found_at
            above = [100 * (r[k] / min(r[k] for r in kept) - 1) for r, k in ((by_sum, 2), (own, 3), (own, 4))]
            rank = sum(r[3] < own[3] for r in kept)
            figures = [f"+{v:.1f} %" for v in above]
            said = ", ".join(f"{k} {v}" for k, v in limits.items())
            print(" | ".join([str(seed), said, str(len(kept)), *figures, str(rank)]), flush=True)
            table.add_row(str(seed), said, str(len(kept)), *figures, str(rank))
    return table


def seconds() -> Table:
    """Time the integer program of a hundred layers with five widths."""
    table = Table("limits", "s")
    draw = random.Random(0)
    sizes = [draw.randint(100, 100_000) for _ in range(100)]
    units = [
        Choice(
            f"w{k}",
            tuple(draw.random() * 4.0**-b for b in (2, 3, 4, 6, 8)),
            {"weights": (2 * n, 3 * n, 4 * n, 6 * n, 8 * n)},
        )
        for k, n in enumerate(sizes)
    ]
    whole = 8 * sum(sizes)
    for name, budgets, least in (
        ("weights", {"weights": 0.5 * whole}, "loss"),
        ("loss", {"loss": 0.2}, "weights"),
    ):
        begun = time.process_time()
        next(solutions(units, budgets, least))
        table.add_row(name, f"{time.process_time() - begun:.2f}")
    return table


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("uniform", "best", "seconds"))
    p.add_argument("--networks", nargs="+", choices=["tiny", *SMALL], default=["tiny", *SMALL])
    p.add_argument("--limits", nargs="+", choices=LIMITS, default=list(LIMITS), help="of `uniform`")
    p.add_argument("--test", type=int, default=20000, help="images")
    p.add_argument("--seeds", type=int, default=4, help="of networks")
    a = p.parse_args()
    torch.set_num_threads(1)
    table = {
        "uniform": lambda: uniform(a.networks, a.limits, a.test),
        "best": lambda: best(a.seeds),
        "seconds": seconds,
    }[a.what]()
    Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
