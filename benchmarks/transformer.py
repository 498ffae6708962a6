"""Measure the accuracy of a small transformer in few bits without training, on a synthetic task.

    python benchmarks/transformer.py [--rows W8A8 ...] [--outliers 1 20] [--smooth auto off] [--test 20000] [--sets 3]

The task: find the most frequent of 8 symbols in a sequence of 24 (of equally frequent ones, the first), with symbols
drawn so that the winner is often ahead by one. The network: two blocks of attention and MLP with layer norms in front,
48 wide, trained first in under a minute of processor time. `--outliers 20` multiplies three channels of every norm by
20, as in large models, and divides the weights that read them, which changes nothing in float. `--smooth` is the
setting of that name, "auto" its default. Calibration reads 512 sequences, drawn anew for each set; the test reads
others.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import sys
import time
from pathlib import Path

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from benchmarks.models import AttentionBlock
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit

SYMBOLS, LENGTH, WIDTH, HEADS = 8, 24, 48, 4
HERE = Path(__file__).parent / "platforms"
#: name -> platform, overrides, limit in points below float
ROWS = {
    "W8A8": (HERE / "inputs.yaml", {"*": {"bits": 8, "activation_bits": 8}}, 0.2),
    "W4A8": (HERE / "inputs.yaml", {"*": {"bits": 4, "activation_bits": 8}}, 1.0),
    "W8A8 tflite_int8": ("tflite_int8", None, 0.2),
    "W4A8 tflite_int8": ("tflite_int8", {"Linear": {"bits": 4}}, 1.0),
}


class Transformer(nn.Module):
    """A transformer of symbols int64 [N, 24] to scores [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks, self.norm, self.head = (
            nn.Sequential(AttentionBlock(WIDTH, HEADS, 2), AttentionBlock(WIDTH, HEADS, 2)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, SYMBOLS),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place)).mean(1))


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw symbols [N, 24] and return them with the most frequent of each row (of equally frequent ones, the first)."""
    g = torch.Generator().manual_seed(seed)
    few = torch.rand(count, SYMBOLS, generator=g).argsort(1)[:, :4]  # four symbols share a sequence
    x = few.gather(1, torch.randint(4, (count, LENGTH), generator=g))
    many = F.one_hot(x, SYMBOLS).sum(1)
    first = torch.stack([(x == s).int().argmax(1) for s in range(SYMBOLS)], 1)
    return x, (many * LENGTH - first * (many > 0)).argmax(1)


def trained(steps: int) -> nn.Module:
    """Return the trained network."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        x, y = sequences(128, 10_000 + step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def with_outliers(model: nn.Module, factor: float) -> nn.Module:
    """Return a network that computes the same with three large channels behind every norm in front of linear layers."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for norm, readers in ((block.first, (block.q, block.k, block.v)), (block.second, (block.up,))):
            norm.weight[:3] *= factor
            norm.bias[:3] *= factor
            for reader in readers:
                reader.weight[:, :3] /= factor
    return model


@torch.inference_mode()
def scores(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(500)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--outliers", nargs="+", type=float, default=[1.0, 20.0], help="size of three channels")
    parser.add_argument("--smooth", nargs="+", default=["auto", "off"], help="a word or a number")
    parser.add_argument("--sets", type=int, default=3, help="of calibration sequences")
    parser.add_argument("--test", type=int, default=20000, help="sequences")
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    a = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    model = trained(a.steps)
    x, y = sequences(a.test, 1)
    want = scores(model, x)
    real = 100 * float((want.argmax(1) == y).float().mean())
    print(f"float: {real:.2f} %, trained in {time.process_time() - begun:.0f} s", flush=True)
    table = Table("outliers", "smooth", "width", "below float", "limit", "KL x 1000", "s", title=f"float {real:.2f} %")
    over = 0
    for outliers, smooth, name in itertools.product(a.outliers, a.smooth, a.rows):
        asked = {} if smooth == "auto" else {"smooth": smooth if smooth == "off" else float(smooth)}
        network, settings = with_outliers(model, outliers), chipfit.Settings(**asked)
        platform, overrides, limit = ROWS[name]
        tops, divergences, begun = [], [], time.process_time()
        for seed in range(a.sets):
            data = list(sequences(512, 5000 + seed)[0].split(64))
            given = {"overrides": overrides, "settings": settings, "progress": False}
            got = scores(chipfit.quantize(network, data, platform, **given).model.eval(), x)
            tops.append(100 * float((got.argmax(1) == y).float().mean()))
            p, q = want.log_softmax(1), got.log_softmax(1)
            divergences.append(1000 * float((p.exp() * (p - q)).sum(1).mean()))
        seconds, below = (time.process_time() - begun) / a.sets, real - sum(tops) / len(tops)
        row = [f"{outliers:g} x", smooth, name, f"{below:.2f}", f"{limit:g}"]
        row += [f"{sum(divergences) / len(tops):.2f}", f"{seconds:.1f}"]
        print(" | ".join(row), flush=True)
        table.add_row(*row)
        over += below > limit
    Console(width=100).print(table)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
