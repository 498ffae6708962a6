"""Widths of weights under a limit: what may be chosen, what it costs, and the choice with the least loss."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.decide.units import format_of
from chipfit.errors import ConfigError, PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear, products
from chipfit.plan.record import Plan
from chipfit.platform.match import resolve_node
from chipfit.platform.schema import Platform
from chipfit.registry import is_number
from chipfit.search.losses import Losses, losses
from chipfit.search.resources import peak, width
from chipfit.search.solve import Unit, solve

#: widths that are tried where a format leaves them free
FREE = (2, 3, 4, 5, 6, 8)
_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 1024.0, "MIB": 1024.0**2, "GIB": 1024.0**3}
#: "50%", "120 KB", a number
Amount = str | float | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a quantized model may take: a number of bytes, a text with a unit ("1.5 MB"), or a share ("50%").

    A share is of what the same tensors take in 8 bits.

    Raises:
        ConfigError: an amount that is not understood, or none at all.
    """

    weights: Amount = None  #: memory of quantized weights [byte]
    activations: Amount = None  #: most memory of values alive at one time, for one sample [byte]; it is not searched
    total: Amount = None  #: both together [byte]
    bops: Amount = None  #: multiplications x bits of weights x bits of their inputs, for one sample

    def __post_init__(self) -> None:
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        if not given:
            raise ConfigError("Limits that limit nothing", allowed=", ".join(f.name for f in fields(self)))
        for name, value in given.items():
            amount(value, 1.0, name)

    def to_record(self) -> dict[str, Amount]:
        """What is limited, as JSON data."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


def amount(value: Amount, whole: float, name: str) -> float:
    """An amount as a number; a share is of `whole`."""
    number, unit = value, ""
    if isinstance(value, str):
        parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([A-Za-z]*|%)\s*", value)
        number, unit = (float(parts[1]), parts[2].upper()) if parts else (None, "")
    if not (is_number(number) and number > 0 and (unit == "%" or unit in _UNITS)):
        allowed = f"a number above 0, a share like '50%', or a number with one of {', '.join(u for u in _UNITS if u)}"
        raise ConfigError(f"The limit on {name} is not understood", got=repr(value), allowed=allowed)
    return number / 100 * whole if unit == "%" else number * _UNITS[unit]


@dataclass(frozen=True)
class Choice:
    """What a search decided."""

    bits: dict[str, int]  #: weight -> width
    losses: Losses
    used: dict[str, float]  #: limit -> what the choice takes
    most: dict[str, float]  #: limit -> what it may take

    @property
    def predicted(self) -> float:
        """The loss that it adds, in nats for class scores."""
        return sum(self.losses[name][b] for name, b in self.bits.items())

    def __str__(self) -> str:
        """How many weights have which width, and what they take."""
        count = Counter(self.bits.values())
        widths = ", ".join(f"{n} of {b} bits" for b, n in sorted(count.items()))
        takes = ", ".join(f"{name} {self.used[name]:,.0f} of {most:,.0f}" for name, most in self.most.items())
        return f"widths of weights chosen: {widths}; {takes}; predicted loss {self.predicted:.3g}"


def candidates(
    graph: Graph, platform: Platform, plan: Plan, decided: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """The widths that each quantized weight of a linear operator may have while activations keep their formats.

    Args:
        decided: nodes whose widths the user has chosen.
    """
    out: dict[str, tuple[int, ...]] = {}
    for n in graph.nodes:
        now = plan.stored(n.weight) if is_linear(graph, n) and (n.weight, n.name) not in plan.float_edges else None
        if now is None:
            continue
        wide, data = {now.grid.bits}, plan.stored(n.data)
        changes = now.grid.table is None and n.name not in decided
        for o in resolve_node(platform, graph, n).options if changes else ():
            w, reads = (platform.formats.get(f) if isinstance(f, str) else None for f in (o.w, format_of(o, "in0")))
            same = data is None or reads is None or reads.free or reads.bits == data.grid.bits
            if w is not None and w.kind == "int" and same:
                wide |= set(FREE) if w.free else {w.bits}
        out[n.weight] = tuple(sorted(wide & set(out.get(n.weight, wide))))
    return out


def search(
    graph: Graph,
    platform: Platform,
    plan: Plan,
    limits: Limits,
    batches: Iterable[Sequence[Tensor]],
    stats: Mapping[str, TensorStats],
    seed: int = 0,
    decided: Collection[str] = (),
) -> Choice:
    """The widths of weights with the least loss inside the limits.

    Args:
        decided: nodes whose widths the user has chosen.

    Raises:
        PlanError: there is no choice, or none that keeps them.
    """
    widths = candidates(graph, platform, plan, decided)
    if not any(len(w) > 1 for w in widths.values()):
        what = f"'{platform.name}' leaves no width of a weight to choose"
        raise PlanError(what, hint="`chipfit platforms show` lists the formats of each operator")
    found = losses(graph, plan, batches, widths, stats, seed)
    units = _units(graph, plan, widths, found)
    alive = dict.fromkeys(("activations", "total"), peak(graph, plan))  # whatever the widths of weights are
    most = {k: amount(v, _whole(k, graph, plan, units, widths), k) for k, v in limits.to_record().items()}
    if most.get("activations", math.inf) < alive["activations"]:
        raise PlanError(
            "The values between operators take more than the limit on activations",
            got=f"{alive['activations']:,.0f} bytes at one time",
            allowed=f"{most['activations']:,.0f}",
            hint="widths of activations are not searched: choose fewer bits by overrides, or a smaller input",
        )
    picks = solve(units, {k: v - alive.get(k, 0.0) for k, v in most.items()})
    bits = {u.name: widths[u.name][k] for u, k in zip(units, picks, strict=True)}
    chosen = {r: sum((u.costs[r][k] if r in u.costs else 0.0) for u, k in zip(units, picks, strict=True)) for r in most}
    used = {r: alive.get(r, 0.0) + v for r, v in chosen.items()}
    return Choice(bits, found, used, most)


def _whole(name: str, graph: Graph, plan: Plan, units: Sequence[Unit], widths: Mapping[str, Sequence[int]]) -> float:
    """What a limit's tensors take in 8 bits."""
    weights = sum(u.costs[name][-1] / widths[u.name][-1] * 8 for u in units if name in u.costs)
    return weights + (peak(graph, plan, 8.0) if name in ("activations", "total") else 0.0)


def _units(graph: Graph, plan: Plan, widths: Mapping[str, Sequence[int]], found: Losses) -> list[Unit]:
    units = []
    for name, choices in widths.items():
        count = graph.weights[name].numel()
        times = sum(products(graph, n) * width(plan, n.data) for n in graph.nodes if _reads(graph, n, name))
        costs = {
            "weights": tuple(count * b / 8 for b in choices),
            "total": tuple(count * b / 8 for b in choices),
            "bops": tuple(times * b for b in choices),
        }
        units.append(Unit(name, tuple(found[name][b] for b in choices), costs))
    return units


def _reads(graph: Graph, node: Node, weight: str) -> bool:
    return is_linear(graph, node) and node.weight == weight


def as_overrides(graph: Graph, bits: Mapping[str, int], user: Any) -> list[tuple[Any, Any]]:
    """The choice as overrides, behind those of the user."""
    before = list(user.items()) if isinstance(user, Mapping) else list(user or ())
    chosen = [(n.name, {"bits": bits[n.weight]}) for n in graph.nodes if is_linear(graph, n) and n.weight in bits]
    return [*before, *chosen]
