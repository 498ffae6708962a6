"""The proof: float, fake-quantized, integer and device side by side, tensor by tensor."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chipfit.calibration.data import divisible, iterate, split_label
from chipfit.calibration.sample_fingerprints import SampleHashes
from chipfit.engine.run import run
from chipfit.errors import DataError, RuntimeUnavailable, VerificationError, first_line, raised_outside_chipfit
from chipfit.export import FileTensor, export, format_of
from chipfit.export.names import output_names
from chipfit.files import path_of
from chipfit.graph.edit import live_values
from chipfit.graph.ir import DYNAMIC, Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.platform.support import simulates_arithmetic, unsupported_features
from chipfit.quantizers.stored import Stored
from chipfit.registry import DeviceRuntime, entries, entry, require
from chipfit.screen import Summary, SummaryRepr
from chipfit.simulate.device import float_operators, output
from chipfit.simulate.integer import float_results, profile_for, simulate

_USUAL = "onnxruntime"  #: runtime of platforms that name none
#: Samples without labels on which the float network runs, and the simulation on its own results. Whether each operator,
#: given the device's inputs, computes the device's integers is compared on all: where none departs, no integer differs
MAX_SIMULATED_SAMPLES = 16
#: Where the runtime computes in float, the last bit of a sum is its own, and decides where a real lies half way between
#: two codes. Given the device's inputs an integer may then differ, by one code, if its real lies that near to half way:
#: the error of float32 operators, relative to the span of the codes
BORDER = 2.0**-16
#: and of those that do not lie half way to a `TIE`th of a code, no more than this share, or one integer. Interpolations
#: of codes often lie half way: one in 50 differed on ONNX Runtime. Of others one in 2,000 of 16 bits, none of 8 bits
FLOAT_SHARE, TIE = 0.01, 512
#: Largest gap of an output that float operators compute, given the device's codes, relative to its largest number:
#: some hundred units in the last place, as sums of a few thousand float32 numbers have
OUTPUT_GAP = 1e-4
#: The same of an output that only dequantizes codes, relative to the reals that these span: some kernels compute
#: q s - z s, with a rounding more than (q - z) s
DEQUANTIZED_GAP = 2.0**-22


@dataclass
class TensorComparison:
    """One quantized tensor: simulator against device, and against the float network."""

    tensor: str
    layer: str
    op: str
    elements: int = 0  #: integers compared, the operator reading the device's own codes
    differing: int = 0  #: of `freely`: integers that differ, each side running on its own results
    largest: int = 0  #: largest difference of these [codes]
    op_differing: int = 0  #: of `elements`: integers that differ
    op_largest: int = 0
    freely: int = 0  #: integers compared on samples on which the simulation also ran on its own results
    ties: int = 0  #: of an operator in float: differing integers whose reals lie half way between two codes
    astray: int = 0  #: likewise, those whose reals are not near to half way
    in_float: bool = False  #: the runtime computes this operator in float
    #: operators that it computes in float since it last read codes, those that only move numbers aside
    float_ops: tuple[str, ...] = ()
    why: str = ""  #: why nothing of it was compared
    missed: int = 0  #: integers that were not compared for that reason
    wrong: str = ""  #: what should not be, besides integers that differ
    signal: float = 0.0  #: sum of squares of the float tensor
    noise: float = 0.0  #: sum of squares of its error on the device

    def add(self, device: Tensor, alone: Tensor, stored: Stored, before: Tensor | None = None) -> None:
        """Count one batch of the operator by itself.

        Args:
            device: the runtime's codes.
            alone: those that the operator computes from the runtime's codes.
            stored: how the tensor is stored.
            before: where the operator runs in float: what it computes from the runtime's codes, not yet quantized.
        """
        off = _differing(alone, device)
        self.elements += device.numel()
        self.op_differing += len(off)
        self.op_largest = max(self.op_largest, _gap(alone, device, off))
        if before is not None and len(off):
            place = before.flatten()[off].double() / stored.scale.double()
            off_half = (place - place.floor() - 0.5).abs()
            self.ties += int((off_half <= 1 / TIE).sum())
            near = off_half <= max(BORDER * (stored.grid.qmax - stored.grid.qmin), 1 / TIE)
            self.astray += int((~near).sum())

    def add_free(self, device: Tensor, free: Tensor, reals: Tensor, stored: Stored) -> None:
        """Count one batch on which each side runs on its own results: the codes of both, and the float network's."""
        off = _differing(free, device)
        self.freely += device.numel()
        self.differing += len(off)
        self.largest = max(self.largest, _gap(free, device, off))
        self.signal += _energy(reals)
        self.noise += _energy(reals - stored.dequantize(device))

    @property
    def fraction(self) -> float:
        """Share of integers that differ, each side running on its own results."""
        return self.differing / self.freely if self.freely else 0.0

    @property
    def allowed(self) -> int:
        """How many of its integers may differ, by one code, given the device's inputs."""
        return self.ties + max(1, int(FLOAT_SHARE * self.elements)) if self.float_ops else 0

    @property
    def fault(self) -> str:
        """What should not be; "" when all is well."""
        if self.astray or self.op_differing > self.allowed or self.op_largest > min(self.allowed, 1):
            found = f"{self.op_differing} of {self.elements} integers differ by up to {self.op_largest}"
            how = f" by 1, half way between two codes; {self.astray} lie elsewhere" if self.allowed else ""
            return f"{found} given the device's inputs, {self.allowed} may{how}"
        return self.wrong

    @property
    def who(self) -> str:
        return f"{self.op} '{self.layer or self.tensor}'"

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio [dB]; infinite without noise."""
        if self.noise == 0:
            return float("inf")
        return float(10 * np.log10(max(self.signal, 1e-300) / self.noise))


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Where codes differ, [count], as places in the flattened tensors."""
    return torch.from_numpy(np.flatnonzero((a != b).numpy()))  # several times as fast as torch's for few of many


