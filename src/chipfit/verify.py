"""The proof: float, fake-quantized, integer and device side by side, tensor by tensor."""

from __future__ import annotations

import tempfile
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
from chipfit.registry import DeviceRuntime, entries, entry, require
from chipfit.simulate.integer import float_operators, profile_for, simulate


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
        """Every operator, given the device's inputs, computes the device's integers; 1 unit is allowed to float ones."""
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
        lines = [
            f"{self.runtime}: {self.differing} of {self.integers} integers differ in {len(self.rows)} tensors over {self.samples} samples"
        ]
        first = self.first_difference
        if first is not None:
            lines.append(
                f"first departure: {first.op} '{first.layer or first.tensor}', {100 * first.fraction:.4f} % of its integers, at most {first.largest}"
                + (", computed in float by the runtime" if first.in_float else "")
            )
            worst = max(r.op_largest for r in self.rows)
            lines.append(f"each operator by itself, given the device's inputs: largest difference {worst}")
        if self.float_operators:
            shown = ", ".join(self.float_operators[:6])
            lines.append(
                f"computed in float by the runtime: {shown}"
                + (f" and {len(self.float_operators) - 6} more" if len(self.float_operators) > 6 else "")
            )
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
    own = [name for name in platform.runtimes if name in loading]
    return next(iter([*own, *(["onnxruntime"] if "onnxruntime" in loading else []), *loading]), "onnxruntime")


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
    quantized = [v for v in (*graph.inputs, *(o for n in graph.nodes for o in n.outputs)) if plan.quantized(v)]
    engine = entry("runtime", runtime)
    says: DeviceRuntime = engine.declares
    require(engine)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(path) if path is not None else export(graph, plan, Path(folder) / f"model{says.suffix}", platform)
        device = engine.thing(file, [says.codes.format(v) for v in quantized])
    profile = profile_for(platform, says.kernels)
    producers = graph.producers()
    in_float = {o for n in float_operators(graph, plan, profile) for o in _group_outputs(graph, plan, n.name)}
    rows = {
        v: Row(
            v,
            producers[v].layer if v in producers else "",
            producers[v].op if v in producers else "Input",
            in_float=v in in_float,
        )
        for v in quantized
    }
    promised = runtime in platform.runtimes
    out = Verification(runtime, promised, rows=list(rows.values()), executed=dict(device.executed()))
    if runtime == "onnxruntime":
        from chipfit.runtimes.onnxruntime import saturates

        out.warnings += [w for w in [saturates()] if w and platform.arch_selected == "VNNI"]
    hits: dict[str, int] = {}
    labelled = 0
    with torch.inference_mode():
        for k, batch in enumerate(iterate(data)):
            if batches is not None and k >= batches:
                break
            inputs, label = split_label(batch, graph)
            out.samples += inputs[0].shape[0] if inputs and inputs[0].dim() else 1
            results = _one_batch(graph, plan, platform, inputs, device, says, rows, out, model)
            if label is not None and results["float"].dim() == 2 and label.shape[:1] == results["float"].shape[:1]:
                labelled += label.shape[0]
                for name, y in results.items():
                    hits[name] = hits.get(name, 0) + int((y.argmax(1) == label.reshape(-1)).sum())
    if out.samples == 0:
        raise DataError("There are no data to verify on", hint="give at least one batch")
    out.accuracy = {k: v / labelled for k, v in hits.items()} if labelled else {}
    return out


def _group_outputs(graph: Graph, plan: Plan, head: str) -> tuple[str, ...]:
    tail = next((g[-1] for g in plan.groups if g[0] == head), head)
    return graph.node(tail).outputs


def _one_batch(
    graph: Graph,
    plan: Plan,
    platform: Platform,
    inputs: list[torch.Tensor],
    device: Any,
    says: DeviceRuntime,
    rows: dict[str, Row],
    out: Verification,
    model: torch.nn.Module | None,
) -> dict[str, torch.Tensor]:
    reals = run(graph, inputs, keep=list(rows))
    got = device.run([x.numpy() for x in inputs])
    codes = {v: torch.from_numpy(got[k]) for v in rows if (k := says.codes.format(v)) in got}
    free = simulate(graph, plan, inputs, platform, kernels=says.kernels)
    forced = simulate(graph, plan, inputs, platform, force=codes, kernels=says.kernels)
    for v, row in rows.items():
        if v not in codes or v not in free:
            continue
        q = codes[v].to(torch.int64)
        row.elements += q.numel()
        d, e = (free[v].to(torch.int64) - q).abs(), (forced[v].to(torch.int64) - q).abs()
        row.differing += int((d > 0).sum())
        row.op_differing += int((e > 0).sum())
        if q.numel():
            row.largest, row.op_largest = max(row.largest, int(d.max())), max(row.op_largest, int(e.max()))
        t = plan.tensors[v]
        assert t.scale is not None and t.zero_point is not None
        x = reals[v].double()
        row.signal += float(x.square().sum())
        row.noise += float((x - (q - t.zero_point).double() * t.scale.double()).square().sum())
    first = graph.outputs[0]
    device_out = torch.from_numpy(next(iter(got.values())))

    def as_real(v: Any) -> torch.Tensor:
        t = plan.tensors.get(first)
        return (
            (v.to(torch.int64) - t.zero_point) * t.scale
            if t is not None and t.quantized and not v.is_floating_point()
            else v
        )  # type: ignore[operator]

    integer_out = as_real(free[first]) if first in free else device_out
    if device_out.shape == integer_out.shape and device_out.is_floating_point():
        out.output_gap = max(
            out.output_gap, float((device_out - integer_out).abs().max()) if device_out.numel() else 0.0
        )
    results = {"float": reals[first], "integer": integer_out, "device": device_out}
    run_flat: Any = getattr(model, "run_flat", None)  # modules that chipfit made have it
    if run_flat is not None:
        results["simulated"] = run_flat(inputs)[0]
    return results
