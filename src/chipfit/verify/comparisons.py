"""Comparisons of single tensors: device against simulation, output against simulation, file against plan."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from chipfit.export import FileTensor
from chipfit.frameworks.quantized import original_of
from chipfit.graph.hidden_scores import is_visible
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.quantizers.noise import decibels
from chipfit.quantizers.stored import Stored

#: Where the runtime computes in float, the last bit of a sum is its own and decides how a value half way between two
#: integers is rounded. Given the device's inputs, such an integer may differ by 1 if its float value lies this near to
#: half way: the error of float32 operators, relative to the span of the quantization grid
BORDER = 2.0**-16
#: Share of the other integers of such operators that may differ by 1 (at least one may), and 1 / (the distance from
#: half way, in steps, that still counts as a tie). Interpolated integers often lie half way: one in 50 differed on ONNX
#: Runtime. Of other operators one 16-bit integer in 2,000 differed, and no 8-bit integer
FLOAT_SHARE, TIE = 0.01, 512
#: How much more two runtimes may differ than the simulation in float32 differs from float64: where sums cancel, as in
#: a variance E[x^2] - E[x]^2, float32 keeps few digits
CANCELLED = 4.0
Exact = Callable[[], Tensor] | None
#: Largest gap of an output of float operators, given the device's integers, relative to its largest number: some
#: hundred units in the last place, as sums of a few thousand float32 numbers have
OUTPUT_GAP = 1e-4
#: Largest gap of an output that only dequantizes integers, relative to the span of its grid: some kernels compute
#: q s - z s, which rounds once more than (q - z) s
DEQUANTIZED_GAP = 2.0**-22


@dataclass
class TensorComparison:
    """One quantized tensor: the simulation against the device, and the device against the float network."""

    tensor: str
    layer: str
    op: str
    elements: int = 0  #: integers compared, the operator reading the device's own integers
    differing: int = 0  #: of `end_to_end_elements`: integers that differ, each side running on its own results
    largest: int = 0  #: largest of these differences
    op_differing: int = 0  #: of `elements`: integers that differ
    op_largest: int = 0
    end_to_end_elements: int = 0  #: integers compared on samples on which the simulation also ran on its own results
    ties: int = 0  #: differing integers of a float operator whose float values lie half way between two integers
    astray: int = 0  #: differing integers of a float operator whose float values do not lie near to half way
    in_float: bool = False  #: the runtime computes this operator in float
    #: operators that it computes in float since it last read integers, without pass-through operators
    float_ops: tuple[str, ...] = ()
    within: int | None = None  #: largest difference that is promised of the runtime; None: see `allowed`
    why: str = ""  #: why nothing of it was compared
    missed: int = 0  #: integers that were not compared for that reason
    wrong: str = ""  #: what is wrong besides integers that differ
    signal: float = 0.0  #: sum of squares of the float tensor
    noise: float = 0.0  #: sum of squares of its error on the device
    #: signal and noise of each part of an output that joins several, see `rounding.outputs.output_labels`
    parts: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(
        self, device: Tensor, from_device: Tensor, stored: Stored, before: Tensor | None = None, exact: Exact = None
    ) -> None:
        """Count one batch of the operator by itself.

        Args:
            device: the runtime's integers.
            from_device: the simulated operator's integers, computed from the runtime's.
            stored: how the tensor is stored.
            before: the float result of the simulated operator before it is quantized, where it runs in float.
            exact: returns the result in float64 from the device's integers, which tells how far float32 may be off.
        """
        off = differing_places(from_device, device)
        self.elements += device.numel()
        self.op_differing += len(off)
        self.op_largest = max(self.op_largest, largest_difference(from_device, device, off))
        if before is not None and len(off):
            place = before.flatten()[off].double() / stored.scale.double()
            off_half = (place - place.floor() - 0.5).abs()
            self.ties += int((off_half <= 1 / TIE).sum())
            near = off_half <= max(BORDER * (stored.grid.qmax - stored.grid.qmin), 1 / TIE)
            if exact is not None and not near.all():  # sums that cancel
                near |= off_half <= CANCELLED * float(((before - exact()) / stored.scale).abs().max())
            self.astray += int((~near).sum())

    def add_end_to_end(
        self, device: Tensor, simulated: Tensor, floats: Tensor, stored: Stored, labels: Tensor | None = None
    ) -> None:
        """Count one batch on which each side runs on its own results.

        Args:
            device, simulated: integers of the runtime and of the simulation.
            floats: values of the float network.
            stored: how the tensor is stored.
            labels: the part that each number of a sample belongs to, [*floats.shape[1:]].
        """
        off = differing_places(simulated, device)
        self.end_to_end_elements += device.numel()
        self.differing += len(off)
        self.largest = max(self.largest, largest_difference(simulated, device, off))
        shown = is_visible(floats)
        error = (floats - stored.dequantize(device)).where(shown, 0.0)
        floats = floats.where(shown, 0.0)
        self.signal += _energy(floats)
        self.noise += _energy(error)
        for k in () if labels is None else labels.unique().tolist():
            here, (signal, noise) = labels == k, self.parts.get(k, (0.0, 0.0))
            self.parts[k] = signal + _energy(floats[:, here]), noise + _energy(error[:, here])

    @property
    def fraction(self) -> float:
        """Share of integers that differ, each side running on its own results."""
        return self.differing / self.end_to_end_elements if self.end_to_end_elements else 0.0

    @property
    def allowed(self) -> int:
        """Number of integers that may differ by 1, given the device's inputs; all may by `within`."""
        if self.within is not None:
            return self.elements if self.within else 0
        return self.ties + max(1, int(FLOAT_SHARE * self.elements)) if self.float_ops else 0

    @property
    def fault(self) -> str:
        """A description of the fault, "" if there is none."""
        if self.within is not None:
            found = f"{self.op_differing} of {self.elements} integers differ by up to {self.op_largest}"
            over = self.op_largest > self.within
            return f"{found} given the device's inputs, and at most {self.within} is promised" if over else self.wrong
        if self.astray or self.op_differing > self.allowed or self.op_largest > min(self.allowed, 1):
            found = f"{self.op_differing} of {self.elements} integers differ by up to {self.op_largest}"
            how = f" by 1, half way between two integers; {self.astray} differ elsewhere" if self.allowed else ""
            return f"{found} given the device's inputs, and {self.allowed} may differ{how}"
        return self.wrong

    @property
    def display_name(self) -> str:
        return f"{self.op} '{self.layer or self.tensor}'"

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio [dB], of the worst part if it has parts; infinite without noise."""
        energies = (self.parts or {0: (self.signal, self.noise)}).values()
        return min(decibels(max(signal, 1e-300), noise) for signal, noise in energies)  # -inf has no form in JSON


def differing_places(a: Tensor, b: Tensor) -> Tensor:
    """Return where integers differ, as places in the flattened tensors, [count]."""
    return torch.from_numpy(np.flatnonzero((a != b).numpy()))  # several times as fast as torch's for few of many


def largest_difference(a: Tensor, b: Tensor, where: Tensor) -> int:
    """Return the largest difference of integers, given the places where they differ."""
    return int((a.flatten()[where].long() - b.flatten()[where].long()).abs().max()) if len(where) else 0


def _differences(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Return how many numbers differ and the largest difference; NaN on one side alone differs by infinity."""
    if a.is_floating_point() and a.numel():
        off = (a - b).abs_()  # 0 only where they are equal; exact for near numbers
        if bool((top := off.max()).isfinite()):
            return int(off.count_nonzero()), float(top)
    where = differing_places(a, b)
    x, y = (v.flatten()[where].double() for v in (a, b))
    off = (x - y).abs()[~(x.isnan() & y.isnan())]
    return len(off), float(off.nan_to_num(np.inf).max()) if len(off) else 0.0


