"""Draw random networks from the parts of real ones, and prove that a runtime computes the simulated integers.

    python benchmarks/random_networks.py --runtime onnxruntime --count 500 --seed 1

A seed determines a network, its data, and the platform and settings of its quantization. Every integer of every tensor
must equal the runtime's, except where a named operator computes in float, given the runtime's own operands. The data
are new to calibration. Networks that end in a typed error are counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # threads of two runtimes would spin
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chipfit
from chipfit.export import export
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.load import load, names
from chipfit.registry import entry
from chipfit.runtimes.onnxruntime import saturates
from chipfit.verify import Verification, verify

#: kinds of runtimes -> suffix of their files
RUNTIMES = {"onnxruntime": ".onnx", "openvino": ".onnx", "litert": ".tflite", "executorch": ".pte"}
#: those that run if none is named; lowering for the others takes long
USUAL = "onnxruntime", "litert"
#: largest share of networks that may be unsupported
REFUSED = 0.05
#: least share of all integers that are compared without tolerance, on most runtimes and on one with more floats
SHARE, SHARES = 0.9, {"openvino": 0.8}

# ---------------------------------------------------------------- parts of networks


class Block(nn.Module):
    """A block that computes a function of x, layers and parameters."""

    def __init__(self, f: Callable[..., Tensor], *layers: nn.Module, **numbers: Tensor) -> None:
        super().__init__()
        self.f, self.layers = f, nn.ModuleList(layers)
        for name, value in numbers.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, *self.layers, *(getattr(self, name) for name, _ in self.named_parameters(recurse=False)))


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu,
    F.relu6,
    F.hardswish,
    F.silu,
    F.gelu,
    torch.sigmoid,
    torch.tanh,
    F.hardtanh,
    F.hardsigmoid,
    F.elu,
    F.mish,
    lambda x: F.leaky_relu(x, 0.1),
    lambda x: F.softplus(x, 1.5),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x.clamp(-0.8, 1.3),
)
COMMON = (F.relu,) * 7 + (lambda x: x,) * 4 + (torch.sigmoid, lambda x: F.leaky_relu(x, 0.2), F.relu6)


def batch_norm(kind: type[nn.Module], c: int) -> nn.Module:
    """Return a batch norm with plausible statistics."""
    norm = kind(c)
    nn.init.uniform_(norm.running_mean, -0.3, 0.3)
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.3, 0.3)
    return norm


def conv(d: random.Random, c: int, o: int | None = None, stride: Any = 1) -> nn.Module:
    k, dilation = d.choice((1, 3, 3, 5, (1, 3), (3, 2))), d.choice((1, 1, 1, 2))
    o = o or d.choice((4, 6, 8, 12))
    groups = d.choice((1, 1, 1, 2, c))
    if c % groups or o % groups:
        groups = 1
    sizes = (k, k) if isinstance(k, int) else k
    padding = tuple(dilation * (s - 1) // 2 for s in sizes)
    bias = d.random() < 0.6
    layer = nn.Conv2d(c, o, k, stride, padding, dilation, groups, bias)
    act = d.choice(COMMON)
    if d.random() < 0.6:
        return Block(lambda x, a, b: act(b(a(x))), layer, batch_norm(nn.BatchNorm2d, o))
    return Block(lambda x, a: act(a(x)), layer)


def same_size(d: random.Random, c: int, o: int | None = None) -> nn.Module:
    """Return a convolution that keeps the image's size."""
    k, o = d.choice((1, 3)), o or c
    groups = c if o == c and d.random() < 0.3 else 1
    act, layer = d.choice(COMMON), nn.Conv2d(c, o, k, padding=k // 2, groups=groups, bias=d.random() < 0.5)
    if d.random() < 0.5:
        return Block(lambda x, a, b: act(b(a(x))), layer, batch_norm(nn.BatchNorm2d, o))
    return Block(lambda x, a: act(a(x)), layer)


def strided(d: random.Random, c: int) -> nn.Module:
    return conv(d, c, stride=d.choice((2, (1, 2), (2, 1), 3)))


def transposed(d: random.Random, c: int) -> nn.Module:
    k, p = d.choice(((2, 0), (3, 1), (4, 1)))
    more = 1 if k == 3 else 0
    return Block(lambda x, a: F.relu(a(x)), nn.ConvTranspose2d(c, d.choice((4, 6, 8)), k, 2, p, more))


def residual(d: random.Random, c: int) -> nn.Module:
    act = d.choice(COMMON)
    return Block(lambda x, a, b: act(x + b(a(x))), same_size(d, c, 6), same_size(d, 6, c))


def squeeze_excite(d: random.Random, c: int) -> nn.Module:
    gate = d.choice((torch.sigmoid, torch.sigmoid, F.hardsigmoid))
    return Block(
        lambda x, a, b: x * gate(b(F.relu(a(F.adaptive_avg_pool2d(x, 1))))), nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)
    )