def _gap(a: Tensor, b: Tensor, where: Tensor) -> int:
    """The largest difference of codes, given where they differ."""
    return int((a.flatten()[where].long() - b.flatten()[where].long()).abs().max()) if len(where) else 0


def _apart(a: Tensor, b: Tensor) -> tuple[int, float]:
    """How many numbers differ, and by how much at most; infinities and NaN that both have do not, NaN is infinite."""
    if a.is_floating_point() and a.numel():
        off = (a - b).abs_()  # 0 where they are equal alone; of near numbers exact
        if bool((top := off.max()).isfinite()):
            return int(off.count_nonzero()), float(top)
    where = _differing(a, b)
    x, y = (v.flatten()[where].double() for v in (a, b))
    off = (x - y).abs()[~(x.isnan() & y.isnan())]
    return len(off), float(off.nan_to_num(np.inf).max()) if len(off) else 0.0


def _energy(x: Tensor) -> float:
    """The sum of squares: of some 2^20 numbers at a time in their own precision, the parts in double precision."""
    return sum(float(torch.dot(part, part)) for part in x.flatten().split(1 << 20))


@dataclass
class OutputComparison:
    """Floats that the device hands over, as its outputs or inside, against the simulation."""

    name: str
    tensor: str
    float_ops: tuple[str, ...] = ()  #: operators that the runtime computes in float since it last read codes
    span: float = 0.0  #: of the reals that its codes stand for; 0 when it is not stored in codes
    elements: int = 0
    differing: int = 0  #: numbers that are not the simulation's, bit for bit, given the device's codes
    gap: float = 0.0  #: largest difference from the simulation, each side running on its own results
    op_gap: float = 0.0  #: the same given the device's codes, relative to the span of its codes or its largest number
    wrong: str = ""  #: what should not be, besides numbers that differ
    inner: bool = False  #: no output of the model: floats that the next kernel rounds to a range of the moment

    def add(self, device: Tensor | None, alone: Tensor, free: Tensor | None = None) -> None:
        """Count one batch: the device's numbers, the simulation's given the device's codes, and on its own results."""
        self.wrong = self.wrong or _misshapen(device, alone, {_kind(alone)})
        if self.wrong or device is None or not device.numel():
            return
        differing, gap = _apart(device, alone)
        self.elements += device.numel()
        self.differing += differing
        if free is not None:
            self.gap = max(self.gap, _apart(device, free)[1])
        if differing:
            size = self.span or max(float(alone.float().abs().nan_to_num(0.0, 0.0).max()), 1e-30)
            self.op_gap = max(self.op_gap, gap / size)
        self._real = alone.is_floating_point()

    _real: bool = field(default=True, repr=False)

    @property
    def fault(self) -> str:
        """What should not be; "" when all is well."""
        few = self.differing <= FLOAT_SHARE * self.elements if self.float_ops else not self.differing
        if self._real:
            few = self.op_gap <= (OUTPUT_GAP if self.float_ops else DEQUANTIZED_GAP)
        if not few:
            share = f"{self.differing} of {self.elements} numbers are not the simulation's given the device's codes"
            return f"{share}; largest relative gap {self.op_gap:.2g}"
        return self.wrong