def _energy(x: Tensor) -> float:
    """Return the sum of squares, in the tensor's own precision within parts of 2^20 numbers, in double beyond."""
    return sum(float(torch.dot(part, part)) for part in x.flatten().split(1 << 20))


@dataclass
class OutputComparison:
    """A float tensor of the device, an output or one inside the network, against the simulation."""

    name: str
    tensor: str
    float_ops: tuple[str, ...] = ()  #: operators that the runtime computes in float since it last read integers
    span: float = 0.0  #: range of float values that its grid represents; 0 if it is not quantized
    elements: int = 0
    differing: int = 0  #: numbers that are not bit-identical to the simulation's, given the device's integers
    gap: float = 0.0  #: largest difference from the simulation, each side running on its own results
    op_gap: float = 0.0  #: largest difference given the device's integers, relative to `span` or its largest number
    wrong: str = ""  #: what is wrong besides numbers that differ
    inner: bool = False  #: no output of the model, but the float input of a dynamic kernel
    allowed_gap: float = OUTPUT_GAP  #: largest `op_gap` that float operators may have
    _is_float: bool = field(default=True, repr=False)

    def add(
        self, device: Tensor | None, from_device: Tensor, end_to_end: Tensor | None = None, exact: Exact = None
    ) -> None:
        """Count one batch.

        Args:
            device: the device's numbers.
            from_device: the simulation's, computed from the device's integers.
            end_to_end: the simulation's, computed from its own results.
            exact: returns the simulation's in float64, computed from the device's integers.
        """
        self.wrong = self.wrong or not_comparable(device, from_device, dtype_name(from_device))
        if self.wrong or device is None or not device.numel():
            return
        differing, gap = _differences(device, from_device)
        self.elements += device.numel()
        self.differing += differing
        if end_to_end is not None:
            self.gap = max(self.gap, _differences(device, end_to_end)[1])
        if differing:
            size = self.span or max(float(from_device.float().abs().nan_to_num(0.0, 0.0).max()), 1e-30)
            self.op_gap = max(self.op_gap, gap / size)
            if exact is not None and self.float_ops and self.op_gap > self.allowed_gap:
                self.allowed_gap = max(self.allowed_gap, CANCELLED * _differences(from_device, exact())[1] / size)
        self._is_float = from_device.is_floating_point()

    @property
    def fault(self) -> str:
        """A description of the fault, "" if there is none."""
        passes = self.differing <= FLOAT_SHARE * self.elements if self.float_ops else not self.differing
        if self._is_float:
            passes = self.op_gap <= (self.allowed_gap if self.float_ops else DEQUANTIZED_GAP)
        if passes:
            return self.wrong
        share = f"{self.differing} of {self.elements} numbers are not the simulation's given the device's integers"
        return f"{share}; largest relative gap {self.op_gap:.2g}"


