"""What a report holds: how well it went, as data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: a note of a plan that starts so is shown before anything else
WARNING = "warning: "


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One operator of the model, or one of its inputs."""

    node: str
    layer: str
    op: str
    exec: str  #: "int", "float", "follow" or "table"
    group: str
    format: str  #: of its result; "float" when it is not stored in codes
    scale: float | None
    zero_point: int | None
    low: float | None  #: range seen in calibration
    high: float | None
    clip_low: float | None  #: range that the grid holds
    clip_high: float | None
    clipped: float | None  #: share of the calibration values outside that range
    sqnr_db: float | None  #: of its result on the device; None before `verify`
    differing: int | None  #: integers that differ on the device, each side on its own results or on the device's
    why: str  #: why it runs in float
    origin: str = ""  #: where the range came from
    products: float = 0.0  #: multiplications of one sample
    weight_format: str = ""  #: "" without quantized weights
    weight_sqnr_db: float | None = None  #: of its stored weights; needs no data
    bars: tuple[float, ...] = ()  #: share of calibration values in equal bins over [bars_low, bars_high)
    bars_low: float = 0.0
    bars_high: float = 0.0

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.layer or self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything that a person asks after quantizing a model."""

    platform: str
    title: str
    deploy: tuple[str, ...]
    float_bytes: int
    quantized_bytes: int
    padded_bytes: int  #: with output channels padded to the width of the chip's instructions, where it has one
    parameters: int
    quantized_tensors: int
    float_tensors: int
    layers: tuple[LayerRow, ...]  #: in execution order
    timings: Mapping[str, float]
    notes: tuple[str, ...]
    simulated: bool = False  #: all that the platform says of its arithmetic is simulated: exactness may be claimed
    not_modelled: tuple[str, ...] = ()  #: what the platform says and chipfit does not do, with what it does instead
    tried: tuple[str, ...] = ()  #: overrides that were tried and help, each with its gain
    #: what each tensor adds to the loss, most first; empty before `Result.sensitivity` (see `Sensitivity.rows`)
    sensitivity: tuple[Mapping[str, Any], ...] = ()
    #: the best widths for several budgets; empty before `Result.pareto` (see `Pareto.points`)
    pareto: tuple[Mapping[str, Any], ...] = ()
    inputs: tuple[LayerRow, ...] = ()  #: how the model's own inputs are stored
    verification: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """What makes the result doubtful, to be read first."""
        return [n.removeprefix(WARNING) for n in self.notes if n.startswith(WARNING)]

    @property
    def floats(self) -> dict[str, list[str]]:
        """Reason -> layers that stay in float for it."""
        out: dict[str, list[str]] = {}
        for r in self.layers:
            if r.exec == "float":
                out.setdefault(r.why or "not said", []).append(r.name)
        return out

    @property
    def kernels(self) -> list[tuple[LayerRow, ...]]:
        """Operators that the chip runs as one, together; a kernel stands where its last operator does."""
        parts: dict[str, list[LayerRow]] = {}
        for r in self.layers:
            parts.setdefault(r.group or r.node, []).append(r)
        return [tuple(parts[r.node]) for r in self.layers if r.node in parts]

    @property
    def shrink(self) -> float:
        """How many times smaller the weights have become."""
        return self.float_bytes / max(1, self.quantized_bytes)

    @property
    def integer_share(self) -> float:
        """Share of all multiplications that run in integers; of operators where there are none."""
        work = [r.products for r in self.layers]
        work = work if any(work) else [1.0] * len(work)
        return sum(n for n, r in zip(work, self.layers, strict=True) if r.exec != "float") / max(1.0, sum(work))

    @property
    def integers(self) -> int:
        """Operators that run in integers or move codes."""
        return sum(r.exec != "float" for r in self.layers)

    @property
    def verdict(self) -> str:
        """What `verify` found, in a word.

        "unverified", or what `Verification.verdict` says.
        """
        return self.verification["verdict"] if self.verification else "unverified"

    @property
    def first_departure(self) -> Mapping[str, Any] | None:
        """The first tensor, in execution order, that differs: a row of `verification`."""
        rows = self.verification["rows"] if self.verification else ()
        return next((r for r in rows if r["differing"] or r["op_differing"] or r["fault"]), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)