@dataclass
class ConstantComparison:
    """A tensor in the file, against the plan: its scales and zero points, and the codes of weights and biases."""

    tensor: str
    role: str  #: "activation", "weight" or "bias"
    elements: int = 0  #: codes compared
    differing: int = 0
    why: str = ""  #: why nothing of it was compared
    wrong: str = ""

    @property
    def fault(self) -> str:
        """What should not be; "" when all is well."""
        return f"{self.differing} of its {self.elements} codes are not the plan's" if self.differing else self.wrong


@dataclass(repr=False)
class Verification(SummaryRepr):
    """What `verify` found."""

    runtime: str
    promised: bool  #: this runtime's arithmetic is a verified profile of this platform
    samples: int = 0
    freely: int = 0  #: of these, the first, on which the float network ran and the simulation on its own results
    rows: list[TensorComparison] = field(default_factory=list)  #: every quantized tensor of the plan, compared or not
    executed: dict[str, int] = field(default_factory=dict)  #: operator kinds that the runtime ran, with counts
    accuracy: dict[str, float] = field(default_factory=dict)  #: top-1 of float, simulated, integer, device
    warnings: list[str] = field(default_factory=list)
    outputs: list[OutputComparison] = field(default_factory=list)
    held: list[ConstantComparison] = field(
        default_factory=list
    )  #: the same tensors, weights and biases, as the file stores them
    labelled: int = 0  #: samples that the accuracies are taken from
    calibrated: int = 0  #: samples that are known to be calibration data
    not_modelled: list[str] = field(default_factory=list)  #: what the platform states and no simulation computes

    @property
    def compared(self) -> list[TensorComparison]:
        """Tensors of which something was compared."""
        return [r for r in self.rows if not r.why]

    @property
    def not_compared(self) -> dict[str, int]:
        """Reason -> number of tensors of which nothing was compared."""
        return dict(Counter(r.why for r in self.rows if r.why))

    @property
    def integers(self) -> int:
        return sum(r.elements for r in self.rows)

    @property
    def differing(self) -> int:
        return sum(r.differing for r in self.rows)

    @property
    def out_of(self) -> int:
        """Of how many integers `differing` do: all, where none differs given the device's inputs."""
        alike = not any(r.differing or r.op_differing for r in self.rows)
        return self.integers if alike else sum(r.freely for r in self.rows)

    @property
    def exact_share(self) -> float:
        """Share of all integers, those not compared included, of which none may differ given the device's inputs."""
        strict = sum(r.elements for r in self.rows if not r.allowed and not r.fault)
        return strict / max(1, sum(r.elements + r.missed for r in self.rows))

    @property
    def output_gap(self) -> float:
        """Largest difference between outputs of the device and of the integer simulation."""
        return max((o.gap for o in self.outputs if not o.inner), default=0.0)

    @property
    def file_departures(self) -> list[str]:
        """Where the file is not what the plan says, or its runtime does not give what it holds."""
        wrong = [f"{h.role} '{h.tensor}' in the file: {h.fault}" for h in self.held if h.fault]
        return wrong + [f"{r.who}: {r.wrong}" for r in self.rows if r.wrong]

    @property
    def departures(self) -> list[str]:
        """All that should not be, in a sentence each: first what the file holds, then tensors in execution order."""
        rows = [f"{r.who}: {r.fault}" for r in self.rows if r.fault and not r.wrong]
        outputs = [f"{'float' if o.inner else 'output'} '{o.name}': {o.fault}" for o in self.outputs if o.fault]
        return [*self.file_departures, *rows, *outputs]

    @property
    def exact(self) -> bool:
        """Not one integer of any tensor differs, and the file and its outputs are those of the plan.

        On samples on which the simulation did not run on its own results, it follows: each operator computes the
        device's integers from the device's, the first from the inputs.
        """
        return self.sound and self.differing == 0 and not any(r.op_differing for r in self.rows)

    @property
    def sound(self) -> bool:
        """Every operator, given the device's inputs, computes the device's integers, but for `BORDER` in float."""
        return self.checked and not self.departures

    @property
    def checked(self) -> bool:
        """Integers were compared: of tensors, or of the weights in the file where nothing else is stored in codes."""
        return self.integers > 0 if self.rows else any(h.elements for h in self.held)

    @property
    def verdict(self) -> str:
        """What was found, in a word.

        "exact"; "sound"; "departs": the file is not the plan's, or a runtime that was promised to computes something
        else; "unpromised": so does one whose arithmetic is not this platform's.
        """
        if self.sound:
            return "exact" if self.exact else "sound"
        return "departs" if self.promised or self.file_departures else "unpromised"

    @property
    def first_difference(self) -> TensorComparison | None:
        """The first tensor, in execution order, that departs."""
        return next((r for r in self.rows if r.differing or r.op_differing or r.wrong), None)

    @property
    def float_operators(self) -> list[str]:
        """Layers that the runtime itself computes in float."""
        return [r.who for r in self.rows if r.in_float]

    @property
    def float_ops(self) -> set[str]:
        """Canonical operators that the runtime computes in float, before codes or an output."""
        ends: list[TensorComparison | OutputComparison] = [*self.rows, *self.outputs]
        return {op for x in ends for op in x.float_ops}

    def require(self, float_ops: Collection[str] = ()) -> Verification:
        """Nothing departs, and no operator but those named here runs in float.

        Args:
            float_ops: operators that may run in float between codes, or between codes and an output.

        Raises:
            VerificationError: something departs, or another operator runs in float; lists all that do.
        """
        others = [f"{op} runs in float" for op in sorted(self.float_ops.difference(float_ops))]
        found = [*self.departures, *others] or ([] if self.checked else ["nothing was compared"])
        if found:
            got = "; ".join(found[:8]) + (f"; and {len(found) - 8} more" if len(found) > 8 else "")
            allowed = f"in float: {', '.join(sorted(float_ops)) or 'nothing'}; elsewhere no difference"
            what = f"{self.runtime} is not what the plan says: {found[0]}"
            hint = "name operators that the runtime computes in float; "
            hint += "anything else is a fault of file, runtime or simulation"
            raise VerificationError(what, got=got, allowed=allowed, hint=hint)
        return self

    def coverage(self) -> str:
        """How much was compared, in a line: "compared 279 of 281 tensors, 2 elided by the runtime"."""
        more = "".join(f", {n} {why}" for why, n in self.not_compared.items())
        line = f"compared {len(self.compared)} of {len(self.rows)} tensors{more}"
        constants = [h for h in self.held if h.role != "activation"]
        right = sum(not h.fault and not h.why for h in constants)
        line += f"; {right} of {len(constants)} weights and biases read back from the file" if constants else ""
        inner = [not o.fault for o in self.outputs if o.inner]
        line += f"; {sum(inner)} of {len(inner)} floats as kernels round them each time" if inner else ""
        return f"{line}; {100 * self.exact_share:.2f} % of all integers compared at 0" if self.rows else line

    def summary(self) -> str:
        """A few lines for a person."""
        few = self.out_of < self.integers
        over = f"the first {self.freely} of {self.samples} samples" if few else f"{self.samples} samples"
        found = f"{self.differing} of {self.out_of} integers differ" if self.rows else "no value is stored in codes"
        lines = [f"{self.runtime}: {found} over {over}"]
        lines.append(self.coverage())
        if self.departures:
            more = len(self.departures) - 1
            lines.append(f"departs: {self.departures[0]}{f'; and {more} more' if more else ''}")
        first = self.first_difference
        if first is not None:
            how = ", computed in float by the runtime" if first.in_float else ""
            share = f"{100 * first.fraction:.4f} % of its integers, at most {first.largest}{how}"
            lines.append(f"first difference: {first.who}, {share}")
            alone, worst = sum(r.op_differing for r in self.rows), max(r.op_largest for r in self.rows)
            each = f"{alone} of {self.integers} differ over {self.samples} samples, largest difference {worst}"
            lines.append(f"each operator by itself, given the device's inputs: {each}")
        shown, more = self.float_operators[:6], len(self.float_operators) - 6
        if shown:
            others = f" and {more} more" if more > 0 else ""
            lines.append(f"computed in float by the runtime: {', '.join(shown)}{others}")
        if self.not_modelled:
            words = [line.partition(":")[0] for line in self.not_modelled]
            lines.append(f"said by the platform, not modelled: {', '.join(words[:4])}{', ...' if words[4:] else ''}")
        if self.accuracy:
            found = ", ".join(f"{k} {100 * v:.2f} %" for k, v in self.accuracy.items())
            lines.append(f"top-1 of {self.labelled} samples: {found}")
        return "\n".join(lines + self.warnings)

    def _summary(self) -> Summary:
        found, coverage, *more = self.summary().splitlines()
        facts = {"integers": found, "coverage": coverage, "and": "; ".join(more)}
        order = sorted(self.rows, key=lambda r: (not r.fault, -r.differing, -r.op_differing, r.why != ""))
        rows = [(r.tensor, r.op, r.elements, r.differing, r.largest, r.op_differing, r.fault or r.why) for r in order]
        header = ("tensor", "operator", "integers", "differ", "by", "alone", "note")
        return Summary(f"Verification on {self.runtime}: {self.verdict}", facts, header, rows, "verification.rows")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        out = asdict(self)
        names = "exact sound verdict integers differing exact_share output_gap departures not_compared"
        out.update({name: getattr(self, name) for name in names.split()}, among=self.out_of, coverage=self.coverage())
        for d, r in zip(out["rows"], self.rows, strict=True):
            d.update(sqnr_db=r.sqnr_db if np.isfinite(r.sqnr_db) else None, fault=r.fault)
        for d, o in zip(out["outputs"], self.outputs, strict=True):
            d.update(fault=o.fault)
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
    model: Callable[[], Any] | None = None,
    batches: int | None = None,
    freely: int | None = MAX_SIMULATED_SAMPLES,
) -> Verification:
    """Run everything on the same inputs and compare integer by integer, the file's own constants included.

    On all samples, every operator computes from the device's codes. On labelled ones and the first of others, the
    float network runs, too, and the simulation on its own results.

    Args:
        data: batches as for calibration; (input, label) pairs give accuracies too.
        runtime: a registered runtime; by default the platform's own, or one that loads `path`.
        path: the deployed file; exported to a temporary one when omitted.
        model: makes the fake-quantized module, where data have labels: for its accuracy.
        batches: stop after this many.
        freely: samples without labels on which the float network and the simulation on its own results run; whole
            batches where their size is fixed; None: all.

    Raises:
        RuntimeUnavailable: the runtime is not installed, refuses the file or the inputs, or returns nothing that can be
            compared.
        DataError: no data.
    """
    given = None if path is None else path_of(path, RuntimeUnavailable)
    runtime = own_runtime(platform, "" if given is None else given.suffix) if runtime is None else runtime
    found = entry("runtime", runtime)
    require(found)
    quantized = [v for v in (*graph.inputs, *(o for n in graph.nodes for o in n.outputs)) if plan.quantized(v)]
    #: floats that kernels round to a range of the moment
    rounded = (n.data for n in graph.nodes if n.op == DYNAMIC)
    moment = dict.fromkeys(v for v in rounded if v not in graph.inputs and not plan.quantized(v))
    with tempfile.TemporaryDirectory() as folder:
        suffix = found.declares.suffix
        file = given or export(graph, plan, Path(folder) / f"model{suffix}", platform)
        device = found.thing(file, [*(found.declares.codes.format(v) for v in quantized), *moment])
        stored = format_of(suffix).declares.stored
        held = stored(file) if stored is not None else None
    promised = runtime in platform.runtimes and simulates_arithmetic(platform)
    out = Verification(runtime, promised, executed=dict(device.executed()))
    out.not_modelled = [*unsupported_features(platform)]
    profile = profile_for(platform, found.declares.kernels)
    in_float, makers = float_results(graph, plan, profile), graph.producers()
    behind = float_operators(graph, plan, profile)
    for v in quantized:
        layer, op = (makers[v].layer, makers[v].op) if v in makers else ("", "Input")
        out.rows.append(
            TensorComparison(v, layer, op, in_float=v in in_float, float_ops=behind(v) if v in in_float else ())
        )
    for name, v in zip(output_names(graph), graph.outputs, strict=True):
        codes = plan.stored(v)
        span = float(codes.scale.max()) * (codes.grid.qmax - codes.grid.qmin) if codes is not None else 0.0
        out.outputs.append(OutputComparison(name, v, () if span or v in graph.weights else behind(v), span))
    out.outputs += [OutputComparison(v, v, behind(v), inner=True) for v in moment]
    weights: dict[str, Tensor] = {}
    if held is not None:
        read = dict.fromkeys(i for n in graph.nodes for i in n.inputs if i in graph.weights and plan.quantized(i))
        by_tensor = _by_tensor({*plan.tensors, *graph.weights}, held)
        out.held = [_held(graph, plan, name, by_tensor.get(name, ()), weights) for name in (*quantized, *read)]
    if hasattr(device, "warnings"):
        out.warnings += device.warnings(platform)
    comparison = Comparator(graph, plan, platform, device, found.declares, model, out, set(held or ()), weights, freely)
    with torch.inference_mode():
        for k, batch in enumerate(iterate(data)):
            if batches is not None and k >= batches:
                break
            for part in comparison.parts(*split_label(batch, graph)):
                comparison.add(*part)
    if out.samples == 0:
        raise DataError("There are no data to verify on", hint="give at least one batch")
    if out.calibrated:
        found_among = f"{out.calibrated} of the {out.samples} samples are calibration data"
        out.warnings.append(f"{found_among}: accuracy and noise on them are better than on new data")
    return out


