"""The format of every value, and what every unit does: one walk forward over the units."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from chipfit.decide.groups import NO_FORMAT, FusedGroup, same_fields
from chipfit.decide.options import first_compatible_option
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Exec, Option, Platform

WEIGHTS_ONLY = "its weights alone are stored in codes"


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """What a unit does."""

    unit: FusedGroup
    option: Option | None  #: None for a unit in float, or one that moves what it reads
    exec: Exec
    why: str = ""  #: why it runs in float

    @property
    def integer(self) -> bool:
        return self.exec != "float"


@dataclass(slots=True)
class FormatPropagation:
    """Units take the formats of what they read as given, and give formats to what they write.

    A kernel takes its first option that can read its operands as they are; what has no format yet takes the option's. A
    mover carries the one format of its operands on to its results, if they are codes or if a reader behind it wants
    codes. What a unit in float writes takes the format that its readers request: they round it themselves.
    """

    graph: Graph
    platform: Platform
    requests: Mapping[str, str]  #: value -> the format that its readers want
    kept: Mapping[str, str]  #: values that stay float, whoever reads them -> why
    of: dict[str, str] = field(default_factory=dict)  #: value -> format name
    #: values that exist on the chip as codes only: their maker writes codes
    quantized_outputs: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for value in self.graph.inputs:
            wanted = self.requests.get(value)
            if wanted == "any":  # as its maker writes it, and an input has none: the platform says
                wanted = next((f for f in self.platform.place.io_in if f not in NO_FORMAT), None)
            self._give(value, wanted)
            if value in self.of and self.platform.place.at != "inputs":
                self.quantized_outputs.add(value)

    def decide(self, unit: FusedGroup) -> GroupDecision:
        """What a unit does; all before it are decided."""
        return self._mover(unit) if unit.is_pass_through else self._kernel(unit)

    def _give(self, value: str, name: str | None) -> None:
        """Let a value have a format, if it can be stored in one."""
        if name is not None and name not in NO_FORMAT and value not in self.kept and self.graph.is_float(value):
            self.of[value] = name

    def _mover(self, unit: FusedGroup) -> GroupDecision:
        name = self._carried(unit)
        if name is not None:
            for value in unit.data:  # one with several inputs needs all of them in codes
                self._give(value, self.of.get(value, name))
            self.quantized_outputs.update(unit.tail.outputs)
        for value in unit.tail.outputs:
            self._give(value, name or self.requests.get(value))
        if name is None:
            return GroupDecision(unit, None, "float", unit.float_reason or "it moves values that are not quantized")
        return GroupDecision(unit, None, unit.resolved.exec)

    def _carried(self, unit: FusedGroup) -> str | None:
        """The format in which a mover carries codes; None when it moves floats."""
        data = [i for i in unit.data if self.graph.is_float(i)]
        floats = {*data, unit.tail.output}
        if unit.float_reason or not floats.isdisjoint(self.kept) or not self.graph.is_float(unit.tail.output):
            return None
        wanted = any(self.requests.get(o, "any") != "any" for o in unit.tail.outputs)
        found = {self.of[i] for i in data if i in self.of and (i in self.quantized_outputs or wanted)}
        return found.pop() if len(found) == 1 else None

    def _kernel(self, unit: FusedGroup) -> GroupDecision:
        option = first_compatible_option(self.platform, unit, self.of)
        if option is None:
            self._write(unit, None)
            why = unit.resolved.why or f"no format of '{self.platform.name}' fits its inputs"
            return GroupDecision(unit, None, "float", why)
        for value, name in unit.data_formats(option).items():
            if value not in self.of:
                self._give(value, name)
        self._write(unit, option)
        if option.reads == "float" and unit.data:
            return GroupDecision(unit, option, "float", WEIGHTS_ONLY)
        return GroupDecision(unit, option, unit.resolved.exec)

    def _write(self, unit: FusedGroup, option: Option | None) -> None:
        """FormatPropagation of what a kernel writes."""
        if option is not None and option.out not in NO_FORMAT:
            self.quantized_outputs.update(unit.tail.outputs)
        for value in unit.tail.outputs:
            if option is None or option.out in NO_FORMAT:
                wanted = self.requests.get(value)
                self._give(value, wanted if option is None or self._of_its_type(unit, wanted) else None)
            elif option.out == "same":
                self._give(value, self.of.get(next(iter(unit.data), "")))
            else:
                self._give(value, option.out)

    def _of_its_type(self, unit: FusedGroup, wanted: str | None) -> bool:
        """Whether a kernel whose result is float stays one where it is stored so: some store all in one type."""
        formats = self.platform.formats
        typed = any(r.hard and not {"out", "outs"}.isdisjoint(r.dtype or ()) for r in unit.resolved.rules)
        if wanted not in formats or not typed:
            return True
        have = [formats[self.of[i]] for i in unit.data if i in self.of]
        return all(
            same_fields(formats[wanted], fmt, "bits", "signed") or "auto" in (fmt.signed, formats[wanted].signed)
            for fmt in have
        )
