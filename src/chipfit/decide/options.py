"""Which joint formats a unit may take, and why it takes none."""

from collections.abc import Mapping, Sequence
from typing import Any

from chipfit.decide.groups import NO_FORMAT, FusedGroup, blocks_of, same_fields, variant_with_bits
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.platform.match import as_tuple, needs_weight
from chipfit.platform.schema import WIDEST, Option, Platform

#: what the user may say about bits -> the slots of an option that it is about, and what they hold
_BITS = {"bits": (("w",), "weights"), "activation_bits": (("in_", "out"), "activations")}

#: what the user may say about a result, which then is in codes, or about how data are read
_OF_RESULT = ("result", "activation_bits", "rule", "method", "range", "signed", "z_threshold", "inputs")

KEPT_BY_USER = "overrides keep it in float"

#: codes of one format can be read as another when these agree
_STORAGE = ("kind", "bits", "signed", "zero", "scale", "per", "range")


def with_applicable_options(graph: Graph, platform: Platform, unit: FusedGroup, kept: Mapping[str, str]) -> FusedGroup:
    """The unit with the options that it can take as it stands in this graph, and why it runs in float without any.

    Args:
        kept: values that stay float, whoever reads them, and why.

    Raises:
        UnsupportedError: the user asks for bits that no option offers.
    """
    options = _as_read(unit, [o for o in unit.resolved.options if _stores(o) and _in_blocks(graph, platform, unit, o)])
    sharing = [o for o in options if o.w in platform.formats and platform.formats[o.w].per == unit.choices.get("per")]
    options = sharing or options  # of the others one may be made narrower, or none is what the user asks for
    why = unit.float_reason or _obstacle(graph, platform, unit, options, kept)
    if why or unit.resolved.exec == "float" or not options:
        return unit.with_options((), why=why or unit.resolved.why)
    options = _with_result(platform, unit, options)
    return unit.with_options(_with_bits(platform, unit, options))


def execution_modes(unit: FusedGroup) -> tuple[str, ...]:
    """What the kernel can do where the user leaves it open: "codes", "float" (its result), "whole" (all in float)."""
    options = unit.resolved.options
    is_open = unit.resolved.exec != "float" and not unit.float_reason and unit.choices.keys().isdisjoint(_OF_RESULT)
    if not is_open or all(o.out == "float" for o in options):
        return ()
    # a product with weights would cost far more in float than any conversion
    weights = any(r.slot == "w" for r in unit.operands)
    found = ("float",) * bool(_in_float(options)) + ("whole",) * (not weights and not all(map(_stores, options)))
    return ("codes", *found) if found else ()


def _in_float(options: Sequence[Option]) -> list[Option]:
    """Those with a result in float that otherwise are what the first one with codes is."""
    first = next(o for o in options if o.out != "float")
    return [o for o in options if o.out == "float" and _stores(o) and (o.in_, o.w) == (first.in_, first.w)]


def _with_result(platform: Platform, unit: FusedGroup, options: list[Option]) -> list[Option]:
    """The options that hand over what is asked for: codes or floats."""
    asked = unit.choices.get("result")
    if asked is None:
        return options
    left = [o for o in options if (o.out == "float") is (asked == "float")]
    if not left:
        other = "codes" if asked == "float" else "float"
        what = f"'{unit.who}' cannot hand over its result in {asked} on '{platform.name}'"
        raise UnsupportedError(what, got=asked, allowed=other, hint="leave the layer out of `overrides`")
    return left


def _as_read(unit: FusedGroup, options: list[Option]) -> list[Option]:
    """The options that take their data as the user asks; unasked none rounds them itself where the first does not."""
    asked = unit.choices.get("inputs")
    if asked is None:
        return [o for o in options if o.reads != "dynamic" or options[0].reads == "dynamic"]
    wanted = [o for o in options if o.reads in ("", asked)]
    return wanted or options  # whether anyone has heard is seen at the end


def _in_blocks(graph: Graph, platform: Platform, unit: FusedGroup, option: Option) -> bool:
    """Whether blocks of the option's weights fit this one, where it has any."""
    fmt = platform.formats.get(option.w or "")
    w = unit.head.operand("in1" if unit.head.op == "MatMul" else "w")
    return fmt is None or fmt.per != "block" or (w is not None and bool(blocks_of(fmt, unit.head.op, graph.shape(w))))


def _stores(option: Option) -> bool:
    """Something of it is stored in codes."""
    written = option.in_ == "any" and option.out not in NO_FORMAT
    return option.in_ not in NO_FORMAT or option.w not in NO_FORMAT or written


