"""The Plan: every decision about every tensor, as data that can be printed, compared, edited, saved and replayed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from chipfit._version import __version__
from chipfit.errors import PlanError, UnknownNameError
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Exec, Platform
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored
from chipfit.screen import Summary, SummaryRepr

Role = Literal["activation", "weight", "bias"]
_STORED = frozenset(f.name for f in fields(Stored))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorPlan:
    """The storage of one tensor on the chip, or the reason why it stays float."""

    name: str  #: value or weight name in the Graph
    role: Role
    layer: str = ""  #: the user's layer that computes or owns it
    op: str = ""  #: canonical operator of that node
    stored: Stored | None = None  #: None when it stays float
    origin: str = ""  #: where the numbers came from: "mse over 8 batches", "tied to x", "fixed by rule", ...
    why: str = ""  #: why it stays float
    low: float | None = None  #: least value in calibration
    high: float | None = None  #: greatest value in calibration

    @property
    def quantized(self) -> bool:
        return self.stored is not None

    @property
    def format(self) -> str:
        """Format name in the platform; "float" when not quantized."""
        return self.stored.format if self.stored is not None else "float"

    @property
    def grid(self) -> Grid | None:
        return self.stored.grid if self.stored is not None else None

    @property
    def scale(self) -> torch.Tensor | None:
        """float32, [] or [C]."""
        return self.stored.scale if self.stored is not None else None

    @property
    def zero_point(self) -> torch.Tensor | None:
        """int32, same shape as scale."""
        return self.stored.zero_point if self.stored is not None else None

    @property
    def axis(self) -> int | None:
        """Channel axis when scale is [C]."""
        return self.stored.axis if self.stored is not None else None

    def __repr__(self) -> str:
        """Return one line: storage of the tensor, or the reason why it stays float."""
        if self.stored is None:
            return f"{self.role} {self.name}: float, {self.why}"
        s, grid = self.stored.scale, self.stored.grid
        scale = f"{float(s):.6g}" if s.dim() == 0 else f"{float(s.min()):.3g}..{float(s.max()):.3g}, one per {grid.per}"
        codes, zero = f"codes {grid.qmin}..{grid.qmax}", int(self.stored.zero_point.reshape(-1)[0])
        return f"{self.role} {self.name}: {self.format}, {codes}, scale {scale}, zero point {zero}; {self.origin}"

    def with_(self, **changes: Any) -> TensorPlan:
        """Return a copy with changed fields, those of `stored` included: `t.with_(scale=2 * t.scale)`."""
        own = {k: changes.pop(k) for k in list(changes) if k in _STORED}
        if own and self.stored is not None:
            changes["stored"] = replace(self.stored, **own)
        elif own:
            raise PlanError(f"Tensor '{self.name}' is not quantized, so it has no {', '.join(own)}")
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The execution of one node on the chip."""

    name: str
    op: str
    layer: str = ""
    exec: Exec = "float"
    group: str = ""  #: name of the fused group's last node; "" when the node is alone
    why: str = ""  #: why it runs in float, or on the processor beside the chip's accelerator
    simd: PositiveInt | None = None  #: output channels of one instruction, where the platform names them

    @property
    def display_name(self) -> str:
        """The user's name for the node: its layer, or its own name."""
        return self.layer or self.name


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(SummaryRepr):
    """All decisions for one model on one platform.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> tensor = result.plan.tensors["0.weight"]
        >>> tensor.role, tensor.format, tuple(tensor.scale.shape)
        ('weight', 'w8', (8,))
    """

    tensors: dict[str, TensorPlan] = field(default_factory=dict)
    nodes: dict[str, NodePlan] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()  #: fused groups: node names, in execution order
    #: (value, node) pairs whose node reads the value before its quantizer (platforms that quantize at inputs)
    float_edges: frozenset[tuple[str, str]] = frozenset()
    ties: tuple[tuple[str, ...], ...] = ()  #: tensors that must keep one scale and zero point, also when trained
    limits: tuple[ScaleBound, ...] = ()  #: bounds that hold in every step of training
    fixed: tuple[str, ...] = ()  #: tensors whose scale and zero point the platform dictates
    zeros: tuple[str, ...] = ()  #: tensors whose zero point the platform dictates
    sums: tuple[tuple[str, float], ...] = ()  #: (weight, greatest sum of |quantized value| over one output channel)
    platform: str = ""
    rewrites: tuple[str, ...] = ()  #: one line for each rewrite applied or refused
    provenance: dict[str, Any] = field(default_factory=dict)  #: versions, hashes, seed, settings

    @property
    def published_provenance(self) -> dict[str, Any]:
        """The provenance that files and reports carry: without the digests of single samples.

        The digests would fill kilobytes of a microcontroller's memory and reveal whether a sample was used.
        """
        return {k: v for k, v in self.provenance.items() if k != "samples"}

    def _summary(self) -> Summary:
        runs = Counter(n.exec for n in self.nodes.values())
        quantized = sum(t.quantized for t in self.tensors.values())
        rows = [(t.name, t.role, t.format, _scales(t), t.origin or t.why) for t in self.tensors.values()]
        return Summary(
            f"Plan for {self.platform or 'no platform'}: {quantized} of {len(self.tensors)} tensors quantized",
            {
                "operators": ", ".join(f"{n} {how}" for how, n in runs.items()),
                "kernels": f"{len(self.groups)} of several operators" if self.groups else "",
                "ties": f"{len(self.ties)} groups of tensors share scale and zero point" if self.ties else "",
                "limits": f"{len(self.limits)} bounds on scales, such as: {self.limits[0]}" if self.limits else "",
                "fixed": f"{len(self.fixed)} tensors whose numbers the platform dictates" if self.fixed else "",
                "rewrites": f"{len(self.rewrites)}, such as: {self.rewrites[0]}" if self.rewrites else "",
            },
            ("tensor", "role", "format", "scale", "origin"),
            rows,
            "plan.tensors",
        )

    def before_rounding(self, values: Collection[str]) -> bool:
        """Check whether an operator reads one of these values before quantization; integer kernels cannot output it."""
        return any(value in values for value, _ in self.float_edges)

    def quantized(self, name: str | None) -> bool:
        return self.stored(name) is not None

    def layer_of(self, name: str) -> str:
        """Return the layer that computes or owns a tensor; the name of the tensor if there is none."""
        return self.tensors[name].layer or name

    def stored(self, name: str | None) -> Stored | None:
        """Return the storage of a tensor; None if it is float, or `name` is None."""
        return self.tensors[name].stored if name is not None and name in self.tensors else None

    def __getitem__(self, name: str) -> Stored:
        """Return the storage of a quantized tensor.

        Raises:
            PlanError: it is not quantized.
        """
        stored = self.stored(name)
        if stored is None and name not in self.tensors:
            near = UnknownNameError("tensor in the plan", name, self.tensors, hint="plan.tensors holds all of them")
            raise PlanError(near.what, **near.choices)
        if stored is None:
            raise PlanError(f"Tensor '{name}' is not quantized", got=self.tensors[name].why or None)
        return stored


