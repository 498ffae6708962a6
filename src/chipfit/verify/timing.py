"""The time of a quantized file beside that of the float network, on a runtime of this machine."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chipfit.calibration.data import fixed_batch_of, iterate, split_label
from chipfit.engine.run import run
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.errors import DataError
from chipfit.export import export
from chipfit.graph.ir import CPU, Graph
from chipfit.graph.linear import products
from chipfit.graph.placement import inputs_on
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.registry import entry, require
from chipfit.screen import Summary, SummaryRepr
from chipfit.verify.run import default_runtime

#: calls of each file that warm it up, and pairs of calls that are measured, at least and at most
WARM, LEAST, MOST = 3, 10, 1000


@dataclass(frozen=True, kw_only=True)
class OperatorWork:
    """The work of one operator for one sample."""

    name: str  #: the user's layer
    op: str
    exec: str  #: "int", "float", "follow" or "table"
    products: int  #: multiplications
    float_bytes: int  #: of inputs, weights and results in float32
    quantized_bytes: int  #: of the same as they are stored


@dataclass(frozen=True, kw_only=True, repr=False)
class Timing(SummaryRepr):
    """The time of one call of the float file and of the quantized one, and the work of each operator."""

    runtime: str
    batch: int  #: samples of a call
    pairs: int  #: pairs of calls that were measured, one after the other
    float_ms: float  #: median processor time of a call of the float file, all threads together [ms]
    quantized_ms: float
    float_wall_ms: float  #: median time on the clock [ms]
    quantized_wall_ms: float
    ratio: float  #: median over the pairs of quantized over float processor time
    float_file: int  #: size of the float file [byte]
    quantized_file: int
    operators: tuple[OperatorWork, ...]  #: in execution order

    @property
    def warnings(self) -> list[str]:
        """A sentence where the quantized file is not faster."""
        if self.ratio < 0.95:
            return []
        what = "not faster than" if self.ratio < 1.05 else f"{self.ratio:.2f} times as slow as"
        return [f"the quantized file is {what} the float one on {self.runtime} and this processor"]

    def to_dict(self) -> dict[str, Any]:
        """Return the times as JSON-able data, with the warnings."""
        return {**asdict(self), "warnings": self.warnings}

    def _summary(self) -> Summary:
        both = f"{self.float_ms:.3g} ms float, {self.quantized_ms:.3g} ms quantized"
        facts = {
            "processor time": f"{both} ({self.ratio:.2f}x) for {self.batch} samples, median of {self.pairs} pairs",
            "clock": f"{self.float_wall_ms:.3g} ms float, {self.quantized_wall_ms:.3g} ms quantized",
            "file": f"{self.float_file:,} bytes float, {self.quantized_file:,} bytes quantized",
            "warning": "; ".join(self.warnings),
        }
        heavy = sorted(self.operators, key=lambda o: -o.products)
        rows = [(o.name, o.op, o.exec, o.products, o.float_bytes, o.quantized_bytes) for o in heavy]
        header = ("layer", "operator", "runs", "products", "bytes float", "bytes stored")
        return Summary(f"Time on {self.runtime}", facts, header, rows, "timing.operators")


@torch_defaults()
def measure(
    graph: Graph, plan: Plan, platform: Platform, data: Any, *, runtime: str | None = None, seconds: float = 2.0
) -> Timing:
    """Run the float and the quantized file in turns, and return their times.

    Args:
        data: the first batch is what a call computes.
        runtime: a registered runtime; by default the platform's own.
        seconds: time to measure for, after the first calls; at least `LEAST` pairs of calls run.

    Raises:
        RuntimeUnavailable: the runtime is not installed, or refuses a file.
        UnsupportedError: a file cannot hold the network.
        DataError: no data.
    """
    name = default_runtime(platform) if runtime is None else runtime
    found = entry("runtime", name)
    require(found)
    first = None if data is None else next(iter(iterate(data, fixed_batch_of(graph))), None)
    if first is None:
        raise DataError("There are no data to measure on", hint="give at least one batch")
    flat = inputs_on(CPU, split_label(first, graph)[0])
    inputs = [x.numpy() for x in flat]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        suffix = found.declares.suffix
        plans = {"float": Plan(), "quantized": plan}
        files = {k: export(graph, p, Path(folder) / f"{k}{suffix}", platform) for k, p in plans.items()}
        devices = {k: found.thing(file) for k, file in files.items()}
        sizes = {f"{k}_file": file.stat().st_size for k, file in files.items()}
        used, clock = _alternate(list(devices.values()), inputs, seconds)
    middle: dict[str, Any] = {f"{k}_ms": statistics.median(t) for k, t in zip(devices, used)}
    middle |= sizes | {f"{k}_wall_ms": statistics.median(t) for k, t in zip(devices, clock)}
    ratio = statistics.median(q / max(f, 1e-6) for f, q in zip(*used, strict=True))
    work, batch = tuple(operator_work(graph, plan, flat)), len(inputs[0]) if inputs and inputs[0].ndim else 1
    return Timing(runtime=name, batch=batch, pairs=len(used[0]), ratio=ratio, operators=work, **middle)


def _alternate(
    devices: Sequence[Any], inputs: Sequence[np.ndarray], seconds: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Call two devices in turns, the first one first in every other pair; return processor and clock times [ms]."""
    for device in devices:
        for _ in range(WARM):
            device.run(inputs)
    used: list[list[float]] = [[], []]
    clock: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    for pair in itertools.count():
        if pair >= MOST or (pair >= LEAST and time.perf_counter() > end):
            return used, clock
        for k in (0, 1) if pair % 2 else (1, 0):
            start, cpu = time.perf_counter(), time.process_time()
            devices[k].run(inputs)
            used[k].append(1e3 * (time.process_time() - cpu))
            clock[k].append(1e3 * (time.perf_counter() - start))
    raise AssertionError


def operator_work(graph: Graph, plan: Plan, inputs: Sequence[Any]) -> list[OperatorWork]:
    """Return the work of each operator for one sample.

    Args:
        inputs: one batch, which decides sizes that the graph leaves open.
    """
    counts = {name: x.numel() for name, x in zip(graph.inputs, inputs, strict=True)}
    names = [o for n in graph.nodes for o in n.outputs]
    counts |= {name: x.numel() for name, x in run(graph, list(inputs), keep=names).items() if name in names}
    batch = len(inputs[0]) if inputs and inputs[0].dim() else 1
    counts = {k: -(-c // batch) for k, c in counts.items()} | {k: w.numel() for k, w in graph.weights.items()}

    def size(name: str) -> int:
        stored = plan.stored(name)
        bits = 32 if stored is None else stored.grid.bits
        return (counts.get(name, 0) * bits + 7) // 8

    out = []
    for node in graph.nodes:
        if node.name not in plan.nodes:
            continue
        touched = [*dict.fromkeys(i for i in (*node.inputs, *node.outputs) if i is not None)]
        decided = plan.nodes[node.name]
        out.append(
            OperatorWork(
                name=node.display_name,
                op=node.op,
                exec=decided.exec,
                products=int(products(graph, node)),
                float_bytes=sum(4 * counts.get(t, 0) for t in touched),
                quantized_bytes=sum(map(size, touched)),
            )
        )
    return out