def _obstacle(
    graph: Graph, platform: Platform, unit: FusedGroup, options: Sequence[Option], kept: Mapping[str, str]
) -> str:
    """Why this unit cannot run in integers although the platform has a rule for its operator."""
    in_codes = not options or any(o.reads not in ("dynamic", "float") for o in options)
    for o in unit.tail.outputs if in_codes else ():
        if kept.get(o, KEPT_BY_USER) != KEPT_BY_USER:
            return f"its result '{o}' stays float: {kept[o]}"
    # an integer kernel takes and gives codes; elsewhere quantizers belong to writers
    if platform.place.at != "outputs":
        for choice, what in (("bits", "weights"), ("activation_bits", "result")):
            if unit.choices.get(choice) == "float" and (in_codes or choice == "bits"):
                return f"overrides keep its {what} in float"
        for i in (i for i in unit.data if i in kept and in_codes):
            if kept[i] == KEPT_BY_USER:
                return f"overrides keep its input '{i}' in float"
            return f"its input '{i}' stays float: {kept[i]}"
    head = unit.head
    if head.outputs and not graph.is_float(head.output):
        return "its result is not a float tensor"
    if needs_weight(head.op) and not graph.is_weight(head.operand("w")):
        return "its weights are computed at run time"
    if all(graph.is_weight(i) for i in unit.data):
        return "all its inputs are constant"
    if not all(graph.is_float(i) for i in unit.data) and any(o.ins for o in unit.resolved.options):
        return "an input is not a float tensor"
    return ""


def _with_bits(platform: Platform, unit: FusedGroup, options: list[Option]) -> list[Option]:
    """Options with the weight and activation bits that the user asks for."""
    for choice, (slots, what) in _BITS.items():
        asked = unit.choices.get(choice)
        if asked == "float":  # quantizers belong to those who write: elsewhere it is an obstacle
            floats = ("w", "b") if choice == "bits" else ("out",)
            options = [o.model_copy(update={s: "float" for s in floats if getattr(o, s) is not None}) for o in options]
            continue
        widths = [_widths(platform, o, slots) for o in options]
        if asked is None or not any(widths):
            continue
        fitting = [o for o, bits in zip(options, widths, strict=True) if bits <= {asked}]
        options = fitting or [at for o in options if (at := _at_width(platform, o, slots, asked)) is not None]
        if not options:
            names = {n for o in unit.resolved.options for s in slots for n in as_tuple(getattr(o, s))}
            free = any(f.free for n, f in platform.formats.items() if n in names)
            widths += [set(range(1, WIDEST + 1))] * free
            allowed = ", ".join(map(str, sorted(set().union(*widths)))) + " bits"
            hint = "choose one of the allowed widths or leave the layer out of `overrides`"
            message = f"'{unit.who}' cannot have {asked}-bit {what} on '{platform.name}'"
            raise UnsupportedError(message, got=asked, allowed=allowed, hint=hint)
    return options


def _at_width(platform: Platform, option: Option, slots: Sequence[str], bits: int) -> Option | None:
    """The option with its formats of free width at another one; None where a slot has none of that width."""

    def at(name: Any) -> Any:
        free = isinstance(name, str) and name in platform.formats and platform.formats[name].free
        return (
            tuple(map(at, name))
            if isinstance(name, tuple)
            else variant_with_bits(platform, name, bits)
            if free
            else name
        )

    changed = option.model_copy(update={s: at(getattr(option, s)) for s in slots})
    return changed if _widths(platform, changed, slots) <= {bits} else None


def _widths(platform: Platform, option: Option, slots: Sequence[str]) -> set[int]:
    """Bits of the formats that an option names for some slots."""
    return {platform.formats[n].bits for s in slots for n in as_tuple(getattr(option, s)) if n in platform.formats}


def first_compatible_option(platform: Platform, unit: FusedGroup, formats: Mapping[str, str]) -> Option | None:
    """The first option that can read the unit's operands in the formats that they have already; None when none can."""

    def reads(option: Option, value: str, wanted: str | None) -> bool:
        if value not in formats:
            return True
        have = platform.formats[formats[value]]
        if wanted == "any":
            return not option.in_bits or have.bits <= max(option.in_bits)
        return wanted in NO_FORMAT or same_fields(have, platform.formats[wanted], *_STORAGE)

    options = unit.resolved.options
    return next((o for o in options if all(reads(o, *asked) for asked in unit.data_formats(o).items())), None)
