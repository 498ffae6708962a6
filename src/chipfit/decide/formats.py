"""Platform x Graph -> formats: which one every tensor takes, what is tied, and what stays float and why.

No number is decided here: ranges come later, from data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chipfit.decide.assignment import Assignment
from chipfit.decide.options import first_fitting, usable
from chipfit.decide.readers import requested, within_reach
from chipfit.decide.slots import record
from chipfit.decide.units import NO_FORMAT, Decision, Unit, find_units
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Option, Platform


def assign(
    graph: Graph,
    platform: Platform,
    groups: Sequence[tuple[str, ...]] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Assignment:
    """Choose a format for every tensor.

    Args:
        graph: after folding.
        platform: the target.
        groups: fused groups of node names, from `passes.fuse`.
        overrides: node name -> {"float": reason} or `overrides.CHOICES`.

    Raises:
        UnsupportedError: an operator that the platform rejects outright, or bits that no format offers.
    """
    units = within_reach(platform, find_units(graph, platform, groups, overrides or {}))
    kept = frozenset(o for u in units if u.choices.get("activation_bits") == "float" for o in u.tail.outputs)
    # backwards, so that of several layers with impossible bits the last one is named
    units = [u if u.moves else usable(graph, platform, u, kept) for u in reversed(units)][::-1]
    requests = {v: f for v, f in requested(graph, platform, units).items() if v not in kept}
    walk = _Walk(graph, platform, requests, kept)
    walk.enter()
    decisions = [walk.mover(u) if u.moves else walk.kernel(u) for u in units]
    return record(graph, platform, groups, decisions, formats=walk.formats, codes=walk.codes, kept=kept)


@dataclass(slots=True)
class _Walk:
    """Forward over the units: each takes the formats of what it reads as given, and gives formats to what it writes.

    A kernel takes its first option that can read its operands as they are; what has no format yet takes the option's. A
    mover carries the one format of its operands on to its results, if they are codes or if a reader behind it wants
    codes. What a unit in float writes takes the format that its readers request: they round it themselves.
    """

    graph: Graph
    platform: Platform
    requests: Mapping[str, str]  #: value -> the format that its readers want
    kept: frozenset[str]  #: values that the user keeps in float, whoever reads them
    formats: dict[str, str] = field(default_factory=dict)  #: value -> format name
    codes: set[str] = field(
        default_factory=set
    )  #: values that exist on the chip as codes only: their maker writes codes

    def give(self, value: str, name: str | None) -> None:
        """Let a value have a format, if it can be stored in one."""
        if name is not None and name not in NO_FORMAT and value not in self.kept and self.graph.is_float(value):
            self.formats[value] = name

    def enter(self) -> None:
        """The model's inputs."""
        for value in self.graph.inputs:
            wanted = self.requests.get(value)
            if wanted == "any":  # as its maker writes it, and an input has none: the platform says
                wanted = next((f for f in self.platform.place.io_in if f not in NO_FORMAT), None)
            self.give(value, wanted)
            if value in self.formats and self.platform.place.at != "inputs":
                self.codes.add(value)

    def mover(self, unit: Unit) -> Decision:
        name = self._carried(unit)
        if name is not None:
            for value in unit.data:  # one with several inputs needs all of them in codes
                self.give(value, self.formats.get(value, name))
            self.codes.update(unit.tail.outputs)
        for value in unit.tail.outputs:
            self.give(value, name or self.requests.get(value))
        if name is None:
            return Decision(unit, None, "float", unit.kept_float or "it moves values that are not quantized")
        return Decision(unit, None, unit.resolved.exec)

    def _carried(self, unit: Unit) -> str | None:
        """The format in which a mover carries codes; None when it moves floats."""
        data = [i for i in unit.data if self.graph.is_float(i)]
        if unit.kept_float or not self.kept.isdisjoint(data) or not self.graph.is_float(unit.tail.output):
            return None
        wanted = any(self.requests.get(o, "any") != "any" for o in unit.tail.outputs)
        found = {self.formats[i] for i in data if i in self.formats and (i in self.codes or wanted)}
        return found.pop() if len(found) == 1 else None

    def kernel(self, unit: Unit) -> Decision:
        option = first_fitting(self.platform, unit, self.formats)
        if option is None:
            self._write(unit, None)
            return Decision(
                unit, None, "float", unit.resolved.why or f"no format of '{self.platform.name}' fits its inputs"
            )
        for value, name in unit.data_formats(option).items():
            if value not in self.formats:
                self.give(value, name)
        self._write(unit, option)
        return Decision(unit, option, unit.resolved.exec)

    def _write(self, unit: Unit, option: Option | None) -> None:
        """Formats of what a kernel writes."""
        if option is not None and option.out not in NO_FORMAT:
            self.codes.update(unit.tail.outputs)
        for value in unit.tail.outputs:
            if option is None or option.out in NO_FORMAT:
                self.give(value, self.requests.get(value))
            elif option.out == "same":
                self.give(value, self.formats.get(next(iter(unit.data), "")))
            else:
                self.give(value, option.out)