def gate(d: random.Random, c: int) -> nn.Module:
    f = d.choice((torch.sigmoid, torch.tanh, F.relu6))
    return Block(lambda x, a, b: f(a(x)) * b(x), same_size(d, c), same_size(d, c))


def branches(d: random.Random, c: int) -> nn.Module:
    pool = d.choice((lambda x: F.max_pool2d(x, 3, 1, 1), lambda x: F.avg_pool2d(x, 3, 1, 1), lambda x: x))
    return Block(lambda x, a, b: torch.cat((a(x), b(x), pool(x)), 1), same_size(d, c, 4), same_size(d, c, 6))


def pool(d: random.Random, c: int) -> nn.Module:
    k, s = d.choice(((2, 2), (3, 2), (3, 1), ((2, 3), (1, 2)), (2, 3)))
    p, ceil = d.choice((0, 1)) if k == 3 else 0, d.random() < 0.2
    if d.random() < 0.5:
        return nn.MaxPool2d(k, s, p, ceil_mode=ceil)
    return nn.AvgPool2d(k, s, p, ceil_mode=False)


def resize(d: random.Random, c: int) -> nn.Module:
    mode = d.choice(("nearest", "bilinear", "bilinear"))
    if d.random() < 0.5:
        return nn.Upsample(scale_factor=2, mode=mode)
    size, corners = d.choice(((7, 9), (5, 6), (12, 8))), mode == "bilinear" and d.random() < 0.4
    return nn.Upsample(size, mode=mode, align_corners=corners or None)


def padding(d: random.Random, c: int) -> nn.Module:
    ends = tuple(d.randrange(3) for _ in range(4))
    mode, value = d.choice((("constant", 0.0), ("constant", 0.7), ("constant", -1.0), ("reflect", None)))
    return Block(lambda x, a: a(F.pad(x, ends, mode, value)), nn.Conv2d(c, d.choice((4, 6)), 3))


def constant(d: random.Random, c: int) -> nn.Module:
    """Return arithmetic with constants: numbers and parameters."""
    number, shape = d.choice((0.37, 1.7, -0.6)), (1, c, 1, 1)
    f = d.choice(
        (
            lambda x, s, b: x * s + b,
            lambda x, s, b: (x - b) / 0.6,
            lambda x, s, b: x + number,
            lambda x, s, b: number - x * s,
            lambda x, s, b: torch.maximum(x, b),
            lambda x, s, b: x * number,
        )
    )
    return Block(f, s=torch.rand(shape) + 0.5, b=torch.randn(shape) * 0.3)


def activation(d: random.Random, c: int) -> nn.Module:
    if d.random() < 0.15:
        return nn.PReLU(d.choice((1, c)), d.choice((0.1, 0.25)))
    return Block(d.choice(ACTIVATIONS if d.random() < 0.4 else COMMON))