def dtype_name(x: Tensor) -> str:
    """Return the type of a tensor as numpy names it."""
    return str(x.dtype).removeprefix("torch.")


def not_comparable(got: Tensor | None, want: Tensor, dtype: str) -> str:
    """Return why an array of the device cannot be compared; "" if it can."""
    if got is None:
        return "it is missing from the device's results"
    if got.shape == want.shape and dtype_name(got) == dtype:
        return ""
    return f"the device gives {dtype_name(got)} {list(got.shape)}, not {dtype} {list(want.shape)}"


# ---------------------------------------------------------------- the file's constants


@dataclass
class ConstantComparison:
    """A tensor of the file against the plan: its scales and zero points, and the integers of weights and biases."""

    tensor: str
    role: str  #: "activation", "weight" or "bias"
    elements: int = 0  #: integers compared
    differing: int = 0
    why: str = ""  #: why nothing of it was compared
    wrong: str = ""

    @property
    def fault(self) -> str:
        """A description of the fault, "" if there is none."""
        if self.differing:
            return f"{self.differing} of its {self.elements} quantized values are not the plan's"
        return self.wrong


def by_tensor(names: Collection[str], stored: Mapping[str, FileTensor]) -> dict[str, list[FileTensor]]:
    """Group the tensors of a file by the plan's names: a tensor, its float side, and copies (numbered, transposed)."""
    groups: dict[str, list[FileTensor]] = {}
    for name in sorted(stored, key=len):
        own = name if name in names else original_of(name)
        groups.setdefault(own, []).append(stored[name])
    return groups


def compare_constant(
    graph: Graph, plan: Plan, name: str, in_file: Sequence[FileTensor], weights: dict[str, Tensor]
) -> ConstantComparison:
    """Compare a tensor's scales and zero points in the file, and a weight's integers, with the plan.

    Args:
        in_file: the tensor and its copies in the file.
        weights: integers of weights by name; receives those of `name`.
    """
    stored, out = plan[name], ConstantComparison(name, plan.tensors[name].role)
    for scale, zero in (pair for f in in_file for pair in f.qparams):
        for word, want, got in (("scale", stored.scale, scale), ("zero point", stored.zero_point, zero)):
            out.wrong = out.wrong or _wrong_numbers(word, want, got)
    if name in graph.weights:
        constant = graph.weights[name].detach()
        integers = weights[name] = stored.quantize(constant)
        as_given = [constant] if any(v == name for v, _ in plan.float_edges) else []
        for q in (f.values for f in in_file if f.values is not None):
            wants = [stored.dequantize(integers), *as_given] if q.dtype.kind == "f" else [integers]
            differing = min((d for w in wants if (d := fewest_differing(w.numpy(), q)) is not None), default=None)
            out.elements, out.differing = out.elements + q.size, out.differing + (differing or 0)
            out.wrong = out.wrong or ("" if differing is not None else f"its shape is {list(q.shape)}")
        out.wrong = out.wrong or ("" if out.elements or not integers.numel() else "it is missing from the file")
    out.why = "" if in_file else "not in the file under its name"
    return out


def _wrong_numbers(word: str, want: Tensor, got: np.ndarray) -> str:
    """Return the first scale or zero point that differs from the plan's; "" if none does."""
    if want.dim() > 1:  # of blocks, in either order of axes
        fitting = [w for w in (want, want.t()) if w.shape == got.shape]
        if not fitting:
            return f"{word} of the shape {list(got.shape)}"
        want = next((w for w in fitting if np.array_equal(w.numpy(), got)), fitting[0])
    a, b = np.broadcast_arrays(want.unique().numpy() if want.numel() != got.size else want.numpy(), got)
    if np.array_equal(a, b):
        return ""
    at = np.unravel_index((a != b).argmax(), a.shape)
    return f"{word} {b[at]:.9g} instead of {a[at]:.9g}"


def fewest_differing(want: np.ndarray, got: np.ndarray) -> int | None:
    """Return how many numbers differ in the order of axes in which the fewest do; None if no order fits."""
    want, got = want.squeeze(), got.squeeze()
    orders: Sequence[tuple[int, ...]] = list(itertools.permutations(range(want.ndim)))
    fitting = [o for o in orders if want.transpose(o).shape == got.shape]
    return min((int((want.transpose(o) != got).sum()) for o in fitting), default=None)
