"""The format of every value: what consumers want, in a walk backwards, then what each group does, in a walk forwards.

Both see through pass-through operators, which move quantized values without arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chipfit.decide.groups import NO_FORMAT, FusedGroup, same_fields
from chipfit.decide.options import first_compatible_option
from chipfit.decide.overrides import MOVES_FLOATS
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Exec, Option, Platform

WEIGHTS_ONLY = "only its weights are quantized"


class TooWide(UnsupportedError):
    """A result is wider than one of its consumers can read."""

    value: str  #: read by the consumer, perhaps behind pass-through operators
    reader: str  #: the node that reads it
    bits: int  #: widest format that the consumer reads


def limit_to_consumers(platform: Platform, groups: Sequence[FusedGroup]) -> list[FusedGroup]:
    """Return the groups without the options whose result is wider than a consumer can read.

    A consumer whose options list the widths that they read (`in_bits`) limits its data; a pass-through operator passes
    the least limit of its results on to all its data.

    Raises:
        TooWide: a group has no option left.
    """
    #: value -> (widest format that its consumers read [bit], layer of the consumer, what it reads, the node that reads)
    limits: dict[str, tuple[int, str, str, str]] = {}
    out: list[FusedGroup] = []
    for group in reversed(groups):
        limit = min((limits[o] for o in group.tail.outputs if o in limits), default=None)
        own = dict.fromkeys(group.data, limit) if limit is not None else {}
        if not group.is_pass_through:
            widths = [] if group.float_reason else [max(o.in_bits) for o in group.resolved.options if o.in_bits]
            reads = [r for r in group.operands if r.is_data and widths]
            own = {r.tensor: (max(widths), group.layer, r.tensor, r.node.name) for r in reads}
            if limit is not None and not group.float_reason:
                group = _limited(platform, group, *limit)
        limits |= {i: min(limits.get(i, new), new) for i, new in own.items()}
        out.append(group)
    return out[::-1]


def _limited(platform: Platform, group: FusedGroup, bits: int, consumer: str, value: str, reader: str) -> FusedGroup:
    """Return the group with the options whose result has at most so many bits."""
    options = group.resolved.options
    widths = {o.out: platform.formats[o.out].bits for o in options if o.out in platform.formats}
    left = [o for o in options if widths.get(o.out or "", bits) <= bits]
    if options and not left:
        hint = "keep one of them in float with overrides"
        what = f"The result of '{group.layer}' is wider than its consumer '{consumer}' can read on '{platform.name}'"
        error = TooWide(what, got=sorted(set(widths.values())), allowed=f"at most {bits} bits", hint=hint)
        error.value, error.reader, error.bits = value, reader, bits
        raise error
    return group.with_options(left)


def formats_wanted_by_consumers(graph: Graph, platform: Platform, groups: Sequence[FusedGroup]) -> dict[str, str]:
    """Return value -> the format that its consumers want; "any" if they read whatever is written.

    Of several consumers the last in execution order decides, unless it reads "any". Outputs of the model are wanted in
    the first format of `place.io_out`, if that lists no float. A pass-through operator passes the format wanted of its
    result on to its data, unless other nodes read them too, which do not all do so: then the data keep the format of
    their producer. On a chip without a float unit, what one reader wants in integers is in integers for all.

    Args:
        groups: with the options that they can take (`options.limit_options`).
    """
    given = () if platform.unlisted == "cpu" else platform.place.io_out  # the CPU may return outputs in any format
    out = dict.fromkeys(graph.outputs if given and "float" not in given else (), next(iter(given), ""))
    users, inputs, passed = graph.users(), set(graph.inputs), dict[tuple[str, str], set[str]]()
    for group in reversed(groups):
        if group.is_pass_through:
            wanted = next((out[o] for o in group.tail.outputs if o in out), None)
            if wanted is None or group.float_reason:
                continue
            for i in group.data:
                moving = {n.name for n in group.nodes if i in n.inputs and n.facts.moves}
                passed.setdefault((i, wanted), set()).update(moving)
            alone = {i for i in group.data if len(users.get(i, ())) == 1 or i in inputs}
            agreed = {i for i in group.data if passed[i, wanted] == {n.name for n in users.get(i, ())}}
            formats = dict.fromkeys(alone | agreed if platform.float_unit else group.data, wanted)
        else:
            option = first_compatible_option(platform, group, {})
            formats = {} if option is None else group.data_formats(option)
        for value, name in formats.items():
            if (name == "any" or name not in NO_FORMAT) and out.get(value, "any") == "any":
                out[value] = name
    return out


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The decision how a group runs."""

    group: FusedGroup
    option: Option | None  #: None for a group in float and for a pass-through operator
    exec: Exec
    why: str = ""  #: why it runs in float

    @property
    def integer(self) -> bool:
        return self.exec != "float"


