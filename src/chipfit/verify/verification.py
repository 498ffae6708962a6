"""The result of `verify`: all comparisons of a file, the verdict on it, and its text."""

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from chipfit.errors import VerificationError
from chipfit.screen import Summary, SummaryRepr
from chipfit.verify.comparisons import ConstantComparison, OutputComparison, TensorComparison

#: verdict -> what it says
MEANING = {
    "exact": "the device computes the integers of the simulation",
    "sound": "the device computes the integers of the simulation, except behind operators in float: docs/verify.md",
    "bounded": "each operator computes the integers of the simulation up to the difference that is promised",
    "departs": "the file or its runtime computes something else than the simulation",
    "unpromised": "the runtime computes something else, and its arithmetic is not this platform's",
}


@dataclass(repr=False)
class Verification(SummaryRepr):
    """The result of `verify`.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> check = result.verify(data)
        >>> check.exact, check.differing, check.verdict
        (True, 0, 'exact')
    """

    runtime: str
    promised: bool  #: this runtime's arithmetic is a verified profile of this platform
    samples: int = 0
    end_to_end_samples: int = 0  #: number of first samples on which the float network and the end-to-end simulation ran
    rows: list[TensorComparison] = field(default_factory=list)  #: every quantized tensor of the plan, compared or not
    executed: dict[str, int] = field(default_factory=dict)  #: operator kinds that the runtime ran, with counts
    accuracy: dict[str, float] = field(default_factory=dict)  #: top-1 of float, simulated, integer, device
    warnings: list[str] = field(default_factory=list)
    outputs: list[OutputComparison] = field(default_factory=list)
    #: every quantized tensor, weight and bias as the file stores it
    held: list[ConstantComparison] = field(default_factory=list)
    labelled: int = 0  #: samples that the accuracies are taken from
    calibrated: int = 0  #: samples that are known to be calibration data
    other_rule: bool = False  #: the platform states how it requantizes, and the runtime is not known to do so
    not_modelled: list[str] = field(default_factory=list)  #: settings of the platform that no simulation computes

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
        """Number of integers that `differing` counts among: all, if none differs given the device's inputs."""
        alike = not any(r.differing or r.op_differing for r in self.rows)
        return self.integers if alike else sum(r.end_to_end_elements for r in self.rows)

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
        """Differences between the file and the plan, and between the file and what its runtime returns."""
        wrong = [f"{h.role} '{h.tensor}' in the file: {h.fault}" for h in self.held if h.fault]
        return wrong + [f"{r.display_name}: {r.wrong}" for r in self.rows if r.wrong]

    @property
    def departures(self) -> list[str]:
        """All faults, a sentence each: first the file's, then tensors in execution order, then outputs."""
        rows = [f"{r.display_name}: {r.fault}" for r in self.rows if r.fault and not r.wrong]
        outputs = [f"{'float' if o.inner else 'output'} '{o.name}': {o.fault}" for o in self.outputs if o.fault]
        return [*self.file_departures, *rows, *outputs]

    @property
    def exact(self) -> bool:
        """Not one integer of any tensor differs, and the file and its outputs are those of the plan.

        For samples beyond `end_to_end_samples` this follows by induction: the first operator reads the same inputs, and
        each operator computes the device's integers from the device's.
        """
        return self.sound and self.differing == 0 and not any(r.op_differing for r in self.rows)

    @property
    def sound(self) -> bool:
        """Every operator, given the device's inputs, computes the device's integers, but for `BORDER` in float."""
        return self.checked and not self.departures

    @property
    def bounded(self) -> bool:
        """Integers differ, given the device's inputs, on a runtime of which only a largest difference is promised."""
        return any(r.within is not None and r.op_differing for r in self.rows)

    @property
    def checked(self) -> bool:
        """Integers were compared: of tensors, or of the file's weights if no tensor is quantized."""
        return self.integers > 0 if self.rows else any(h.elements for h in self.held)

    @property
    def verdict(self) -> str:
        """The result in a word.

        "exact"; "sound"; "bounded": integers differ, by no more than the runtime declares; "departs": the file is not
        the plan's, or a runtime that was promised to computes something else; "unpromised": a runtime whose arithmetic
        is not this platform's computes something else.
        """
        if self.sound:
            return "exact" if self.exact else "bounded" if self.bounded else "sound"
        return "departs" if self.promised or self.file_departures else "unpromised"

    @property
    def rounds_otherwise(self) -> bool:
        """Every fault is an integer that differs by 1, on a runtime that requantizes by another rule than the chip."""
        rounded = [r for r in self.rows if r.fault and not r.wrong and r.op_largest == 1]
        return self.other_rule and not self.promised and len(rounded) == len(self.departures) > 0

    @property
    def first_difference(self) -> TensorComparison | None:
        """The first tensor, in execution order, that departs."""
        return next((r for r in self.rows if r.differing or r.op_differing or r.wrong), None)

    @property
    def float_operators(self) -> list[str]:
        """Layers that the runtime itself computes in float."""
        return [r.display_name for r in self.rows if r.in_float]

    @property
    def float_ops(self) -> set[str]:
        """Canonical operators that the runtime computes in float, in front of a quantized tensor or an output."""
        compared: list[TensorComparison | OutputComparison] = [*self.rows, *self.outputs]
        return {op for c in compared for op in c.float_ops}

    def require(self, float_ops: Collection[str] = ()) -> Self:
        """Raise unless nothing departs and no operator but those named here runs in float.

        Args:
            float_ops: operators that may run in float.

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
        """Return how much was compared, in a line: "compared 279 of 281 tensors, 2 elided by the runtime"."""
        line = f"compared {len(self.compared)} of {len(self.rows)} tensors"
        line += "".join(f", {n} {why}" for why, n in self.not_compared.items())
        constants = [h for h in self.held if h.role != "activation"]
        right = sum(not h.fault and not h.why for h in constants)
        line += f"; {right} of {len(constants)} weights and biases read back from the file" if constants else ""
        inner = [not o.fault for o in self.outputs if o.inner]
        line += f"; {sum(inner)} of {len(inner)} float inputs of dynamic kernels" if inner else ""
        share = f"{100 * self.exact_share:.2f} % of all integers compared without tolerance"
        return f"{line}; {share}" if self.rows else line

    def summary(self) -> str:
        """Return the result in a few lines."""
        few = self.out_of < self.integers
        over = f"the first {self.end_to_end_samples} of {self.samples} samples" if few else f"{self.samples} samples"
        found = f"{self.differing} of {self.out_of} integers differ" if self.rows else "no value is quantized"
        lines = [f"{self.runtime}: {found} over {over}", self.coverage()]
        if self.departures:
            more = len(self.departures) - 1
            word = "the runtime rounds otherwise than this chip" if self.rounds_otherwise else "departs"
            lines.append(f"{word}: {self.departures[0]}{f'; and {more} more' if more else ''}")
        first = self.first_difference
        if first is not None:
            how = ", computed in float by the runtime" if first.in_float else ""
            share = f"{100 * first.fraction:.4f} % of its integers, at most {first.largest}{how}"
            lines.append(f"first difference: {first.display_name}, {share}")
            alone, worst = sum(r.op_differing for r in self.rows), max(r.op_largest for r in self.rows)
            each = f"{alone} of {self.integers} differ over {self.samples} samples, largest difference {worst}"
            within = f", within what is promised of {self.runtime}" if self.verdict == "bounded" else ""
            lines.append(f"each operator by itself, given the device's inputs: {each}{within}")
        shown, more = self.float_operators[:6], len(self.float_operators) - 6
        if shown:
            others = f" and {more} more" if more > 0 else ""
            lines.append(f"computed in float by the runtime: {', '.join(shown)}{others}")
        if self.not_modelled:
            words = [line.partition(":")[0] for line in self.not_modelled]
            lines.append(f"stated by the platform, not modelled: {', '.join(words[:4])}{', ...' if words[4:] else ''}")
        if self.accuracy:
            found = ", ".join(f"{k} {100 * v:.2f} %" for k, v in self.accuracy.items())
            lines.append(f"top-1 of {self.labelled} samples: {found}")
        return "\n".join(lines + self.warnings)

    def _summary(self) -> Summary:
        found, coverage, *more = self.summary().splitlines()
        facts = {"meaning": MEANING[self.verdict], "integers": found, "coverage": coverage, "notes": "; ".join(more)}
        order = sorted(self.rows, key=lambda r: (not r.fault, -r.differing, -r.op_differing, r.why != ""))
        rows = [(r.tensor, r.op, r.elements, r.differing, r.largest, r.op_differing, r.fault or r.why) for r in order]
        header = ("tensor", "operator", "integers", "differ", "by", "alone", "note")
        return Summary(f"Verification on {self.runtime}: {self.verdict}", facts, header, rows, "verification.rows")

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-able data."""
        out = asdict(self)
        names = "exact sound verdict integers differing exact_share output_gap departures not_compared"
        out.update({name: getattr(self, name) for name in names.split()}, among=self.out_of, coverage=self.coverage())
        for d, r in zip(out["rows"], self.rows, strict=True):
            d.update(sqnr_db=r.sqnr_db if np.isfinite(r.sqnr_db) else None, fault=r.fault)
            del d["parts"]
        for d, o in zip(out["outputs"], self.outputs, strict=True):
            d.update(fault=o.fault)
        return out
