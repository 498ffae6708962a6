"""What is decided about a network before any data are seen: the format of every tensor, ties, what stays float and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from chipfit.decide.ties import Binding
from chipfit.plan.record import NodePlan
from chipfit.platform.schema import Format
from chipfit.ranges import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor that will be quantized, and in which format."""

    name: str
    role: str  #: "activation", "weight" or "bias"
    format_name: str
    format: Format
    axis: int | None = None  #: channel axis when the format is per channel
    node: str = ""  #: node that makes (activation) or reads (weight, bias) it; "" for an input of the model
    rule: Rule | None = None  #: range rule that the user wants for it
    z_threshold: float | None = None
    range: tuple[float, float] | None = None  #: known beforehand


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Every decision that needs no data."""

    slots: Mapping[str, Slot] = field(default_factory=dict)  #: the tensors that will be quantized
    floats: Mapping[str, str] = field(default_factory=dict)  #: float tensors that were candidates -> reason
    nodes: Mapping[str, NodePlan] = field(default_factory=dict)
    bindings: tuple[Binding, ...] = ()  #: the platform's rules, with the tensors that they are about
    #: (value, node) pairs where that reader takes the value before its quantizer
    float_edges: frozenset[tuple[str, str]] = frozenset()
    groups: tuple[tuple[str, ...], ...] = ()  #: fused groups: node names, in execution order

    def with_bindings(self, more: Iterable[Binding]) -> Assignment:
        """The same with more rules to hold."""
        return replace(self, bindings=(*self.bindings, *more))
