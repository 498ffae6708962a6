"""Similarity of the quantized network to the float one, kernel by kernel and at the outputs, on the user's data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chipfit.calibration.data import Batch, count_samples, empty_data_error
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
    outputs, layers = _Means(checked_metrics(metrics)), _Means(metrics)
    unequal, results = sized_by_data(graph), kernels(graph, plan)
    compared = {
        v: k for k, v in results.items() if v in reference.values and reference.is_float(v) and v not in unequal
    }
    lost = [k for k, v in results.items() if v not in compared]
    notes = [*notes, *([f"without a counterpart of its size in the float network: {', '.join(lost)}"] if lost else [])]
    on_device, float_on_device, rounding = placed(graph), placed(reference), rounded_once(graph, plan, {})
    with torch.inference_mode():
        for batch in batches:
            inputs, samples = inputs_on(graph.device, batch), count_samples(graph, batch)
            want = run(float_on_device, inputs, keep=list(compared))
            flow = QuantizedRun(on_device, plan, inputs, rounding=rounding)
            for node in flow.steps():
                for value in (o for o in node.outputs if o in compared):
                    got = plan[value].round(flow.env[value]) if plan.quantized(value) else flow.env[value]
                    layers.add(compared[value], want[value], got, samples)
            rounded = rounded_outputs(plan, flow.outputs)
            for name, value, float_value in zip(output_names(graph), graph.outputs, reference.outputs, strict=True):
                if graph.is_float(value) and value not in unequal:
                    outputs.add(name, want[float_value], rounded[value], samples)
    counts = [*outputs.samples.values(), *layers.samples.values()]
    if not counts:
        raise empty_data_error()
    return Similarity(outputs.means(), layers.means(), max(counts), {k: v for v, k in compared.items()}, tuple(notes))


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
    """Check whether an operator only moves numbers of its inputs."""
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


class _Means:
    """Means of metrics over batches, each weighted by its samples."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self._sums: dict[str, dict[str, float]] = {}  #: kernel or output -> metric -> sum over samples
        self.samples: dict[str, int] = {}  #: by kernel or output

    def add(self, name: str, want: Tensor, got: Tensor, samples: int) -> None:
        x, y = on_cpu([want, got.to(dtype=want.dtype)])
        sums = self._sums.setdefault(name, dict.fromkeys(self.metrics, 0.0))
        for metric, function in self.metrics.items():
            sums[metric] += samples * _number(metric, function, x, y, name)
        self.samples[name] = self.samples.get(name, 0) + samples

    def means(self) -> dict[str, dict[str, float]]:
        return {k: {m: v / self.samples[k] for m, v in row.items()} for k, row in self._sums.items()}


def _number(name: str, metric: Metric, x: Tensor, y: Tensor, of: str) -> float:
    """Return the metric of two values of a kernel or output.

    Raises:
        ConfigError: the user's function fails, or returns no number.
    """
    try:
        found = metric(x, y)
    except Exception as e:
        where = f"values {list(x.shape)} of '{of}'"
        raise ConfigError(f"Metric '{name}' fails: {short_message(e)}", where=where) from e
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not (is_number(found) or isinstance(found, float)):
        raise ConfigError(f"Metric '{name}' must return a number", got=type(found).__name__)
    return float(found)