@dataclass
class Comparator:
    """Simulation and device side by side, batch after batch; what is found goes to `out`."""

    graph: Graph
    plan: Plan
    platform: Platform
    device: Any
    declares: DeviceRuntime
    model: Callable[[], Any] | None
    out: Verification
    filed: set[str]  #: tensors that the file is known to hold
    weights: dict[str, Tensor]  #: their codes
    freely: int | None = None  #: see `verify`
    hits: Counter[str] = field(default_factory=Counter)  #: right answers of each side

    def __post_init__(self) -> None:
        self.seen = SampleHashes.of(self.plan.provenance)
        self.live = live_values(self.graph)

    def parts(self, inputs: list[Tensor], label: Tensor | None) -> list[tuple[list[Tensor], Tensor | None]]:
        """A batch; where it may be cut, apart from the rest what still is to run on its own results."""
        first = (self.freely or 0) - self.out.freely
        whole = label is not None or hasattr(self.device, "part")  # a file of a fixed batch cuts it itself
        if whole or not 0 < first < divisible(self.graph, inputs):
            return [(inputs, label)]
        return [([x[:first] for x in inputs], None), ([x[first:] for x in inputs], None)]

    def add(self, inputs: list[Tensor], label: Tensor | None) -> None:
        """Run one batch everywhere and compare."""
        samples = inputs[0].shape[0] if inputs and inputs[0].dim() else 1
        freely = label is not None or self.freely is None or self.out.freely < self.freely
        self.out.samples += samples
        self.out.calibrated += self.seen.count_known(inputs)
        try:
            got = self._run([x.numpy() for x in inputs])
        except RuntimeUnavailable:
            self._simulated(inputs, keep=())  # what no network takes is refused as that
            raise
        before: dict[str, Any] | None = {} if freely else None
        free = self._simulated(inputs, floats=before) if freely else None
        given = {r.tensor: got.get(self.declares.codes.format(r.tensor)) for r in self.out.rows}
        types = {v: _types(self.plan[v].grid.bits, self.plan[v].grid.signed) for v in given}
        codes = {
            v: q.int() if q.dtype == torch.uint16 else q  # torch does not compute with that type
            for v, q in given.items()
            if q is not None and _kind(q) in types[v]
        }
        floats = {o.tensor: got[o.tensor] for o in self.out.outputs if o.inner and o.tensor in got}
        unseen = {r.tensor: r for r in self.out.rows}

        def compare(name: str, own: Any, unrounded: Any) -> None:
            row = unseen.pop(name, None)
            if row is None:
                return
            q, row.why = given[name], ""
            if q is None:
                self._missing(row, own.numel())
            elif wrong := _misshapen(q, own, types[name]):
                row.why, row.wrong = "of another shape or type", wrong
            else:
                row.why = "" if q.numel() or row.elements else "empty"
                row.add(codes[name], own, self.plan[name], unrounded if row.float_ops else None)
                return
            codes.pop(name, None)

        ends = [o.tensor for o in self.out.outputs]
        alone = self._simulated(inputs, force=codes | floats, floats=before, like=free, keep=ends, each=compare)
        for row in unseen.values():
            row.why = "inside a fused kernel"
            codes.pop(row.tensor, None)
        if self.out.rows and not codes:
            hint = "is this the file that was written for this model?"
            what = f"'{self.out.runtime}' returned none of the {len(self.out.rows)} tensors that were asked for"
            raise RuntimeUnavailable(what, got=", ".join(list(got)[:8]) or "nothing", hint=hint)
        returned, computed = list(got.values()), alone | codes
        for k, o in enumerate(self.out.outputs):
            want = output(self.graph, self.plan, computed, o.tensor)
            device = returned[k] if not o.inner and k < len(returned) else floats.get(o.tensor)
            if o.inner and device is not None:
                device = device.reshape(want.shape) if device.numel() == want.numel() else None
            own = None if free is None else output(self.graph, self.plan, free, o.tensor)
            o.add(device, want, own)
        if free is not None:
            self.out.freely += samples
            self._add_free(inputs, label, codes, free, returned[0])

    def _add_free(
        self, inputs: list[Tensor], label: Tensor | None, codes: dict[str, Tensor], free: dict[str, Any], device: Tensor
    ) -> None:
        """What needs the float network, and the simulation on its own results; `device` returned the first output."""
        reals = run(self.graph, inputs, keep=list(codes))
        for row in (r for r in self.out.rows if r.tensor in codes):
            name = row.tensor
            row.add_free(codes[name], free[name], reals[name], self.plan[name])
        first = reals[self.graph.outputs[0]]
        if label is not None and first.dim() == 2 and label.shape[:1] == first.shape[:1]:
            own = output(self.graph, self.plan, free, self.graph.outputs[0])
            found = {"float": first, "integer": own, "device": device}
            self._count(inputs, label, {k: y for k, y in found.items() if y.shape == first.shape})

    def _run(self, inputs: list[np.ndarray]) -> dict[str, Tensor]:
        """The device's outputs, in the model's order, and then its codes, by name."""
        try:
            results = self.device.run(inputs)
        except Exception as e:  # the errors of runtimes share no base
            if not raised_outside_chipfit(e):
                raise
            what = f"'{self.out.runtime}' cannot run the file on these inputs: {first_line(e)}"
            raise RuntimeUnavailable(what, hint="is this the file that was written for this model?") from e
        small = {k: np.asarray(x) for k, x in results.items()}  # numpy has no type of 4 bits, nor has torch
        return {k: torch.from_numpy(x.astype(np.int8) if "int4" in x.dtype.name else x) for k, x in small.items()}

    def _simulated(self, inputs: list[Tensor], **how: Any) -> dict[str, Any]:
        how |= {"kernels": self.declares.kernels, "weights": self.weights, "part": getattr(self.device, "part", None)}
        return simulate(self.graph, self.plan, inputs, self.platform, **how)

    def _missing(self, row: TensorComparison, count: int) -> None:
        """Account for a tensor that the device did not return: it may have elided only what computes nothing."""
        maker = self.plan.nodes.get(self.graph.producers()[row.tensor].name) if row.op != "Input" else None
        row.missed += count
        if row.tensor in self.live and (row.tensor in self.filed or maker is None or maker.exec != "follow"):
            row.why, row.wrong = "missing from its results", "it is missing from the device's results"
        else:
            row.why = "elided by the runtime" if row.tensor in self.live else "without use for any output"

    def _count(self, inputs: list[Tensor], label: Tensor, results: dict[str, Tensor]) -> None:
        """Right answers by the label, of the simulation too."""
        run_flat: Any = getattr(self.model and self.model(), "run_flat", None)  # modules that chipfit made have it
        if run_flat is not None:
            results["simulated"] = run_flat(inputs)[0]
        self.out.labelled += label.shape[0]
        if not self.out.labelled:  # a batch without samples
            return
        self.hits.update({k: int((y.argmax(1) == label.reshape(-1)).sum()) for k, y in results.items()})
        self.out.accuracy = {k: right / self.out.labelled for k, right in self.hits.items()}