def order(d: random.Random, c: int) -> nn.Module:
    """Return a slice, transposition or shuffle."""
    fs: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[:, :, 1:],
        lambda x: x[..., ::2],
        lambda x: x.permute(0, 1, 3, 2),
        lambda x: torch.cat((x[:, :1], x), 1),
        lambda x: torch.cat((x[:, :, :, -1:], x), 3),
        lambda x: torch.roll(x, 1, 2),
    ]
    if c % 2 == 0:
        fs += [
            lambda x: F.channel_shuffle(x, 2),
            lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
            lambda x: x.chunk(2, 1)[0] * torch.sigmoid(x.chunk(2, 1)[1]),
            lambda x: x.reshape(x.shape[0], 2, c // 2, *x.shape[2:]).sum(1),
        ]
    if c % 4 == 0:
        fs.append(lambda x: F.pixel_shuffle(x, 2))
    return Block(d.choice(fs), *())


def map_of_weights(d: random.Random, c: int) -> nn.Module:
    """Return attention over channels or pixels."""
    f = d.choice(
        (
            lambda x, a: x * torch.sigmoid(a(x).mean(1, keepdim=True)),
            lambda x, a: x * a(x).softmax(1),
            lambda x, a: x * torch.sigmoid(torch.cat((x.mean(1, True), x.amax(1, True)), 1).mean(1, True)) + a(x),
        )
    )
    return Block(f, same_size(d, c))


def norm(d: random.Random, c: int) -> nn.Module:
    return nn.GroupNorm(2 if c % 2 == 0 else 1, c) if d.random() < 0.6 else nn.InstanceNorm2d(c, affine=True)


IMAGE: Sequence[Callable[[random.Random, int], nn.Module]] = (
    *(conv,) * 8,
    *(residual,) * 7,
    *(pool,) * 2,
    *(squeeze_excite,) * 2,
    *(branches,) * 3,
    *(constant,) * 2,
    strided,
    transposed,
    gate,
    resize,
    padding,
    activation,
    order,
    map_of_weights,
)
RARE = (norm,)  # several operators in float each

# ---------------------------------------------------------------- sequences


def mlp(d: random.Random, c: int) -> nn.Module:
    act, size = d.choice((F.gelu, F.relu, F.silu, F.relu6)), d.choice((8, 12))
    return Block(lambda x, a, b, n: x + b(act(a(n(x)))), nn.Linear(c, size), nn.Linear(size, c), sequence_norm(d, c))


def sequence_norm(d: random.Random, c: int) -> nn.Module:
    return d.choice((nn.LayerNorm, nn.Identity, nn.Identity, nn.RMSNorm, nn.Identity, nn.Identity))(c)


class Attention(nn.Module):
    """Attention over [N, L, D] of one or two heads, fused or written out, perhaps causal."""

    def __init__(self, d: random.Random, c: int) -> None:
        super().__init__()
        self.heads = 2 if c % 2 == 0 else 1
        self.qkv, self.out, self.norm = nn.Linear(c, 3 * c), nn.Linear(c, c), sequence_norm(d, c)
        self.how = d.choice(("fused", "written", "written", "written", "causal"))

    def forward(self, x: Tensor) -> Tensor:
        n, length, c = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).reshape(n, length, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if self.how == "written":
            y = ((q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.how == "causal")
        return x + self.out(y.transpose(1, 2).reshape(n, length, c))


def class_token(d: random.Random, c: int) -> nn.Module:
    return Block(lambda x, t: torch.cat((t.expand(x.shape[0], -1, -1), x), 1), token=torch.randn(1, 1, c) * 0.3)


def glu(d: random.Random, c: int) -> nn.Module:
    def f(x: Tensor, a: nn.Module) -> Tensor:
        u, v = a(x).chunk(2, -1)
        return x + u * torch.sigmoid(v)

    return Block(f, nn.Linear(c, 2 * c))


def mixing(d: random.Random, c: int) -> nn.Module:
    """Return products of activations."""
    f = d.choice(
        (
            lambda x, a: (x @ a(x).transpose(1, 2)).softmax(-1) @ x,
            lambda x, a: x + (a(x) @ x.transpose(1, 2)) @ x * 0.02,
        )
    )
    return Block(f, nn.Linear(c, c))


def convolved(d: random.Random, c: int) -> nn.Module:
    """Return a 1-D convolution over [N, L, D]."""
    k, stride, dilation = d.choice((1, 3, 4)), d.choice((1, 1, 2)), d.choice((1, 1, 2))
    groups = d.choice((1, 1, c))
    layer = nn.Conv1d(c, c, k, stride, dilation * (k // 2), dilation, groups)
    last = d.choice(
        (nn.Identity(), batch_norm(nn.BatchNorm1d, c), nn.MaxPool1d(2), nn.AvgPool1d(2), nn.ConvTranspose1d(c, c, 2, 2))
    )
    return Block(lambda x, a, b: b(F.relu(a(x.transpose(1, 2)))).transpose(1, 2), layer, last)


SEQUENCE: Sequence[Callable[[random.Random, int], nn.Module]] = (
    *(mlp, Attention) * 2,
    *(convolved,) * 4,
    class_token,
    glu,
    mixing,
)


class Network(nn.Module):
    """A network of blocks for images, perhaps blocks for sequences, and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        d = random.Random(seed)
        torch.manual_seed(seed)
        self.shape = (d.choice((1, 3, 4)), d.choice((8, 9, 12)), d.choice((8, 10, 12)))
        self.tokens = d.random() < 0.3
        self.image, self.sequence = nn.ModuleList(), nn.ModuleList()
        x = torch.randn(2, *self.shape)
        with torch.no_grad():
            x = self._grow(self.image, conv, d, x)
            for _ in range(d.randrange(2, 4 if self.tokens else 7)):
                x = self._grow(self.image, d.choice(IMAGE if d.random() > 0.02 else RARE), d, x)
            if self.tokens:
                x = F.max_pool2d(x, 2).flatten(2).transpose(1, 2)
                if d.random() < 0.5:
                    shape, add = x.shape[1:], d.choice((torch.add, torch.mul))
                    self.sequence.append(Block(lambda x, p: add(x, p), p=torch.randn(1, *shape) * 0.3))
                for _ in range(d.randrange(1, 4)):
                    x = self._grow(self.sequence, d.choice(SEQUENCE), d, x)
            c = x.shape[2] if self.tokens else x.shape[1]
            self.end = d.choice(("mean", "first", "flat") if self.tokens else ("pool", "mean", "flat", "none"))
            wide = x[0].numel() if self.end == "flat" else c
            self.head = nn.Linear(wide, d.choice((1, 3, 10)))
            self.last = d.choice((None, None, None, "softmax", "sigmoid"))

    @staticmethod
    def _grow(
        to: nn.ModuleList, block: Callable[[random.Random, int], nn.Module], d: random.Random, x: Tensor
    ) -> Tensor:
        """Append a block if it accepts the data and its output has a reasonable size; return the output."""
        made = block(d, x.shape[1] if x.dim() == 4 else x.shape[2]).eval()
        try:
            y = made(x)
        except RuntimeError:  # too small for it
            return x
        fits = 16 <= y[0].numel() <= 2000 and (y.dim() == 3 or (min(y.shape[2:]) >= 2 and y.shape[1] <= 32))
        if fits and y.dim() == x.dim() and bool(y.isfinite().all()):
            to.append(made)
            return y
        return x

    def forward(self, x: Tensor) -> Tensor:
        for block in self.image:
            x = block(x)
        if self.tokens:
            x = F.max_pool2d(x, 2).flatten(2).transpose(1, 2)
            for block in self.sequence:
                x = block(x)
        if self.end == "none":
            return x
        if self.end == "flat":
            x = x.flatten(1)
        elif self.tokens:
            x = x.mean(1) if self.end == "mean" else x[:, 0]
        else:
            x = F.adaptive_avg_pool2d(x, 1).flatten(1) if self.end == "pool" else x.mean((2, 3))
        x = self.head(x)
        return x.softmax(-1) if self.last == "softmax" else torch.sigmoid(x) if self.last == "sigmoid" else x


# ---------------------------------------------------------------- scales on which ties are common


def power_of_two_scales(plan: Plan) -> Plan:
    """Return a plan with activation scales rounded up to powers of two, where rounding ties are common."""
    tensors = dict(plan.tensors)
    for name, t in tensors.items():
        if t.quantized and t.role == "activation":
            tensors[name] = t.with_(scale=torch.exp2(torch.ceil(torch.log2(t.scale))))
    return dataclasses.replace(plan, tensors=tensors)


def with_biases(graph: Graph, plan: Plan) -> Plan:
    """Return a plan whose bias scales are products of input and weight scales."""
    tensors = dict(plan.tensors)
    for n in graph.nodes:
        if len(n.inputs) > 2 and n.inputs[2] in tensors and tensors[n.inputs[2]].role == "bias":
            b = tensors[n.inputs[2]]
            tensors[n.inputs[2]] = b.with_(
                scale=(tensors[n.inputs[0]].scale * tensors[n.inputs[1]].scale).expand(b.scale.shape).contiguous()
            )
    return dataclasses.replace(plan, tensors=tensors)


# ---------------------------------------------------------------- the proof


@dataclass
class Outcome:
    """The outcome of one network."""

    seed: int
    platform: str
    checks: list[Verification] = field(default_factory=list)  #: by runtime
    refused: str = ""  #: the typed error that refused it
    faults: list[str] = field(default_factory=list)  #: differences that no named float operator explains


@cache
def platforms(runtime: str) -> list[str]:
    """Return the built-in platforms that a runtime verifies and that quantize activations, with their revisions."""
    found = [p for p in map(load, names()) for r in p.runtimes[:1] if _kind(r) == runtime]
    found = [p for p in found if any(u.out in p.formats for o in p.ops for u in o.use)]
    return [f"{p.name}@{tag}" if tag else p.name for p in found for tag in p.arch or ("",)]


def of_this_cpu(platform: str) -> str:
    """Return the revision of a platform that this CPU computes: without VNNI, products of 8 bits saturate in pairs."""
    name, _, revision = platform.partition("@")
    return name if revision in ("VNNI", "AMX") and saturates() else platform


def _kind(runtime: str) -> str:
    """Return the kind of a runtime: its own, or the one that stands for all that read such files."""
    others = [kind for kind, suffix in RUNTIMES.items() if suffix == _suffix(runtime)]
    return runtime if runtime in RUNTIMES else others[-1] if others else ""


def _suffix(runtime: str) -> str:
    return str(entry("runtime", runtime).declares.suffix)


def check(seed: int, runtime: str) -> Outcome:
    """Make a network, quantize it, and compare every integer with each runtime of its platform that loads the file.

    Args:
        runtime: one of `RUNTIMES`; the network of a seed is the same for all.
    """
    model = Network(seed).eval()
    d = random.Random(f"{seed} {runtime}")
    name, rule, ties = d.choice(platforms(runtime)), d.choice(("mse", "mse", "no_clipping")), d.random() < 0.25
    torch.manual_seed(seed + 1)
    gain = d.choice((0.5, 1.0, 3.0))
    data = [torch.randn(4, *model.shape) * gain for _ in range(4)]
    overrides: dict[str, Any] = {}
    if runtime == "litert" and d.random() < 0.2:
        overrides = {"Conv2D": {"bits": 4}} if name == "tflite_int8" else {}
    name = of_this_cpu(name)
    out = Outcome(seed, name)
    try:
        result = chipfit.quantize(model, data[:2], platform=name, rule=rule, overrides=overrides, progress=False)
        plan = with_biases(result.graph, power_of_two_scales(result.plan)) if ties else result.plan
        with tempfile.TemporaryDirectory() as folder:
            path = export(result.graph, plan, Path(folder) / f"model{RUNTIMES[runtime]}", result.platform)
            for r in result.platform.runtimes:
                if _suffix(r) == RUNTIMES[runtime]:
                    args = result.graph, plan, result.platform, data[2:]
                    out.checks.append(verify(*args, runtime=r, path=path))
    except chipfit.errors.RuntimeUnavailable as e:  # the written file does not load: our fault
        out.faults.append(str(e))
    except chipfit.errors.ChipfitError as e:
        out.refused = f"{type(e).__name__}: {e}"
    except Exception as e:
        out.faults.append(f"untyped {type(e).__name__}: {e}")
    for found in out.checks:
        out.faults += [f"{found.runtime}: {line}" for line in found.departures]
        if found.differing and not any(r.float_ops for r in found.rows):
            out.faults.append(f"{found.runtime}: {found.differing} integers differ and nothing runs in float")
        if not found.integers:
            out.faults.append(f"{found.runtime}: nothing was compared")
    return out


def apart(seed: int, runtime: str, work: Callable[[int, str], Outcome] = check) -> Outcome:
    """Call `check` in a process of its own, so that a crash of a runtime is a fault of that network."""
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sending.send(work(seed, runtime)))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        return Outcome(seed, "?", faults=[f"the process ended with exit status {process.exitcode}"])
    finally:
        process.join()


@dataclass
class Tally:
    """The outcomes of many networks."""

    outcomes: list[Outcome] = field(default_factory=list)
    least: float = SHARE  #: share of integers that must be compared without tolerance

    @property
    def rows(self) -> list[Any]:
        return [r for o in self.outcomes for c in o.checks for r in c.rows]

    @property
    def share(self) -> float:
        """The share of all integers that are compared without tolerance."""
        strict = sum(r.elements for r in self.rows if not r.allowed and not r.fault)
        return strict / max(1, sum(r.elements + r.missed for r in self.rows))

    @property
    def refused(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.refused]

    @property
    def faults(self) -> list[str]:
        """All faults, as text."""
        found = [f"network {o.seed} on {o.platform}: {line}" for o in self.outcomes for line in o.faults]
        if len(self.refused) > REFUSED * len(self.outcomes):
            found.append(f"{len(self.refused)} of {len(self.outcomes)} networks were refused")
        if self.share < self.least:
            found.append(f"only {100 * self.share:.2f} % of all integers are compared without tolerance")
        return found

    def report(self) -> str:
        """Return a summary as text."""
        rows, checks = self.rows, [c for o in self.outcomes for c in o.checks]
        floats, differing = Counter(), Counter()
        for r in rows:
            for op in r.float_ops:
                floats[op] += 1
                differing[op] += r.op_differing
        kinds = Counter(o.refused.partition(". ")[0][:110] + f" [{_reason(o.refused)}]" for o in self.refused)
        compared = sum(not r.why for r in rows)
        by = Counter(c.runtime for c in checks)
        lines = [
            f"{len(self.outcomes)} networks, {len(checks)} runs: " + ", ".join(f"{n} on {k}" for k, n in by.items()),
            "platforms: " + ", ".join(f"{n} x {k}" for k, n in Counter(o.platform for o in self.outcomes).items()),
            f"{compared} of {len(rows)} tensors compared, {sum(r.elements for r in rows):,} integers",
            f"{100 * self.share:.3f} % of all integers compared at 0; "
            f"{sum(r.op_differing for r in rows)} differ given the device's operands, "
            f"{sum(r.differing for r in rows)} when each side runs on its own results",
            "operators in float (tensors, integers that differ): "
            + ", ".join(f"{op} {n}, {differing[op]}" for op, n in floats.most_common()),
            f"{len(self.refused)} networks refused" + "".join(f"\n  {n} x {k}" for k, n in kinds.most_common()),
            f"{len(self.faults)} faults" + "".join(f"\n  {line[:600]}" for line in self.faults[:40]),
        ]
        return "\n".join(lines)


def _reason(text: str) -> str:
    return text.partition("Got: ")[2][:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runtime", choices=sorted(RUNTIMES), action="append", help=f"of {', '.join(USUAL)} if omitted"
    )
    parser.add_argument("--count", type=int, default=500, help="networks for each")
    parser.add_argument("--seed", type=int, default=0, help="the first network is number seed * 1,000,000")
    parser.add_argument("--first", type=int, default=0, help="skip this many networks, to share the work")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time, for each runtime")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    bad = 0
    for runtime in args.runtime or USUAL:
        start, tally = time.perf_counter(), Tally(least=SHARES.get(runtime, SHARE))
        for k in range(args.first, args.first + args.count):
            if time.perf_counter() - start > 60 * args.minutes:
                break
            tally.outcomes.append(apart(args.seed * 1_000_000 + k, runtime))
            for line in tally.outcomes[-1].faults:
                print(f"network {tally.outcomes[-1].seed} on {tally.outcomes[-1].platform}: {line[:400]}", flush=True)
        print(
            f"== {runtime}, seed {args.seed} from {args.first}, {time.perf_counter() - start:.0f} s\n{tally.report()}",
            flush=True,
        )
        bad += len(tally.faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