def propagate_formats(
    graph: Graph,
    platform: Platform,
    groups: Sequence[FusedGroup],
    float_values: Mapping[str, str],
    inputs: Mapping[str, Mapping[str, Any]],
) -> FormatPropagation:
    """Decide every group.

    Args:
        groups: with the options that they can take (`options.limit_options`).
        float_values: values that stay float, whatever reads them -> why.
        inputs: input of the model -> overrides.

    Raises:
        UnsupportedError: an input cannot have the bits that overrides want.
    """
    wanted = formats_wanted_by_consumers(graph, platform, groups)
    wanted = {v: f for v, f in wanted.items() if v not in float_values}
    out = FormatPropagation(graph, platform, wanted, float_values, inputs)
    out.decisions += map(out.decide, groups)
    return out


@dataclass(slots=True)
class FormatPropagation:
    """The walk forwards: groups read their data in the formats decided so far, and decide the formats of their results.

    A kernel uses its first option that can read its data as they are; data without a format yet get the option's. A
    pass-through operator gives the format of its data to its results, if the data are quantized or a later consumer
    wants them quantized. The result of a group in float gets the format that its consumers want: they quantize it.
    """

    graph: Graph
    platform: Platform
    wanted: Mapping[str, str]  #: value -> the format that its consumers want
    float_values: Mapping[str, str]  #: values that stay float, whatever reads them -> why
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  #: input of the model -> overrides
    formats: dict[str, str] = field(default_factory=dict)  #: value -> format name
    #: values that exist on the chip only as quantized values: their producer outputs them so
    quantized_outputs: set[str] = field(default_factory=set)
    decisions: list[GroupDecision] = field(default_factory=list)

    def __post_init__(self) -> None:
        for value in self.graph.inputs:
            self._set(value, self._format_of_input(value))
            if value in self.formats and self.platform.place.at != "inputs":
                self.quantized_outputs.add(value)

    def _format_of_input(self, value: str) -> str | None:
        """Return the format of an input: what consumers want; the platform decides if they read what is written."""
        name, bits = self.wanted.get(value), self.inputs.get(value, {}).get("activation_bits")
        listed = [f for f in (self.platform.place.io_in if name == "any" else (name,)) if f not in (*NO_FORMAT, None)]
        widths = {f: self.platform.formats[f].bits for f in listed}
        if isinstance(bits, int) and widths and bits not in widths.values():
            allowed = ", ".join(map(str, sorted({*widths.values()}))) + " bits"
            raise UnsupportedError(f"Input '{value}' cannot have {bits} bits", got=bits, allowed=allowed)
        return next((f for f in listed if not isinstance(bits, int) or widths[f] == bits), None)

    def decide(self, group: FusedGroup) -> GroupDecision:
        """Decide how a group runs; all groups before it are decided."""
        return self._pass_through(group) if group.is_pass_through else self._kernel(group)

    def _set(self, value: str, name: str | None) -> None:
        """Give a value a format, if it can be stored in one."""
        if name is not None and name not in NO_FORMAT and value not in self.float_values and self.graph.is_float(value):
            self.formats[value] = name

    def _pass_through(self, group: FusedGroup) -> GroupDecision:
        name = self._moved_format(group)
        if name is not None:
            for value in group.data:  # an operator with several inputs needs all of them quantized
                self._set(value, self.formats.get(value, name))
            self.quantized_outputs.update(group.tail.outputs)
        for value in group.tail.outputs:
            self._set(value, name or self.wanted.get(value))
        if name is None:
            return GroupDecision(group, None, "float", group.float_reason or MOVES_FLOATS)
        return GroupDecision(group, None, group.resolved.exec)

    def _moved_format(self, group: FusedGroup) -> str | None:
        """Return the format of the quantized values that a pass-through operator moves; None if it moves floats."""
        data, result = [i for i in group.data if self.graph.is_float(i)], group.tail.output
        stays_float = not self.float_values.keys().isdisjoint((*data, result))
        if group.float_reason or stays_float or not self.graph.is_float(result):
            return None
        if data and all(map(self.graph.is_weight, data)):
            return self._format_of_moved_constant(group)
        wanted = any(self.wanted.get(o, "any") != "any" for o in group.tail.outputs)
        names = {self.formats[i] for i in data if i in self.formats and (i in self.quantized_outputs or wanted)}
        return names.pop() if len(names) == 1 else None

    def _format_of_moved_constant(self, group: FusedGroup) -> str | None:
        """Return the format in which a constant is moved, such as a token that is repeated for each sample.

        It is what consumers want, or what values have that an operator joins it with; without a float unit, the first.
        """
        if not group.resolved.options:
            return None
        readers = [n for n in self.graph.users().get(group.tail.output, ()) if n.facts.moves]
        joined = (self.formats[i] for n in readers for i in n.inputs if i in self.quantized_outputs)
        names = [self.wanted.get(group.tail.output), next(joined, None)]
        names += [] if self.platform.float_unit else [group.resolved.options[0].out]
        return next((name for name in names if name in self.platform.formats), None)

    def _kernel(self, group: FusedGroup) -> GroupDecision:
        option = first_compatible_option(self.platform, group, self.formats)
        if option is not None:
            for value, name in group.data_formats(option).items():
                if value not in self.formats:
                    self._set(value, name)
        self._set_results(group, option)
        if option is None:
            why = group.resolved.why or f"no format of '{self.platform.name}' fits its inputs"
            return GroupDecision(group, None, "float", why)
        if option.input_mode == "float" and group.data:
            return GroupDecision(group, option, "float", WEIGHTS_ONLY)
        return GroupDecision(group, option, group.resolved.exec)

    def _set_results(self, group: FusedGroup, option: Option | None) -> None:
        """Give the results of a kernel their formats."""
        in_float = option is None or option.out in NO_FORMAT
        if not in_float:
            self.quantized_outputs.update(group.tail.outputs)
        for value in group.tail.outputs:
            name = option.out if option else None
            if option and option.state and value == group.tail.outputs[-1]:
                name = option.state
            if in_float:
                wanted = self.wanted.get(value)
                name = wanted if option is None or self._keeps_one_type(group, wanted) else None
            elif name == "same":
                name = self.formats.get(next(iter(group.data), ""))
            self._set(value, name)

    def _keeps_one_type(self, group: FusedGroup, wanted: str | None) -> bool:
        """Return whether a float result stored as `wanted` keeps the rule that a kernel stores all in one type."""
        formats = self.platform.formats
        typed = any(r.hard and not {"out", "outs"}.isdisjoint(r.dtype or ()) for r in group.resolved.rules)
        if wanted not in formats or not typed:
            return True
        result, data = formats[wanted], [formats[self.formats[i]] for i in group.data if i in self.formats]
        return all(same_fields(result, f, "bits", "signed") or "auto" in (f.signed, result.signed) for f in data)
