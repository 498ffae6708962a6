"""Measure by how many codes each operator differs on Qualcomm's HTP, emulated, and compare with what is promised.

    python benchmarks/qnn.py [--seeds 6] [--networks 100] [--first 0] [--only NAME ...]

Single operators of random sizes and ranges, and random networks (`benchmarks/random_networks.py`), are quantized for
`ort_qnn_ep`, run by onnxruntime-qnn and compared with the simulation, each operator given the device's own operands. A
kernel counts for its first operator: a convolution with ReLU as a convolution. The command fails if one differs by
more than `chipfit.runtimes.qnn.WITHIN` promises, or a file is refused.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from benchmarks.random_networks import Block, Network, batch_norm
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.errors import ChipfitError
from chipfit.operators.table import OPS
from chipfit.runtimes.qnn import WITHIN
from chipfit.simulate.integer import kernel_groups

PLATFORM, RUNTIME = "ort_qnn_ep", "qnn"
Shape = tuple[int, int, int, int]
Draw = random.Random


def conv(d: Draw, s: Shape, act: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    """Return a convolution of random size."""
    k, groups = d.choice((1, 2, 3, 5)), d.choice((1, 1, s[1]))
    o = s[1] if groups > 1 else d.choice((2, 5, 16))
    stride = 1 if groups > 1 and k < 3 else d.choice((1, 2))  # others are left in float
    layer = nn.Conv2d(s[1], o, k, stride, d.randrange((k + 1) // 2), groups=groups, bias=d.random() < 0.7)
    return Block(lambda x, a: act(a(x)), layer)


def linear(d: Draw, s: Shape) -> nn.Module:
    return Block(lambda x, a: a(x.flatten(1)), nn.Linear(s[1] * s[2] * s[3], 9, bias=d.random() < 0.7))


def of(f: Callable[[Tensor], Tensor]) -> Callable[[Draw, Shape], nn.Module]:
    """Return the maker of a module that computes a function."""
    return lambda d, s: Block(f)


def norm(make: Callable[[Shape], nn.Module]) -> Callable[[Draw, Shape], nn.Module]:
    """Return the maker of a normalization that no convolution stands in front of."""
    return lambda d, s: Block(lambda x, a: a(F.leaky_relu(x, 0.4)), make(s))


def pooled(f: Callable[..., Tensor]) -> Callable[[Draw, Shape], nn.Module]:
    def make(d: Draw, s: Shape) -> nn.Module:
        sizes = d.choice(((2, 2), (3, 2), (3, 1), (3, 2, 1)))
        return Block(lambda x: f(x, *sizes))

    return make


#: name -> maker of a module, given random numbers and the shape of its input
OPERATORS: dict[str, Callable[[Draw, Shape], nn.Module]] = {
    "convolution": conv,
    "convolution, ReLU": lambda d, s: conv(d, s, F.relu),
    "convolution, ReLU6": lambda d, s: conv(d, s, F.relu6),
    "transposed convolution": lambda d, s: Block(lambda x, a: a(x), nn.ConvTranspose2d(s[1], 6, d.choice((2, 3)), 2)),
    "linear": linear,
    "linear of rows": lambda d, s: Block(lambda x, a: a(x), nn.Linear(s[3], 9)),
    "product": of(lambda x: x @ x.transpose(2, 3)),
    "attention": of(lambda x: F.scaled_dot_product_attention(x, F.leaky_relu(x, 0.4), F.relu(x))),
    "sum": of(lambda x: x + F.leaky_relu(x, 0.5)),
    "sum with a number": of(lambda x: x + 1.7),
    "difference": of(lambda x: x - F.leaky_relu(x, 0.5)),
    "product of elements": of(lambda x: x * F.leaky_relu(x, 0.5)),
    "quotient": of(lambda x: x / (F.relu(x) + 0.5)),
    "maximum": of(lambda x: torch.maximum(x, -x)),
    "choice": of(lambda x: torch.where(x > 0, x, -0.5 * x)),
    "ReLU": of(F.relu),
    "ReLU6": of(F.relu6),
    "clamp": of(lambda x: x.clamp(-0.8, 1.3)),
    "leaky ReLU": of(lambda x: F.leaky_relu(x, 0.2)),
    "PReLU": lambda d, s: Block(lambda x, a: a(x), nn.PReLU(s[1])),
    "ELU": of(F.elu),
    "hard swish": of(F.hardswish),
    "hard sigmoid": of(F.hardsigmoid),
    "sigmoid": of(torch.sigmoid),
    "tanh": of(torch.tanh),
    "GELU": of(F.gelu),
    "SiLU": of(F.silu),
    "mish": of(F.mish),
    "softplus": of(F.softplus),
    "exp": of(torch.exp),
    "absolute value": of(torch.abs),
    "root": of(lambda x: x.abs().sqrt()),
    "softmax": of(lambda x: x.softmax(-1)),
    "softmax of channels": of(lambda x: x.softmax(1)),
    "log softmax": of(lambda x: x.log_softmax(-1)),
    "max pooling": pooled(lambda x, *sizes: F.max_pool2d(F.leaky_relu(x, 0.3), *sizes)),
    "average pooling": pooled(F.avg_pool2d),
    "global average": of(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "mean": of(lambda x: x.mean(1)),
    "sum of channels": of(lambda x: x.sum(1)),
    "largest channel": of(lambda x: x.amax(1)),
    "concatenation": of(lambda x: torch.cat((x, F.leaky_relu(x, 0.3)), 1)),
    "padding": of(lambda x: F.pad(F.relu(x), (1, 2, 0, 1), value=-0.7)),
    "reflection": of(lambda x: F.pad(x, (1, 2, 0, 1), "reflect")),
    "nearest": of(lambda x: F.interpolate(x, scale_factor=2)),
    "bilinear": of(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "bilinear, corners": of(lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True)),
    "batch norm": norm(lambda s: batch_norm(nn.BatchNorm2d, s[1])),
    "layer norm": norm(lambda s: nn.LayerNorm(s[3])),
    "group norm": norm(lambda s: nn.GroupNorm(1, s[1])),
    "instance norm": norm(lambda s: nn.InstanceNorm2d(s[1])),
    "moves": of(lambda x: F.leaky_relu(x, 0.3).transpose(1, 3)[:, :, 1:].flatten(2)),
}


@dataclass
class Agreement:
    """Integers of the kernels of one operator."""

    integers: int = 0
    differing: int = 0
    largest: int = 0


def compare(model: nn.Module, data: list[Tensor], found: dict[str, Agreement]) -> list[str]:
    """Quantize and run a network, add its integers to `found`, and return what departs, or the refusal."""
    try:
        result = chipfit.quantize(model, data[:2], platform=PLATFORM, progress=False)
        check = result.verify(data[2:], runtime=RUNTIME)
    except ChipfitError as e:
        return [f"{type(e).__name__}: {e}"]
    heads = {group[-1].output: group[0].op for group in kernel_groups(result.graph, result.plan)}
    for row in check.compared:
        seen = found.setdefault(heads.get(row.tensor, row.op), Agreement())
        seen.integers += row.elements
        seen.differing += row.op_differing
        seen.largest = max(seen.largest, row.op_largest)
    return check.departures


def promised(op: str) -> int:
    """Return the largest difference that is promised for an operator [codes]."""
    return 0 if op not in OPS or OPS[op].moves else WITHIN.get(op, WITHIN["*"])


def cases(seeds: int, first: int, networks: int, only: list[str]) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
    """Yield a name, a network and three batches."""
    for name, make in OPERATORS.items():
        for seed in range(first, first + seeds if not only or name in only else 0):
            d = random.Random(f"{name} {seed}")
            shape = d.choice((1, 2, 3)), d.choice((3, 4, 8, 17, 64)), d.randrange(5, 13), d.randrange(5, 13)
            torch.manual_seed(seed)
            gain = d.choice((0.3, 1.0, 4.0))
            yield f"{name} {seed}", make(d, shape).eval(), [torch.randn(*shape) * gain for _ in range(3)]
    for seed in range(first, first + networks if not only else 0):
        network = Network(seed).eval()
        if network.last == "softmax" and network.head.out_features == 1:
            continue  # it is 1, which ONNX Runtime's CPU and the HTP compute only from different files
        torch.manual_seed(seed + 1)
        gain = random.Random(seed).choice((0.5, 1.0, 3.0))
        yield f"network {seed}", network, [torch.randn(4, *network.shape) * gain for _ in range(3)]


def main() -> int:
    """Print the table, and return 1 where an operator differs by more than is promised, or a file is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="of each operator")
    parser.add_argument("--networks", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these operators, and no network")
    a = parser.parse_args()
    found, wrong, verdicts = dict[str, Agreement](), 0, Counter[bool]()
    for name, network, data in cases(a.seeds, a.first, a.networks, a.only):
        departures = compare(network, data, found)
        verdicts[not departures] += 1
        for line in departures:
            wrong += 1
            print(f"{name}: {line[:300]}", flush=True)
    table = Table("operator", "integers", "differ [%]", "by at most", "promised", box=None)
    for op, s in sorted(found.items(), key=lambda item: (item[1].largest, item[0])):
        table.add_row(op, f"{s.integers:,}", f"{100 * s.differing / s.integers:.2f}", f"{s.largest}", f"{promised(op)}")
    Console(width=120).print(table)
    print(f"{verdicts[True]} of {verdicts.total()} networks within what is promised")
    return int(wrong > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.exit(main())
