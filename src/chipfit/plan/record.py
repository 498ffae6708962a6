"""The Plan: every decision about every tensor, as data that can be printed, compared, edited, saved and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chipfit.quantizers.grids import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How one tensor is stored on the chip, or why it stays float."""

    name: str  #: value or weight name in the Graph
    role: str  #: "activation", "weight" or "bias"
    layer: str = ""  #: the user's layer that makes or owns it
    op: str = ""  #: canonical operator of that node
    format: str = "float"  #: format name in the platform; "float" when not quantized
    grid: Grid | None = None  #: None when it stays float
    scale: torch.Tensor | None = None  #: float32, [] or [C]
    zero_point: torch.Tensor | None = None  #: int32, same shape as scale
    axis: int | None = None  #: channel axis when scale is [C]
    origin: str = ""  #: where the numbers came from: "mse over 8 batches", "tied to x", "fixed by rule", ...
    why: str = ""  #: why it stays float
    low: float | None = None  #: least value seen in calibration
    high: float | None = None  #: greatest value seen

    @property
    def quantized(self) -> bool:
        return self.grid is not None

    def with_(self, **changes: Any) -> TensorPlan:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """How one node runs on the chip."""

    name: str
    op: str
    layer: str = ""
    exec: str = "float"  #: "int", "float", "follow" (moves codes, no arithmetic) or "table"
    group: str = ""  #: name of the fused group's last node; "" when the node is alone
    why: str = ""  #: why it runs in float
    simd: int | None = None  #: output channels that one instruction makes; weights are padded to a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions for one model on one platform."""

    tensors: dict[str, TensorPlan] = field(default_factory=dict)
    nodes: dict[str, NodePlan] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()  #: fused groups: node names, in execution order
    #: (value, node) pairs where that reader takes the value before its quantizer (input-placed platforms)
    float_edges: frozenset[tuple[str, str]] = frozenset()
    ties: tuple[tuple[str, ...], ...] = ()  #: tensors that must keep one scale and zero point, also when trained
    platform: str = ""
    rewrites: tuple[str, ...] = ()  #: one line for each rewrite applied or refused
    provenance: dict[str, Any] = field(default_factory=dict)  #: versions, hashes, seed, settings

    def quantized(self, name: str | None) -> bool:
        return name is not None and name in self.tensors and self.tensors[name].quantized
