"""Operators of two reports in pairs, as data."""

from dataclasses import dataclass
from typing import Any

from chipfit.plan.diff import Differences
from chipfit.report.record import LayerRow
from chipfit.report.terminal import RUNS

#: field of a row that was decided -> its name in texts
DECIDED = {
    "exec": "runs in",
    "format": "format",
    "scale": "scale",
    "zero_point": "zero point",
    "weight_format": "weights",
}
#: least change of the noise of weights that counts as a difference [dB]
CHANGE = 0.05


@dataclass(frozen=True, slots=True)
class Pair:
    """One operator in two reports; None where a report does not have it."""

    layer: str
    op: str
    a: LayerRow | None
    b: LayerRow | None

    @property
    def differs(self) -> dict[str, tuple[Any, Any]]:
        """The decisions that differ, each with both values."""
        if self.a is None or self.b is None:
            return {}
        a, b = self.a, self.b
        both = {name: (getattr(a, field), getattr(b, field)) for field, name in DECIDED.items()}
        out = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
        x, y = a.weight_sqnr_db, b.weight_sqnr_db
        if (x is None) != (y is None) or (x is not None and y is not None and abs(x - y) > CHANGE):
            out["noise of weights [dB]"] = x, y
        return out

    @property
    def alike(self) -> bool:
        """True if both reports have the operator, decided equally."""
        return self.a is not None and self.b is not None and not self.differs


@dataclass(frozen=True)
class ComparisonData:
    """Two reports beside each other."""

    names: tuple[str, str]
    facts: dict[str, tuple[Any, Any]]  #: about the whole model, with units in the label -> both values
    pairs: tuple[Pair, ...]  #: operators, in the order of the first report, then those of the second alone
    plans: Differences | None = None  #: all differences of the plans; None where a side has no plan

    @property
    def equal(self) -> bool:
        """True if every operator was decided equally; and the plans, where there are both."""
        return all(p.alike for p in self.pairs) and not self.plans

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-able data."""
        layers = [
            {"layer": p.layer, "operator": p.op, "differs": list(p.differs), "a": _side(p.a), "b": _side(p.b)}
            for p in self.pairs
        ]
        plan = (
            None
            if self.plans is None
            else [{f: getattr(d, f) for f in ("where", "field", "a", "b")} for d in self.plans]
        )
        facts = [{"what": what, "a": a, "b": b} for what, (a, b) in self.facts.items()]
        return {
            "a": self.names[0],
            "b": self.names[1],
            "equal": self.equal,
            "facts": facts,
            "layers": layers,
            "plan": plan,
        }


def noise(p: Pair) -> tuple[float | None, float | None]:
    """Return the noise of an operator's results; of its weights where that of no side is known [dB]."""
    both = [[None if r is None else getattr(r, f) for r in (p.a, p.b)] for f in ("sqnr_db", "weight_sqnr_db")]
    x, y = both[0] if any(n is not None for n in both[0]) else both[1]
    return x, y


def _side(r: LayerRow | None) -> dict[str, Any] | None:
    fields = "name exec format scale zero_point weight_format sqnr_db weight_sqnr_db clip_low clip_high why".split()
    return None if r is None else {field: getattr(r, field) for field in fields}


def shown(x: Any) -> str:
    """Return a value as text; "-" if it is not known."""
    if x is None or x == "":
        return "-"
    return f"{x:.4g}" if isinstance(x, float) else RUNS.get(x, str(x))
