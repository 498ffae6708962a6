"""Differences between two plans."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.screen import Summary, SummaryRepr


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two plans."""

    where: str  #: "tensor 'conv1.weight'", "node 'relu'" or "plan"
    field: str  #: "format", "scale", ...; "" if only one plan has the tensor or node
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.where}: {self.field + ' ' if self.field else ''}{self.a} -> {self.b}"


class Differences(SummaryRepr, list[Difference]):
    """All differences between two plans."""

    def _summary(self) -> Summary:
        title = f"{len(self)} differences between the plans" if self else "The plans are equal"
        return Summary(
            title, {}, ("where", "what", "first", "second"), [(d.where, d.field, d.a, d.b) for d in self], "the list"
        )


def diff(a: Plan, b: Plan) -> Differences:
    """Return the differences between two plans, in the order of the first; empty if they are equal.

    Provenance is not compared: it records where numbers come from.
    """
    out = Differences()
    for kind, in_a, in_b in (("tensor", a.tensors, b.tensors), ("node", a.nodes, b.nodes)):
        for name in dict.fromkeys([*in_a, *in_b]):
            where, x, y = f"{kind} '{name}'", in_a.get(name), in_b.get(name)
            if x is None or y is None:
                out.append(Difference(where, "", *("absent" if t is None else "present" for t in (x, y))))
                continue
            for field, u, v in ((n, getattr(x, n), getattr(y, n)) for n in _field_names(x)):
                if not _equal(u, v):
                    out.append(Difference(where, field.replace("_", " "), _show(u, v), _show(v, u)))
    for field in ("platform", "groups", "float_edges", "ties", "limits", "fixed", "zeros", "sums", "rewrites"):
        u, v = getattr(a, field), getattr(b, field)
        if u != v:
            out.append(Difference("plan", field.replace("_", " "), _only(u, v), _only(v, u)))
    return out


def _field_names(x: TensorPlan | NodePlan) -> list[str]:
    """Return the names of a record's fields, with those of `stored` in its place."""
    names = [f.name for f in fields(x)]
    stored = [f.name for f in fields(Stored)]
    return [n for name in names for n in (stored if name == "stored" else [name])]


def _equal(u: Any, v: Any) -> bool:
    if isinstance(u, torch.Tensor) and isinstance(v, torch.Tensor):
        return torch.equal(u, v)
    return type(u) is type(v) and not isinstance(u, torch.Tensor) and u == v


def _show(u: Any, other: Any) -> str:
    if isinstance(u, torch.Tensor):
        if u.dim() == 0:
            return f"{u.item():.9g}"  # nine digits distinguish any two float32
        alike = isinstance(other, torch.Tensor) and other.shape == u.shape
        changed = f", {int((u != other).sum())} differ" if alike else ""
        return f"[{u.numel()}] in {u.min().item():.9g}..{u.max().item():.9g}{changed}" if u.numel() else "[0]"
    if u is None or u == "":
        return "-"
    if isinstance(u, Grid):
        return f"{u.bits} bit {u.qmin}..{u.qmax}"
    return repr(u) if isinstance(u, str) else str(u)


def _only(u: Any, v: Any) -> str:
    """Return the entries of `u` that `v` does not have."""
    if isinstance(u, str):
        return repr(u)
    return ", ".join(sorted(map(str, set(u) - set(v)))) or "-"
