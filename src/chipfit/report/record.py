"""The report as data: how every operator of a model runs, and how well."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: notes of a plan with this prefix are shown before anything else
WARNING = "warning: "


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One operator of the model, or one of its inputs."""

    node: str
    layer: str
    op: str
    exec: str  #: "int", "float", "follow" or "table"
    group: str
    format: str  #: of its result; "float" if it is not quantized
    scale: float | None
    zero_point: int | None
    low: float | None  #: range seen in calibration
    high: float | None
    clip_low: float | None  #: range of the quantization grid
    clip_high: float | None
    clipped: float | None  #: share of the calibration values outside that range
    sqnr_db: float | None  #: of its result on the device; None before `verify`
    differing: int | None  #: integers that differ on the device, each side on its own results or the device's
    why: str  #: why it runs in float
    origin: str = ""  #: source of the range
    products: float = 0.0  #: multiplications of one sample
    weight_format: str = ""  #: "" without quantized weights
    weight_sqnr_db: float | None = None  #: of its stored weights; needs no data
    simd: int | None = None  #: output channels of one instruction, where the platform names them
    reads: tuple[str, ...] = ()  #: nodes and inputs of the model whose results it reads
    bars: tuple[float, ...] = ()  #: share of calibration values in equal bins over [bars_low, bars_high)
    bars_low: float = 0.0
    bars_high: float = 0.0

    @property
    def name(self) -> str:
        """The user's name of the layer."""
        return self.layer or self.node


class Kernel(tuple[LayerRow, ...]):
    """Operators that the chip runs as one, in order."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The layer of its first operator."""
        return self[0].name

    @property
    def ops(self) -> str:
        return " + ".join(r.op for r in self)

    @property
    def exec(self) -> str:
        """The way it runs: in float if any part does; it only moves integers if every part does."""
        return next(how for how in ("float", "int", "table", "follow") if any(r.exec == how for r in self))

    @property
    def formats(self) -> str:
        """Format of its result, and of its weights: "u8, w8"."""
        weights = dict.fromkeys(r.weight_format for r in self if r.weight_format)
        return ", ".join([self[-1].format, *weights])

    @property
    def weight_sqnr_db(self) -> float | None:
        """The least signal-to-quantization-noise ratio of its stored weights [dB]."""
        return min((r.weight_sqnr_db for r in self if r.weight_sqnr_db is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """A report on how a quantized model runs, how large it is, and how accurate."""

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
    simulated: bool = False  #: the platform's whole arithmetic is simulated: exactness may be claimed
    not_modelled: tuple[str, ...] = ()  #: settings of the platform that are not modelled, and the substitute
    tried: tuple[str, ...] = ()  #: overrides that were tried and help, each with its gain
    #: increase of the loss by each tensor, largest first; empty before `Result.sensitivity` (see `Sensitivity.rows`)
    sensitivity: tuple[Mapping[str, Any], ...] = ()
    #: the best widths for several budgets; empty before `Result.pareto` (see `Pareto.points`)
    pareto: tuple[Mapping[str, Any], ...] = ()
    inputs: tuple[LayerRow, ...] = ()  #: how the model's own inputs are stored
    verification: Mapping[str, Any] | None = None
    speed: Mapping[str, Any] | None = None  #: the float and the quantized file side by side, see `Timing`
    #: a chip's memories that the `.tflite` file takes, and their limits, see `Footprint`
    memory: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def merit(self) -> Mapping[str, Any] | None:
        """The loss at the outputs on a few samples: `sqnr_db`, `expected_db`, `samples`; None where it is not known."""
        return self.provenance.get("merit")

    @property
    def unexplained(self) -> bool:
        """True where the outputs lose more than the bits explain."""
        known = self.merit or {}
        sqnr, expected = known.get("sqnr_db"), known.get("expected_db")
        return sqnr is not None and expected is not None and sqnr < expected

    @property
    def warnings(self) -> list[str]:
        """Doubts about the result, to be read first."""
        slow = self.speed["warnings"] if self.speed else ()
        return [*(n.removeprefix(WARNING) for n in self.notes if n.startswith(WARNING)), *slow]

    @property
    def floats(self) -> dict[str, list[str]]:
        """Reason -> layers that stay in float for this reason."""
        out: dict[str, list[str]] = {}
        for r in self.layers:
            if r.exec == "float":
                out.setdefault(r.why or "not stated", []).append(r.name)
        return out

    @property
    def kernels(self) -> list[Kernel]:
        """All kernels, each at the place of its last operator."""
        parts: dict[str, list[LayerRow]] = {}
        for r in self.layers:
            parts.setdefault(r.group or r.node, []).append(r)
        return [Kernel(parts[r.node]) for r in self.layers if r.node in parts]

    @property
    def shrink(self) -> float:
        """Size of the float weights over that of the quantized weights."""
        return self.float_bytes / max(1, self.quantized_bytes)

    @property
    def integer_share(self) -> float:
        """Share of all multiplications that run in integers; of operators if there are no multiplications."""
        work = [r.products for r in self.layers]
        work = work if any(work) else [1.0] * len(work)
        return sum(n for n, r in zip(work, self.layers, strict=True) if r.exec != "float") / max(1.0, sum(work))

    @property
    def integers(self) -> int:
        """Number of operators that run in integers or move integers."""
        return sum(r.exec != "float" for r in self.layers)

    @property
    def verdict(self) -> str:
        """The verdict of `verify`: "unverified", or `Verification.verdict`."""
        return self.verification["verdict"] if self.verification else "unverified"

    @property
    def first_departure(self) -> Mapping[str, Any] | None:
        """The first tensor, in execution order, that differs: a row of `verification`."""
        rows = self.verification["rows"] if self.verification else ()
        return next((r for r in rows if r["differing"] or r["op_differing"] or r["fault"]), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return asdict(self)
