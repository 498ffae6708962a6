"""Similarity of the quantized network to the float one, kernel by kernel and at the outputs, on the user's data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chipfit.calibration.data import Batch, count_samples, no_data
from chipfit.engine.run import run
from chipfit.errors import ConfigError, check_known, short_message
from chipfit.export.io_spec import output_names
from chipfit.graph.data_sizes import sized_by_data
from chipfit.graph.ir import Graph, Node
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.plan.record import Plan
from chipfit.quantizers.noise import decibels
from chipfit.registry import is_number
from chipfit.rounding.compare import QuantizedRun, rounded_once, rounded_outputs
from chipfit.screen import Summary, SummaryRepr
from chipfit.screen.figures import BLUE, ORANGE, bars, drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: function from a float value and the quantized one, [N, ...] each with channels first, to a number
Metric = Callable[[Tensor, Tensor], float]


def mse(x: Tensor, y: Tensor) -> float:
    """Return the mean squared error."""
    return float((x.double() - y.double()).square().mean())


def cosine(x: Tensor, y: Tensor) -> float:
    """Return the cosine of the angle between two values as vectors: 1 if they are equal, or both 0."""
    a, b = x.double().flatten(), y.double().flatten()
    return 1.0 if a.equal(b) else float(a @ b / (a.norm() * b.norm()).clamp(min=1e-300))


def sqnr_db(x: Tensor, y: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio [dB]."""
    return decibels(float(x.double().square().mean()), mse(x, y))


METRICS: dict[str, Metric] = {"mse": mse, "cosine": cosine, "sqnr_db": sqnr_db}


@dataclass(frozen=True, repr=False)
class Similarity(SummaryRepr):
    """The similarity of a quantized network to the float one; a number is the mean over batches, by their samples."""

    outputs: dict[str, dict[str, float]]  #: output of the model -> metric -> number
    layers: dict[str, dict[str, float]]  #: kernel, by the layer of its first operator -> metric -> number
    samples: int
    values: dict[str, str] = field(default_factory=dict)  #: kernel -> the value of the graph that is its result
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        return list(next(iter([*self.outputs.values(), *self.layers.values()]), {}))

    def plot(self, path: str | Path | None = None, metric: str = "sqnr_db") -> "Figure":
        """Return a matplotlib figure of a metric of all kernels and outputs.

        Args:
            path: file to write as well, in a format that matplotlib writes.

        Raises:
            UnknownNameError: there is no such metric.
            ExportError: matplotlib is not installed, or the file cannot be written.
        """
        check_known("metric", metric, self.metrics)
        rows = [(name, row[metric], BLUE) for name, row in self.layers.items()]
        rows += [(f"output '{name}'", row[metric], ORANGE) for name, row in self.outputs.items()]
        return drawn(bars(rows, f"{metric}, mean of {self.samples} samples")[0], path)

    def write(self, to: Any, step: int = 0) -> None:
        """Write every number as a scalar, `similarity/<metric>/<layer>` or `similarity/<metric>/output/<name>`.

        Args:
            to: an object with `add_scalar(name, number, step)`, such as TensorBoard's `SummaryWriter`.
        """
        rows = [*self.layers.items(), *((f"output/{name}", row) for name, row in self.outputs.items())]
        for name, row in rows:
            for metric, number in row.items():
                to.add_scalar(f"similarity/{metric}/{name}", number, step)

    def _summary(self) -> Summary:
        def shown(name: str, row: Mapping[str, float]) -> tuple[str | float, ...]:
            return name, *(row[m] for m in self.metrics)

        rows = [*(shown(f"output {k}", v) for k, v in self.outputs.items())]
        rows += [shown(k, v) for k, v in self.layers.items()]
        title = f"Similarity to the float network on {self.samples} samples"
        facts = {"notes": "; ".join(self.notes), "next": "similarity.plot(path), .write(writer), .layers, .outputs"}
        return Summary(title, facts, ("layer", *self.metrics), rows, "similarity.layers")