# ---------------------------------------------------------------- what is compared, and how


def _types(bits: int, signed: bool) -> set[str]:
    """Types in which a file may hold codes of so many bits."""
    size = next((b for b in (8, 16) if bits <= b), 32)
    return {f"int{size}" if signed or size == 32 else f"uint{size}"}


def _kind(x: Tensor) -> str:
    """The type of its numbers, as numpy names it."""
    return str(x.dtype).removeprefix("torch.")


def _misshapen(got: Tensor | None, want: Tensor, types: Collection[str]) -> str:
    """Why an array of the device cannot be compared; "" when it can."""
    if got is None:
        return "it is missing from the device's results"
    if got.shape == want.shape and _kind(got) in types:
        return ""
    return f"the device gives {_kind(got)} {list(got.shape)}, not {' or '.join(sorted(types))} {list(want.shape)}"


def _by_tensor(known: Collection[str], held: Mapping[str, FileTensor]) -> dict[str, list[FileTensor]]:
    """What a file holds of each tensor, in order: itself, in floats, and copies, numbered or of another layout."""
    found: dict[str, list[FileTensor]] = {}
    for name in sorted(held, key=len):
        own = name if name in known else re.sub(r"(_t\d+)?(/float)?(_t\d+)?(_\d+)?$", "", name)
        found.setdefault(own, []).append(held[name])
    return found


