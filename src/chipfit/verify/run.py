"""Run the float network, the simulation and the device on the same inputs, and compare their tensors."""

import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chipfit.calibration.data import count_samples, count_splittable, fixed_batch_of, iterate, split_label
from chipfit.calibration.sample_fingerprints import SampleHashes
from chipfit.engine.opaque import draws
from chipfit.engine.run import run
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.errors import DataError, RuntimeUnavailable, first_line, raise_bug
from chipfit.export import FileTensor, export, format_of
from chipfit.export.io_spec import output_names
from chipfit.files import path_of
from chipfit.frameworks.quantized import original_of
from chipfit.graph.edit import live_values
from chipfit.graph.ir import CPU, DYNAMIC, OPAQUE, Graph
from chipfit.graph.joins import Joins
from chipfit.graph.placement import device_of, inputs_on
from chipfit.plan.record import Plan
from chipfit.plan.tables import with_integers
from chipfit.platform.schema import Platform
from chipfit.platform.support import features_with_other_results, simulates_arithmetic
from chipfit.quantizers.grids import Grid
from chipfit.registry import DeviceRuntime, entries, entry, require_libraries
from chipfit.rounding.outputs import output_labels
from chipfit.settings import END_TO_END_SAMPLES
from chipfit.simulate.device import float_operators, output
from chipfit.simulate.integer import float_results, is_pass_through, kernel_groups, profile_for, simulate
from chipfit.verify.comparisons import (
    OutputComparison,
    TensorComparison,
    by_tensor,
    compare_constant,
    dtype_name,
    not_comparable,
)
from chipfit.verify.verification import Verification

_DEFAULT_RUNTIME = "onnxruntime"  #: runtime of platforms that name none
Values = dict[str, Any]  #: tensors by name
_OTHER_FILE = "is this the file that was written for this model?"


def default_runtime(platform: Platform, suffix: str = "") -> str:
    """Return the runtime that the platform's files are for; if none loads files of this suffix, one that does."""
    loading = [name for name, e in entries("runtime").items() if suffix in ("", e.declares.suffix)]
    if not loading:
        known = ", ".join(sorted({e.declares.suffix for e in entries("runtime").values()}))
        raise RuntimeUnavailable("No runtime loads files with this suffix", got=suffix, allowed=known)
    preferred = [name for name in (*platform.runtimes, _DEFAULT_RUNTIME) if name in loading]
    return [*preferred, *loading, _DEFAULT_RUNTIME][0]


@torch_defaults()
def verify(
    graph: Graph,
    plan: Plan,
    platform: Platform,
    data: Any,
    *,
    runtime: str | None = None,
    path: str | Path | None = None,
    model: Callable[[], Any] | None = None,
    batches: int | None = None,
    end_to_end_samples: int | None = END_TO_END_SAMPLES,
) -> Verification:
    """Run everything on the same inputs and compare integer by integer, the file's own constants included.

    On all samples, every operator computes from the device's integers. On labelled samples and the first unlabelled
    ones, the float network and the end-to-end simulation run, too.

    Args:
        data: batches as for calibration; (input, label) pairs give accuracies too.
        runtime: a registered runtime; by default the platform's own, or one that loads `path`.
        path: the deployed file; exported to a temporary one when omitted.
        model: makes the fake-quantized module, whose accuracy is measured if the data have labels.
        batches: stop after this many.
        end_to_end_samples: number of unlabelled samples used for the float run and the end-to-end simulation; whole
            batches if the file has a fixed batch size; None: all.

    Raises:
        RuntimeUnavailable: the runtime is not installed, refuses the file or the inputs, or returns nothing that can be
            compared.
        DataError: no data.
    """
    given = None if path is None else path_of(path, RuntimeUnavailable)
    runtime = default_runtime(platform, "" if given is None else given.suffix) if runtime is None else runtime
    found = entry("runtime", runtime)
    require_libraries(found)
    quantized, chains = _compared_tensors(graph, plan)
    inner = {c[0]: c for c in chains}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = given or export(graph, plan, Path(folder) / f"model{found.declares.suffix}", platform)
        asked = dict.fromkeys([*(found.declares.codes.format(v) for v in quantized), *itertools.chain(*chains)])
        device = found.thing(file, [*asked])
        in_file = _constants_in(file, found.declares.suffix)
    out = Verification(runtime, runtime in platform.runtimes and simulates_arithmetic(platform))
    out.other_rule = bool(platform.math.requant) and not out.promised
    out.executed, out.not_modelled = dict(device.executed()), [*features_with_other_results(platform)]
    held = set(in_file or ())
    comparator = Comparator(graph, plan, platform, device, found.declares, model, out, held, end_to_end_samples, inner)
    comparator.list_tensors(quantized)
    if in_file is not None:
        comparator.compare_file(quantized, in_file)
    if hasattr(device, "warnings"):
        out.warnings += device.warnings(platform)
    with torch.inference_mode():
        for batch in itertools.islice(iterate(data, fixed_batch_of(graph)), batches):
            for part in comparator.parts(*split_label(batch, graph)):
                comparator.add(*part)
    if out.samples == 0:
        raise DataError("There are no data to verify on", hint="give at least one batch")
    out.warnings += _on_known_samples(out)
    drawn = ", ".join(repr(n.display_name) for n in graph.nodes if n.op == OPAQUE and draws(n.attrs["target"]))
    if drawn:
        out.warnings.append(f"what {drawn} draws differs in every run, and so does what follows: give it as an input")
    return out


