"""Compare the operators that lint places on an Ethos-U with those that Arm's compiler Vela places there.

    python benchmarks/ethos_u.py [--count 100] [--seed 0] [--accelerator ethos-u55-128]

The networks are those of PyTorch and Keras that the tests use, and random ones (`benchmarks/random_networks.py`), until
`count` have been compared. Networks that the platform refuses, since an operator has no integer form, are listed and do
not count. The command fails if lint and Vela disagree about an operator.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from benchmarks.random_networks import Network

import chipfit
from chipfit.errors import ChipfitError
from tests import keras_zoo, zoo

PLATFORM, BESIDE = "ethos_u", "processor beside"
NPU, CPU = "NPU", "processor"


def networks(seed: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield names, models and a batch of data for each, without end."""
    for name in sorted(zoo.ZOO):
        yield (f"torch {name}", *zoo.make(name))
    for name in sorted(keras_zoo.ZOO):
        yield (f"Keras {name}", *keras_zoo.make(name))
    for k in itertools.count(seed * 1_000_000):
        model = Network(k).eval()
        torch.manual_seed(k + 1)
        yield f"random {k}", model, torch.randn(4, *model.shape)


def compare(model: Any, batch: Any, accelerator: str) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Return how many operators lint and Vela place alike, by operator and place, and those that they do not."""
    rows = chipfit.lint(model, batch, platform=PLATFORM).rows
    result = chipfit.quantize(model, [batch], platform=PLATFORM, progress=False)
    owner = {o: n.name for n in result.graph.nodes for o in n.outputs}
    left = {}  # operator, or the last one of a fused kernel -> what Vela says
    for c in result.npu(accelerator).on_cpu:
        left[owner.get(c.tensor, owner.get(c.tensor.rpartition("/")[0], c.tensor))] = c
    alike: Counter[tuple[str, str]] = Counter()
    unlike = [f"{left[name].op} '{name}' is no operator of lint" for name in left.keys() - {r.name for r in rows}]
    for row in rows:
        found = left.get(row.group or row.name)
        by_lint, by_vela = (CPU if there else NPU for there in (BESIDE in row.why, found is not None))
        if by_lint == by_vela:
            alike[row.op, by_vela] += 1
        else:
            why = f": {found.op}, {found.why}" if found else ""
            unlike.append(f"{row.op} '{row.name}' is on the {by_vela}, not the {by_lint}{why}")
    return alike, unlike


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="networks to compare")
    parser.add_argument("--seed", type=int, default=0, help="random networks begin with number seed * 1,000,000")
    parser.add_argument("--accelerator", default="ethos-u55-128")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    alike: Counter[tuple[str, str]] = Counter()
    agreed, compared = 0, 0
    for name, model, batch in networks(args.seed):
        if compared == args.count:
            break
        try:
            both, unlike = compare(model, batch, args.accelerator)
        except ChipfitError as e:
            print(f"{name}: refused: {str(e)[:160]}", flush=True)
            continue
        alike, compared, agreed = alike + both, compared + 1, agreed + (not unlike)
        print(*(f"{name}: {line}" for line in unlike), sep="\n", end="\n" * bool(unlike), flush=True)
    print(f"{'operator':<20} {NPU:>6} {CPU:>10}")
    for op in sorted({op for op, _ in alike}):
        print(f"{op:<20} {alike[op, NPU]:>6} {alike[op, CPU]:>10}")
    print(f"lint and Vela agree on {agreed} of {compared} networks, {alike.total()} operators, on {args.accelerator}")
    return int(agreed < compared)


if __name__ == "__main__":
    sys.exit(main())
