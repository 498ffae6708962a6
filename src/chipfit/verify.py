"""The proof: float, fake-quantized, integer and device side by side, tensor by tensor."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit.calibration.data import iterate, split_label
from chipfit.engine.run import run
from chipfit.errors import DataError
from chipfit.export import export
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.quantizers.stored import Stored
from chipfit.registry import DeviceRuntime, entries, entry, require
from chipfit.simulate.integer import float_results, profile_for, simulate

_USUAL = "onnxruntime"  #: runtime of platforms that name none


@dataclass
class Row:
    """One quantized tensor: simulator against device, and against the float network."""

    tensor: str
    layer: str
    op: str
    elements: int = 0
    differing: int = 0  #: integers that differ, each side running on its own results
    largest: int = 0  #: largest difference [codes]
    op_differing: int = 0  #: the same when the operator reads the device's own codes
    op_largest: int = 0
    in_float: bool = False  #: the runtime computes this operator in float
    signal: float = 0.0  #: sum of squares of the float tensor
    noise: float = 0.0  #: sum of squares of its error on the device

    def add(
        self, device: torch.Tensor, free: torch.Tensor, alone: torch.Tensor, reals: torch.Tensor, stored: Stored
    ) -> None:
        """Count one batch.

        Args:
            device: the runtime's codes.
            free: those of the simulation, which runs on its own results.
            alone: those of the operator by itself, given the runtime's codes.
            reals: what the float network computes.
            stored: how the tensor is stored.
        """
        q = device.to(torch.int64)
        off, op_off = ((simulated.to(torch.int64) - q).abs() for simulated in (free, alone))
        self.elements += q.numel()
        self.differing += int((off > 0).sum())
        self.op_differing += int((op_off > 0).sum())
        if q.numel():
            self.largest, self.op_largest = max(self.largest, int(off.max())), max(self.op_largest, int(op_off.max()))
        x = reals.double()
        error = x - (q - stored.zero_point).double() * stored.scale.double()
        self.signal += float(x.square().sum())
        self.noise += float(error.square().sum())

    @property
    def fraction(self) -> float:
        return self.differing / self.elements if self.elements else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio [dB]; infinite without noise."""
        if self.noise == 0:
            return float("inf")
        return float(10 * np.log10(max(self.signal, 1e-300) / self.noise))


