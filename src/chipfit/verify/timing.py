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
from chipfit.graph.linear import multiplications
from chipfit.graph.placement import inputs_on
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.registry import entry, require_libraries
from chipfit.screen import Summary, SummaryRepr
from chipfit.verify.run import default_runtime

WARM_UP_CALLS = 3  #: of each file, which are not measured
LEAST_PAIRS, MOST_PAIRS = 10, 1000  #: pairs of calls that are measured


@dataclass(frozen=True, kw_only=True)
class OperatorWork:
    """The multiplications and the memory traffic of one operator for one sample."""

    name: str  #: the user's layer
    op: str  #: canonical operator
    exec: str  #: execution mode: "int", "float", "follow" or "table"
    products: int  #: multiplications
    float_bytes: int  #: size of inputs, weights and results in float32
    quantized_bytes: int  #: size of inputs, weights and results as the plan stores them


@dataclass(frozen=True, kw_only=True, repr=False)
class Timing(SummaryRepr):
    """The time of one call of the float file and of the quantized file, and the work of each operator."""

    runtime: str
    batch: int  #: samples of a call
    pairs: int  #: pairs of calls that were measured, one after the other
    float_ms: float  #: median processor time of a call of the float file, all threads together [ms]
    quantized_ms: float
    float_wall_ms: float  #: median time on the clock [ms]
    quantized_wall_ms: float
    ratio: float  #: median over the pairs of quantized over float processor time
    float_file: int  #: size of the float file [byte]
    quantized_file: int  #: size of the quantized file [byte]
    operators: tuple[OperatorWork, ...]  #: in execution order

    @property
    def warnings(self) -> list[str]:
        """A sentence if the quantized file is not faster, else nothing."""
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
    """Write the float and the quantized file, run them in turns, and return their times.

    Args:
        plan: of the quantized file.
        data: calibration data; every call runs their first batch.
        runtime: a registered runtime; by default the platform's own.
        seconds: how long pairs of calls are measured; at least `LEAST_PAIRS` are.

    Raises:
        RuntimeUnavailable: the runtime is not installed, or refuses a file.
        UnsupportedError: a file cannot hold the network.
        DataError: no data.
    """
    name = default_runtime(platform) if runtime is None else runtime
    found = entry("runtime", name)
    require_libraries(found)
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
        cpu_times, clock_times = alternate(list(devices.values()), inputs, seconds)
    medians: dict[str, Any] = {f"{k}_ms": statistics.median(t) for k, t in zip(devices, cpu_times)}
    medians |= sizes | {f"{k}_wall_ms": statistics.median(t) for k, t in zip(devices, clock_times)}
    ratio = statistics.median(q / max(f, 1e-6) for f, q in zip(*cpu_times, strict=True))
    work, batch = tuple(operator_work(graph, plan, flat)), len(inputs[0]) if inputs and inputs[0].ndim else 1
    return Timing(runtime=name, batch=batch, pairs=len(cpu_times[0]), ratio=ratio, operators=work, **medians)


def alternate(
    devices: Sequence[Any], inputs: Sequence[np.ndarray], seconds: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Call two devices in turns, and return the processor times and times on the clock of each [ms].

    Every other pair begins with the first device.
    """
    for device in devices:
        for _ in range(WARM_UP_CALLS):
            device.run(inputs)
    cpu_times: list[list[float]] = [[], []]
    clock_times: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    for pair in itertools.count():
        if pair >= MOST_PAIRS or (pair >= LEAST_PAIRS and time.perf_counter() > end):
            return cpu_times, clock_times
        for k in (0, 1) if pair % 2 else (1, 0):
            clock_start, cpu_start = time.perf_counter(), time.process_time()
            devices[k].run(inputs)
            cpu_times[k].append(1e3 * (time.process_time() - cpu_start))
            clock_times[k].append(1e3 * (time.perf_counter() - clock_start))
    raise AssertionError


def operator_work(graph: Graph, plan: Plan, inputs: Sequence[Any]) -> list[OperatorWork]:
    """Return the work of each operator for one sample.

    Args:
        inputs: one batch; its sizes take the place of those that the graph leaves open.
    """
    elements = {name: x.numel() for name, x in zip(graph.inputs, inputs, strict=True)}
    names = [o for n in graph.nodes for o in n.outputs]
    elements |= {name: x.numel() for name, x in run(graph, list(inputs), keep=names).items() if name in names}
    batch = len(inputs[0]) if inputs and inputs[0].dim() else 1
    elements = {k: -(-c // batch) for k, c in elements.items()} | {k: w.numel() for k, w in graph.weights.items()}

    def stored_bytes(name: str) -> int:
        stored = plan.stored(name)
        bits = 32 if stored is None else stored.grid.bits
        return (elements.get(name, 0) * bits + 7) // 8

    out = []
    for node in graph.nodes:
        if node.name not in plan.nodes:
            continue
        values = [*dict.fromkeys(i for i in (*node.inputs, *node.outputs) if i is not None)]
        decided = plan.nodes[node.name]
        out.append(
            OperatorWork(
                name=node.display_name,
                op=node.op,
                exec=decided.exec,
                products=int(multiplications(graph, node)),
                float_bytes=sum(4 * elements.get(t, 0) for t in values),
                quantized_bytes=sum(map(stored_bytes, values)),
            )
        )
    return out