def _on_known_samples(out: Verification) -> list[str]:
    """Return the warning that samples are those of the calibration."""
    if not out.calibrated:
        return []
    share = "all samples" if out.calibrated == out.samples else f"{out.calibrated} of the {out.samples} samples"
    return [f"{share} are calibration data: accuracy and noise on them are better than on new data"]


def _constants_in(file: Path, suffix: str) -> dict[str, FileTensor] | None:
    """Return the tensors that a file holds; None if its format has no reader."""
    read_back = format_of(suffix).declares.stored
    return None if read_back is None else dict(read_back(file))


def _compared_tensors(graph: Graph, plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Return the quantized inputs and results, and the float operands of dynamic kernels except inputs, as chains."""
    quantized = [v for v in (*graph.inputs, *(o for n in graph.nodes for o in n.outputs)) if plan.quantized(v)]
    read_in_float = (_with_moves(graph, n.data) for n in graph.nodes if n.op == DYNAMIC)
    chains = {c[0]: c for c in read_in_float if c[0] not in graph.inputs and not plan.quantized(c[0])}
    return quantized, [*chains.values()]


def _with_moves(graph: Graph, value: str) -> list[str]:
    """Return the chain of values that ends with this one, in which each is a transposed or reshaped predecessor.

    A file may have any one of them: writers add moves, and readers of files do. An input itself is not compared, but an
    operator of the file that reorders it is: its result has its own name.
    """
    made, chain = graph.producers(), [value]
    while chain[0] in made and made[chain[0]].op in ("Transpose", "Reshape"):
        chain.insert(0, made[chain[0]].data)
    return [value] if chain[0] in graph.inputs and original_of(value) == value else chain


def _with_float_biases(graph: Graph, plan: Plan) -> Graph:
    """Return a graph whose biases are float32: those that were read from a file are float64, to hold 32 bits.

    A sum of its own may add them, where they are weights.
    """
    wide = {k for k in plan.tensors if k in graph.weights and graph.weights[k].dtype == torch.float64}
    weights = {k: w.float() if k in wide else w for k, w in graph.weights.items()}
    return replace(graph, weights=weights) if wide else graph


@dataclass
class Comparator:
    """A comparison of simulation and device, batch after batch, whose results go to `out`."""

    graph: Graph
    plan: Plan
    platform: Platform
    device: Any
    declares: DeviceRuntime
    model: Callable[[], Any] | None
    out: Verification
    in_file: set[str] = field(default_factory=set)  #: tensors that the file is known to hold
    end_to_end_samples: int | None = None  #: see `verify`
    #: float operand of a dynamic kernel -> its name and those of the values that hold its numbers in another order
    dynamic_inputs: Mapping[str, list[str]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)  #: integers of weights
    hits: Counter[str] = field(default_factory=Counter)  #: right answers of each side
    #: returns what operators in float compute from the device's integers of a batch in float64
    in_double: Callable[[], Values] = dict

    def __post_init__(self) -> None:
        self.calibration = SampleHashes(self.plan.provenance.get("samples", ()))
        #: with weights as they were before tables rounded them, and biases in the type of the network
        self.of_user = _with_float_biases(self.graph, self.plan)
        self.graph, self.plan = with_integers(self.graph, self.plan)
        self.live = live_values(self.graph)
        in_pairs = getattr(self.device, "in_pairs", None)
        self.in_pairs = in_pairs is not None and in_pairs(self.platform)

    def list_tensors(self, quantized: Sequence[str]) -> None:
        """Enter all tensors that are to be compared, with the operators that the runtime computes in float."""
        graph, plan, out = self.graph, self.plan, self.out
        profile, makers = profile_for(self.platform, self.declares.kernels), graph.producers()
        in_float, float_ops = float_results(graph, plan, profile), float_operators(graph, plan, profile)
        for v in quantized:
            layer, op = (makers[v].display_name, makers[v].op) if v in makers else ("", "Input")
            ops = float_ops(v) if v in in_float else ()
            within = self._promised_difference(v, ops)
            out.rows.append(TensorComparison(v, layer, op, in_float=v in in_float, float_ops=ops, within=within))
        for name, v in zip(output_names(graph), graph.outputs, strict=True):
            stored = plan.stored(v)
            span = float(stored.scale.max()) * (stored.grid.qmax - stored.grid.qmin) if stored is not None else 0.0
            out.outputs.append(OutputComparison(name, v, () if span or v in graph.weights else float_ops(v), span))
        out.outputs += [OutputComparison(v, v, float_ops(v), inner=True) for v in self.dynamic_inputs]

    def _promised_difference(self, tensor: str, float_ops: Sequence[str]) -> int | None:
        """Return the largest difference that the runtime promises for the kernel of a tensor; see `DeviceRuntime`."""
        promised = self.declares.within
        if promised is None:
            return None
        kernel = next((g for g in kernel_groups(self.graph, self.plan) if tensor in g[-1].outputs), [])
        ops = [*(n.op for n in kernel if not n.facts.moves), *float_ops]
        return max((promised.get(op, promised["*"]) for op in ops), default=0)

    def compare_file(self, quantized: Sequence[str], in_file: Mapping[str, FileTensor]) -> None:
        """Compare scales and zero points in the file, and integers of weights, with the plan."""
        graph, plan = self.graph, self.plan
        read = dict.fromkeys(i for n in graph.nodes for i in n.inputs if i in graph.weights and plan.quantized(i))
        found = by_tensor({*plan.tensors, *graph.weights}, in_file)
        names = (*quantized, *read)
        self.out.held = [compare_constant(graph, plan, name, found.get(name, ()), self.weights) for name in names]

    def parts(self, inputs: list[Tensor], label: Tensor | None) -> list[tuple[list[Tensor], Tensor | None]]:
        """Cut a batch, if it may be cut, behind the last sample of the end-to-end simulation; parts are on the CPU."""
        inputs, label = inputs_on(CPU, inputs), None if label is None else label.cpu()
        cuts_itself = hasattr(self.device, "part")  # as some files do
        if label is not None or self.end_to_end_samples is None or cuts_itself:
            return [(inputs, label)]
        first = self.end_to_end_samples - self.out.end_to_end_samples
        if not 0 < first < count_splittable(self.graph, inputs):
            return [(inputs, label)]
        return [([x[:first] for x in inputs], None), ([x[first:] for x in inputs], None)]

    def add(self, inputs: list[Tensor], label: Tensor | None) -> None:
        """Run one batch everywhere and compare."""
        samples = count_samples(self.graph, inputs)
        limit = None if label is not None else self.end_to_end_samples
        end_to_end = limit is None or self.out.end_to_end_samples < limit
        self.out.samples += samples
        rows = max(next((len(x) for x in inputs if x.dim()), 1), 1)  # more or fewer than samples where steps come first
        self.out.calibrated += samples * self.calibration.count_known(inputs) // rows
        try:
            got = self._run([x.numpy() for x in inputs])
        except RuntimeUnavailable:
            self._simulated(inputs, keep=())  # raises if no network could run on these inputs
            raise
        for o in (o for o in self.out.outputs if o.inner and o.tensor not in got):
            o.name = o.tensor = next((v for v in self.dynamic_inputs.get(o.tensor, ()) if v in got), o.tensor)
        floats_before: Values | None = {} if end_to_end else None
        simulated = self._simulated(inputs, floats=floats_before) if end_to_end else None
        floats = {o.tensor: got[o.tensor] for o in self.out.outputs if o.inner and o.tensor in got}
        codes, from_device = self._compare_tensors(inputs, got, floats, floats_before, simulated)
        if self.out.rows and not codes:
            what = f"'{self.out.runtime}' returned none of the {len(self.out.rows)} tensors that were requested"
            raise RuntimeUnavailable(what, got=", ".join(list(got)[:8]) or "nothing", hint=_OTHER_FILE)
        returned = list(got.values())
        self._compare_outputs(returned, from_device | codes, simulated, floats)
        if simulated is not None:
            self.out.end_to_end_samples += samples
            self._compare_end_to_end(inputs, label, codes, simulated, returned[0])

    def _compare_tensors(
        self, inputs: list[Tensor], got: Values, floats: Values, floats_before: Values | None, simulated: Values | None
    ) -> tuple[Values, Values]:
        """Compare each operator by itself; return the device's integers and what the operators compute from them."""
        given = {r.tensor: got.get(self.declares.codes.format(r.tensor)) for r in self.out.rows}
        types = {v: storage_type(self.plan[v].grid) for v in given}
        codes = {
            v: q.int() if q.dtype == torch.uint16 else q  # torch does not compute with that type
            for v, q in given.items()
            if q is not None and dtype_name(q) == types[v]
        }
        remaining = {r.tensor: r for r in self.out.rows}

        def compare(name: str, own: Any, unrounded: Any) -> None:
            row = remaining.pop(name, None)
            if row is None:
                return
            q, row.why = given[name], ""
            if q is None:
                self._count_missing(row, own.numel())
            elif wrong := not_comparable(q, own, types[name]):
                row.why, row.wrong = "of another shape or type", wrong
            else:
                row.why = "" if q.numel() or row.elements else "empty"
                before = unrounded if row.float_ops else None
                row.add(codes[name], own, self.plan[name], before, functools.partial(self._in_double, name))
                return
            codes.pop(name, None)

        results = functools.partial(
            self._simulated, inputs, force=codes | floats, keep=[o.tensor for o in self.out.outputs]
        )
        self.in_double = functools.cache(lambda: results(in_double=True, floats=(found := Values())) | found)
        from_device = results(floats=floats_before, like=simulated, each=compare)
        for row in remaining.values():
            row.why = "inside a fused kernel"
            codes.pop(row.tensor, None)
        return codes, from_device

    def _compare_outputs(
        self, returned: Sequence[Tensor], from_device: Values, simulated: Values | None, floats: Values
    ) -> None:
        """Compare the outputs, and the float inputs of dynamic kernels."""
        for k, o in enumerate(self.out.outputs):
            want = output(self.graph, self.plan, from_device, o.tensor)
            device = returned[k] if not o.inner and k < len(returned) else floats.get(o.tensor)
            if o.inner and device is not None:
                device = device.reshape(want.shape) if device.numel() == want.numel() else None
            own = None if simulated is None else output(self.graph, self.plan, simulated, o.tensor)
            o.add(device, want, own, functools.partial(self._in_double, o.tensor))

    def _compare_end_to_end(
        self, inputs: list[Tensor], label: Tensor | None, codes: Values, simulated: Values, device: Tensor
    ) -> None:
        """Compare with the float network and the end-to-end simulation; `device` is the device's first output."""
        floats, joins, outputs = run(self.of_user, inputs, keep=list(codes)), Joins(self.graph), {*self.graph.outputs}
        for row in (r for r in self.out.rows if r.tensor in codes):
            name = row.tensor
            labels = output_labels(joins, name, floats[name]) if name in outputs else None
            row.add_end_to_end(codes[name], simulated[name], floats[name], self.plan[name], labels)
        first = floats[self.graph.outputs[0]]
        if label is not None and first.dim() == 2 and label.shape[:1] == first.shape[:1]:
            own = output(self.graph, self.plan, simulated, self.graph.outputs[0])
            found = {"float": first, "integer": own, "device": device}
            self._count_hits(inputs, label, {k: y for k, y in found.items() if y.shape == first.shape})
        if label is not None:
            self._check_labels(label, first)

    def _check_labels(self, label: Tensor, first: Tensor) -> None:
        """Add a warning about labels that are not classes of the first output."""
        shapes = f"labels {list(label.shape)}, first output {list(first.shape)}"
        if first.dim() != 2 or label.shape[:1] != first.shape[:1]:
            text = f"accuracy is not measured: the labels are not one class for each row of scores ({shapes})"
        elif label.numel() and not 0 <= float(label.min()) <= float(label.max()) < first.shape[1]:
            text = f"label {label.max():g} is none of the {first.shape[1]} classes of the first output"
        else:
            return
        if text not in self.out.warnings:
            self.out.warnings.append(text)

    def _run(self, inputs: list[np.ndarray]) -> dict[str, Tensor]:
        """Return the device's outputs, in the model's order, and then its integers, by name."""
        try:
            results = self.device.run(inputs)
        except Exception as e:  # the errors of runtimes share no base
            raise_bug(e)
            what = f"'{self.out.runtime}' cannot run the file on these inputs: {first_line(e)}"
            raise RuntimeUnavailable(what, hint=_OTHER_FILE) from e
        small = {k: np.asarray(x) for k, x in results.items()}  # numpy has no type of 4 bits, nor has torch
        return {k: torch.from_numpy(x.astype(np.int8) if "int4" in x.dtype.name else x) for k, x in small.items()}

    def _in_double(self, name: str) -> Tensor:
        found: Tensor = self.in_double()[name]
        return found

    def _simulated(self, inputs: list[Tensor], **how: Any) -> dict[str, Any]:
        how |= {"kernels": self.declares.kernels, "weights": self.weights, "part": getattr(self.device, "part", None)}
        how["in_pairs"] = self.in_pairs
        return simulate(self.graph, self.plan, inputs, self.platform, **how)

    def _count_missing(self, row: TensorComparison, count: int) -> None:
        """Count a tensor that the device did not return: it may have elided only pass-through operators."""
        maker = self.graph.producers().get(row.tensor)
        planned = None if maker is None else self.plan.nodes.get(maker.name)
        may_elide = maker is not None and planned is not None and (planned.exec == "follow" or is_pass_through(maker))
        row.missed += count
        if row.tensor in self.live and (row.tensor in self.in_file or not may_elide):
            row.why, row.wrong = "missing from its results", "it is missing from the device's results"
        else:
            row.why = "elided by the runtime" if row.tensor in self.live else "without use for any output"

    def _count_hits(self, inputs: list[Tensor], label: Tensor, results: dict[str, Tensor]) -> None:
        """Count right answers by the label, those of the fake-quantized module too."""
        model = self.model and self.model()
        run_flat: Any = getattr(model, "run_flat", None)  # modules that chipfit made have it
        if run_flat is not None:
            results["simulated"] = run_flat(inputs_on(device_of(model), inputs))[0].cpu()
        self.out.labelled += label.shape[0]
        if not self.out.labelled:  # a batch without samples
            return
        self.hits.update({k: int((y.argmax(1) == label.reshape(-1)).sum()) for k, y in results.items()})
        self.out.accuracy = {k: right / self.out.labelled for k, right in self.hits.items()}


def storage_type(grid: Grid) -> str:
    """Return the type in which a runtime returns the integers of a grid."""
    return f"{'int' if grid.signed or grid.bits > 16 else 'uint'}{max(8, grid.file_bits)}"