@dataclass
class Verification:
    """What `verify` found."""

    runtime: str
    promised: bool  #: this runtime's arithmetic is a verified profile of this platform
    samples: int = 0
    rows: list[Row] = field(default_factory=list)
    executed: dict[str, int] = field(default_factory=dict)  #: operator kinds that the runtime ran, with counts
    accuracy: dict[str, float] = field(default_factory=dict)  #: top-1 of float, simulated, integer, device
    output_gap: float = 0.0  #: largest difference between the device's float outputs and the integer simulation's
    warnings: list[str] = field(default_factory=list)

    @property
    def integers(self) -> int:
        return sum(r.elements for r in self.rows)

    @property
    def differing(self) -> int:
        return sum(r.differing for r in self.rows)

    @property
    def exact(self) -> bool:
        """Not one integer of any tensor differs."""
        return self.integers > 0 and self.differing == 0

    @property
    def sound(self) -> bool:
        """Every operator, given the device's inputs, computes the device's integers, float ones up to 1 unit."""
        return self.integers > 0 and all(r.op_largest <= (1 if r.in_float else 0) for r in self.rows)

    @property
    def first_difference(self) -> Row | None:
        """The first tensor, in execution order, that departs."""
        return next((r for r in self.rows if r.differing), None)

    @property
    def float_operators(self) -> list[str]:
        """Layers that the runtime itself computes in float."""
        return [f"{r.op} '{r.layer or r.tensor}'" for r in self.rows if r.in_float]

    def summary(self) -> str:
        """Three or four lines for a person."""
        compared = f"in {len(self.rows)} tensors over {self.samples} samples"
        lines = [f"{self.runtime}: {self.differing} of {self.integers} integers differ {compared}"]
        first = self.first_difference
        if first is not None:
            how = ", computed in float by the runtime" if first.in_float else ""
            share = f"{100 * first.fraction:.4f} % of its integers, at most {first.largest}{how}"
            lines.append(f"first departure: {first.op} '{first.layer or first.tensor}', {share}")
            worst = max(r.op_largest for r in self.rows)
            lines.append(f"each operator by itself, given the device's inputs: largest difference {worst}")
        shown, more = self.float_operators[:6], len(self.float_operators) - 6
        if shown:
            others = f" and {more} more" if more > 0 else ""
            lines.append(f"computed in float by the runtime: {', '.join(shown)}{others}")
        if self.accuracy:
            lines.append("top-1: " + ", ".join(f"{k} {100 * v:.2f} %" for k, v in self.accuracy.items()))
        return "\n".join(lines + self.warnings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        out = asdict(self)
        out.update(exact=self.exact, sound=self.sound, integers=self.integers, differing=self.differing)
        for d, r in zip(out["rows"], self.rows, strict=True):
            d["sqnr_db"] = r.sqnr_db if np.isfinite(r.sqnr_db) else None
        return out


def own_runtime(platform: Platform, suffix: str = "") -> str:
    """The runtime that the platform's files are for; where there is none, one that loads files of this suffix."""
    loading = [name for name, e in entries("runtime").items() if suffix in ("", e.declares.suffix)]
    preferred = [name for name in (*platform.runtimes, _USUAL) if name in loading]
    return [*preferred, *loading, _USUAL][0]


def verify(
    graph: Graph,
    plan: Plan,
    platform: Platform,
    data: Any,
    *,
    runtime: str | None = None,
    path: str | Path | None = None,
    model: torch.nn.Module | None = None,
    batches: int | None = None,
) -> Verification:
    """Run everything on the same inputs and compare integer by integer.

    Args:
        data: batches as for calibration; (input, label) pairs give accuracies too.
        runtime: a registered runtime; by default the platform's own, or one that loads `path`.
        path: the deployed file; exported to a temporary one when omitted.
        model: the fake-quantized module, for its accuracy.
        batches: stop after this many.

    Raises:
        RuntimeUnavailable: the runtime is not installed or refuses the file.
        DataError: no data.
    """
    runtime = runtime or own_runtime(platform, Path(path).suffix if path is not None else "")
    found = entry("runtime", runtime)
    require(found)
    quantized = [v for v in (*graph.inputs, *(o for n in graph.nodes for o in n.outputs)) if plan.quantized(v)]
    with tempfile.TemporaryDirectory() as folder:
        suffix = found.declares.suffix
        file = Path(path) if path is not None else export(graph, plan, Path(folder) / f"model{suffix}", platform)
        device = found.thing(file, [found.declares.codes.format(v) for v in quantized])
    out = Verification(runtime, runtime in platform.runtimes, executed=dict(device.executed()))
    in_float, makers = float_results(graph, plan, profile_for(platform, found.declares.kernels)), graph.producers()
    for v in quantized:
        layer, op = (makers[v].layer, makers[v].op) if v in makers else ("", "Input")
        out.rows.append(Row(v, layer, op, in_float=v in in_float))
    if hasattr(device, "warnings"):
        out.warnings += device.warnings(platform)
    comparison = _Comparison(graph, plan, platform, device, found.declares, model, out)
    with torch.inference_mode():
        for k, batch in enumerate(iterate(data)):
            if batches is not None and k >= batches:
                break
            comparison.add(*split_label(batch, graph))
    if out.samples == 0:
        raise DataError("There are no data to verify on", hint="give at least one batch")
    return out


@dataclass
class _Comparison:
    """Simulation and device side by side, batch after batch; what is found goes to `out`."""

    graph: Graph
    plan: Plan
    platform: Platform
    device: Any
    declares: DeviceRuntime
    model: torch.nn.Module | None
    out: Verification
    labels: int = 0
    hits: Counter[str] = field(default_factory=Counter)  #: right answers of each side

    def add(self, inputs: list[torch.Tensor], label: torch.Tensor | None) -> None:
        """Run one batch everywhere and compare."""
        self.out.samples += inputs[0].shape[0] if inputs and inputs[0].dim() else 1
        reals = run(self.graph, inputs, keep=[r.tensor for r in self.out.rows])
        got = {k: torch.from_numpy(v) for k, v in self.device.run([x.numpy() for x in inputs]).items()}
        names = {r.tensor: self.declares.codes.format(r.tensor) for r in self.out.rows}
        codes = {v: got[name] for v, name in names.items() if name in got}
        free, alone = (
            simulate(self.graph, self.plan, inputs, self.platform, force=force, kernels=self.declares.kernels)
            for force in (None, codes)
        )
        for row in self.out.rows:
            v = row.tensor
            if v in codes and v in free:
                row.add(codes[v], free[v], alone[v], reals[v], self.plan[v])
        first, device = self.graph.outputs[0], next(iter(got.values()))
        integer, stored = free.get(first, device), self.plan.stored(first)
        if stored is not None and not integer.is_floating_point():
            integer = stored.dequantize(integer)
        if device.shape == integer.shape and device.is_floating_point() and device.numel():
            self.out.output_gap = max(self.out.output_gap, float((device - integer).abs().max()))
        if label is not None and reals[first].dim() == 2 and label.shape[:1] == reals[first].shape[:1]:
            self._count(inputs, label, {"float": reals[first], "integer": integer, "device": device})

    def _count(self, inputs: list[torch.Tensor], label: torch.Tensor, results: dict[str, torch.Tensor]) -> None:
        """Right answers by the label, of the simulation too."""
        run_flat: Any = getattr(self.model, "run_flat", None)  # modules that chipfit made have it
        if run_flat is not None:
            results["simulated"] = run_flat(inputs)[0]
        self.labels += label.shape[0]
        self.hits.update({k: int((y.argmax(1) == label.reshape(-1)).sum()) for k, y in results.items()})
        self.out.accuracy = {k: right / self.labels for k, right in self.hits.items()}