def _held(
    graph: Graph, plan: Plan, name: str, found: Sequence[FileTensor], weights: dict[str, Tensor]
) -> ConstantComparison:
    """A tensor's numbers in the file, and its codes when it is a weight, against the plan; `weights` keeps these."""
    stored, out = plan[name], ConstantComparison(name, plan.tensors[name].role)
    constant = graph.weights[name].detach().cpu() if name in graph.weights else None
    for scale, zero in (pair for f in found for pair in f.numbers):
        for word, want, got in (("scale", stored.scale, scale), ("zero point", stored.zero_point, zero)):
            if want.dim() > 1:  # of blocks, in either order of axes
                fitting = [w for w in (want, want.t()) if w.shape == got.shape]
                if not fitting:
                    out.wrong = out.wrong or f"{word} of the shape {list(got.shape)}"
                    continue
                want = next((w for w in fitting if np.array_equal(w.numpy(), got)), fitting[0])
            a, b = np.broadcast_arrays(want.unique().numpy() if want.numel() != got.size else want.numpy(), got)
            if not np.array_equal(a, b):
                at = np.unravel_index((a != b).argmax(), a.shape)
                out.wrong = out.wrong or f"{word} {b[at]:.9g} instead of {a[at]:.9g}"
    if constant is not None:
        codes = weights[name] = stored.quantize(constant)
        as_given = [constant] if any(v == name for v, _ in plan.float_edges) else []
        for q in (f.codes for f in found if f.codes is not None):
            wants = [stored.dequantize(codes), *as_given] if q.dtype.kind == "f" else [codes]
            differing = min((d for w in wants if (d := _least_differing(w.numpy(), q)) is not None), default=None)
            out.elements, out.differing = out.elements + q.size, out.differing + (differing or 0)
            out.wrong = out.wrong or ("" if differing is not None else f"its shape is {list(q.shape)}")
        out.wrong = out.wrong or ("" if out.elements or not codes.numel() else "it is missing from the file")
    out.why = "" if found else "not in the file under its name"
    return out


def _least_differing(want: np.ndarray, got: np.ndarray) -> int | None:
    """How many numbers differ between two arrays, in the order of axes in which the fewest do; None where none fits."""
    want, got = want.squeeze(), got.squeeze()
    orders: Sequence[tuple[int, ...]] = list(itertools.permutations(range(want.ndim)))
    fitting = [o for o in orders if want.transpose(o).shape == got.shape]
    return min((int((want.transpose(o) != got).sum()) for o in fitting), default=None)