def _scales(t: TensorPlan) -> float | str | None:
    if t.scale is None:
        return None
    return float(t.scale) if t.scale.dim() == 0 else f"{float(t.scale.min()):.3g}..{float(t.scale.max()):.3g}"


def hash_graph(graph: Graph) -> str:
    """Return the SHA-256 of structure and weights; it is equal for equal networks on any machine."""
    h = hashlib.sha256()
    for n in graph.nodes:
        h.update(repr((n.name, n.op, n.inputs, n.outputs, sorted(n.attrs.items(), key=lambda kv: kv[0]))).encode())
    for name in sorted(graph.weights):
        w = graph.weights[name].detach().contiguous()
        h.update(f"{name}{tuple(w.shape)}{w.dtype}".encode())
        h.update(w.reshape(-1).view(torch.uint8).numpy().data if w.numel() else b"")
    return h.hexdigest()


def provenance_of(graph: Graph, platform: Platform, data: str, **settings: Any) -> dict[str, Any]:
    """Return the provenance of a Plan as JSON data: versions, hashes and settings.

    The whole platform is included if exported files carry it (`Platform.metadata`).

    Args:
        data: hash of the calibration data.
    """
    described = platform.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {
        **({"platform": described} if platform.metadata else {}),
        "chipfit": __version__,
        "torch": torch.__version__,
        "graph_sha256": hash_graph(graph),
        "data_sha256": data,
        "platform_sha256": platform.hash,
        "settings": {k: v for k, v in settings.items() if v is not None},
    }