def measure(
    reference: Graph,
    graph: Graph,
    plan: Plan,
    batches: Iterable[Batch],
    metrics: Mapping[str, Metric],
    notes: Iterable[str] = (),
) -> Similarity:
    """Run the float network and the quantized one on batches, and compare what each kernel and the model return.

    Args:
        reference: the float network; its values have the names of those of `graph`.
        graph, plan: the quantized network.
        metrics: functions of a float value and a quantized one, by name.

    Raises:
        DataError: there is no batch.
        ConfigError: a metric is not a function, fails, or returns no number.
    """
    asked, found = checked_metrics(metrics), kernels(graph, plan)
    unequal = sized_by_data(graph)
    known = {k: v for k, v in found.items() if reference.values.get(v) and reference.is_float(v)}
    known = {k: v for k, v in known.items() if v not in unequal}
    lost = [k for k in found if k not in known]
    notes = [*notes, *([f"without a counterpart of its size in the float network: {', '.join(lost)}"] if lost else [])]
    sums = _Sums(asked)
    there, float_there, rounding = placed(graph), placed(reference), rounded_once(graph, plan, {})
    with torch.inference_mode():
        for batch in batches:
            inputs = inputs_on(graph.device, batch)
            want = run(float_there, inputs, keep=list(known.values()))
            sums.weight = count_samples(graph, batch)
            flow, by_value = QuantizedRun(there, plan, inputs, rounding=rounding), {v: k for k, v in known.items()}
            for node in flow.steps():
                for value in (o for o in node.outputs if o in by_value):
                    got = flow.env[value]
                    sums.add(by_value[value], want[value], plan[value].round(got) if plan.quantized(value) else got)
            last = rounded_outputs(plan, flow.outputs)
            for name, mine, theirs in zip(output_names(graph), graph.outputs, reference.outputs, strict=True):
                if graph.is_float(mine) and mine not in unequal:
                    sums.add((name,), want[theirs], last[mine])
    if not sums.samples:
        raise no_data()
    ends = {k[0]: row for k, row in sums.means().items() if isinstance(k, tuple)}
    inner = {k: row for k, row in sums.means().items() if isinstance(k, str)}
    return Similarity(ends, inner, int(max(sums.samples.values())), known, tuple(notes))


def kernels(graph: Graph, plan: Plan) -> dict[str, str]:
    """Return the layer of the first operator of each kernel that computes -> the kernel's result."""
    groups = {name: g for g in plan.groups for name in g}
    by_name = {n.name: n for n in graph.nodes}
    out = dict[str, str]()
    for n in graph.nodes:
        group = groups.get(n.name, (n.name,))
        if n.name != group[-1] or not graph.activations(n) or not graph.is_float(n.output) or _moves(plan, n):
            continue
        label = by_name[group[0]].display_name
        out[label if label not in out else f"{label} ({n.name})"] = n.output
    return out


def _moves(plan: Plan, n: Node) -> bool:
    """Return whether an operator hands on numbers of its inputs as they are."""
    follows = n.name in plan.nodes and plan.nodes[n.name].exec == "follow"
    return follows or (n.facts.moves and not plan.quantized(n.output))


def checked_metrics(metrics: Mapping[str, Any]) -> Mapping[str, Metric]:
    """Return metrics by name.

    Raises:
        ConfigError: one is not a function.
    """
    wrong = next((k for k, f in metrics.items() if not callable(f)), None)
    if wrong is not None:
        what = f"Metric '{wrong}' must be a function of two tensors that returns a number"
        raise ConfigError(what, got=type(metrics[wrong]).__name__)
    return metrics


class _Sums:
    """Sums of metrics over batches, each weighted by its samples."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics, self.weight = metrics, 0
        self._sums: dict[Any, dict[str, float]] = {}
        self.samples: dict[Any, int] = {}  #: by kernel, or by (output,)

    def add(self, key: Any, want: Tensor, got: Tensor) -> None:
        x, y = on_cpu([want, got.to(dtype=want.dtype)])
        sums = self._sums.setdefault(key, dict.fromkeys(self.metrics, 0.0))
        for name, metric in self.metrics.items():
            sums[name] += self.weight * _number(name, metric, x, y, key)
        self.samples[key] = self.samples.get(key, 0) + self.weight

    def means(self) -> dict[Any, dict[str, float]]:
        return {k: {m: v / self.samples[k] for m, v in row.items()} for k, row in self._sums.items()}


def _number(name: str, metric: Metric, x: Tensor, y: Tensor, key: Any) -> float:
    """Return the metric of two values.

    Raises:
        ConfigError: the user's function fails, or returns no number.
    """
    try:
        found = metric(x, y)
    except Exception as e:
        where = f"values {list(x.shape)} of '{key[0] if isinstance(key, tuple) else key}'"
        raise ConfigError(f"Metric '{name}' fails: {short_message(e)}", where=where) from e
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not (is_number(found) or isinstance(found, float)):
        raise ConfigError(f"Metric '{name}' must return a number", got=type(found).__name__)
    return float(found)
