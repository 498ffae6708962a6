"""The joint formats that a group may take, once obstacles and overrides have been applied, and why it takes none."""

from collections.abc import Mapping, Sequence
from typing import Any

from chipfit.decide.groups import NO_FORMAT, FusedGroup, blocks_of, same_fields, variant_with_bits
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.operators.table import OPS
from chipfit.platform.match import as_tuple, needs_weight
from chipfit.platform.schema import WIDEST, Option, Platform

#: override of bits -> the slots of an option that it is about, and what they hold
_BITS = {"bits": (("w",), "weights"), "activation_bits": (("in_", "out"), "activations")}

#: overrides that decide between a quantized and a float result, or how data are read
_ABOUT_MODE = ("result", "activation_bits", "rule", "method", "range", "signed", "z_threshold", "inputs")

KEPT_BY_USER = "overrides keep it in float"

#: values of one format can be read as another if these fields agree
_STORAGE = ("kind", "bits", "signed", "zero", "scale", "per", "range")


def limit_options(graph: Graph, platform: Platform, group: FusedGroup, float_values: Mapping[str, str]) -> FusedGroup:
    """Return the group with the options that it can take in this graph, and with the reason if it takes none.

    Every override about options is applied here; `override_effects` checks whether it had an effect.

    Args:
        float_values: values that stay float, whatever reads them -> why.

    Raises:
        UnsupportedError: the user wants bits or a kind of result that no option offers.
    """
    options = [o for o in group.resolved.options if _quantizes(o) and _fits_blocks(graph, platform, group, o)]
    options = _with_input_mode(group, options)
    per = group.choices.get("per")
    # another granularity of weights is made from a finer one later, or refused there; see `constrain_format`
    options = [o for o in options if o.w in platform.formats and platform.formats[o.w].per == per] or options
    why = group.float_reason or _obstacle(graph, platform, group, options, float_values)
    if why or group.resolved.exec == "float" or not options:
        return group.with_options((), why=why or group.resolved.why)
    return group.with_options(_with_bits(platform, group, _with_result(platform, group, options)))


def execution_modes(group: FusedGroup) -> tuple[str, ...]:
    """Return what a kernel can do if no override decides: "codes", "float" (its result), "whole" (all in float)."""
    options = group.resolved.options
    first = next((o for o in options if o.out != "float"), None)
    if group.resolved.exec == "float" or is_overridden(group) or first is None:
        return ()
    moved = _moves_rows(group) and first.w not in NO_FORMAT  # the table has a format for each kind of result
    results = [o for o in options if o.out == "float" and _quantizes(o)]
    float_result = any(o.in_ == first.in_ and (moved or o.w == first.w) for o in results)
    # a product with weights would cost far more in float than any conversion
    whole = not any(r.slot == "w" for r in group.operands) and not all(map(_quantizes, options))
    modes = ("float",) * float_result + ("whole",) * whole
    return ("codes", *modes) if modes else ()


def without_shared_moves(graph: Graph, group: FusedGroup) -> FusedGroup:
    """Return the group without options that move rows of a table as quantized values, if others read the table too.

    Each may need it in another format. Options stay where there are no others.
    """
    if not _moves_rows(group) or len(graph.users().get(group.head.operand("w") or "", ())) < 2:
        return group
    left = [o for o in group.resolved.options if o.w in NO_FORMAT or o.out in NO_FORMAT]
    return group.with_options(left) if left else group


def _moves_rows(group: FusedGroup) -> bool:
    """Return whether a group gathers rows of a table."""
    return group.head.facts.moves and group.head.facts.weighted


def is_overridden(group: FusedGroup) -> bool:
    """Check whether an override decides between a quantized and a float result."""
    return bool(group.float_reason) or not group.choices.keys().isdisjoint(_ABOUT_MODE)


def first_compatible_option(platform: Platform, group: FusedGroup, formats: Mapping[str, str]) -> Option | None:
    """Return the first option that can read the group's data in the formats they have already; None if none can."""

    def reads(option: Option, value: str, wanted: str | None) -> bool:
        if value not in formats:
            return True
        have = platform.formats[formats[value]]
        if wanted == "any":
            return not option.in_bits or have.bits <= max(option.in_bits)
        return wanted in NO_FORMAT or same_fields(have, platform.formats[wanted], *_STORAGE)

    options = group.resolved.options
    return next((o for o in options if all(reads(o, *pair) for pair in group.data_formats(o).items())), None)


def _with_result(platform: Platform, group: FusedGroup, options: list[Option]) -> list[Option]:
    """Return the options with the kind of result that an override asks for: "codes" or "float"."""
    wanted = group.choices.get("result")
    left = [o for o in options if wanted is None or (o.out == "float") is (wanted == "float")]
    if not left:
        other = "codes" if wanted == "float" else "float"
        what = f"'{group.layer}' cannot have a result in {wanted} on '{platform.name}'"
        raise UnsupportedError(what, got=wanted, allowed=other, hint="leave the layer out of `overrides`")
    return left


def _with_input_mode(group: FusedGroup, options: list[Option]) -> list[Option]:
    """Return the options whose input mode an override asks for.

    Without an override dynamic options are left out, unless the first option is one.
    """
    wanted = group.choices.get("inputs")
    if wanted is None:
        return [o for o in options if o.input_mode != "dynamic" or options[0].input_mode == "dynamic"]
    return [o for o in options if o.input_mode in ("", wanted)] or options


def _fits_blocks(graph: Graph, platform: Platform, group: FusedGroup, option: Option) -> bool:
    """Return whether the blocks of the option's weight format, if it has any, divide the weight."""
    fmt = platform.formats.get(option.w or "")
    w = group.head.weight_operand
    return fmt is None or fmt.per != "block" or (w is not None and bool(blocks_of(fmt, group.head.op, graph.shape(w))))


def _quantizes(option: Option) -> bool:
    """Return whether an option quantizes its data, its weights or its result."""
    result = option.in_ == "any" and option.out not in NO_FORMAT
    return option.in_ not in NO_FORMAT or option.w not in NO_FORMAT or result


def _obstacle(
    graph: Graph, platform: Platform, group: FusedGroup, options: Sequence[Option], float_values: Mapping[str, str]
) -> str:
    """Return why a group cannot run in integers although the platform has a rule for its operator; "" if it can."""
    static = not options or any(o.input_mode not in ("dynamic", "float") for o in options)
    for o in group.tail.outputs if static else ():
        if float_values.get(o, KEPT_BY_USER) != KEPT_BY_USER:
            return f"its result '{o}' stays float: {float_values[o]}"
    if any(o.input_mode == "dynamic" for o in options) and graph.is_weight(group.head.data):
        return f"its data '{group.head.data}' are a constant, which no kernel quantizes at each call"
    # an integer kernel reads and writes quantized values; elsewhere quantizers belong to the operators that write
    if platform.place.at != "outputs":
        for choice, what in (("bits", "weights"), ("activation_bits", "result")):
            if group.choices.get(choice) == "float" and (static or choice == "bits"):
                return f"overrides keep its {what} in float"
        for i in (i for i in group.data if i in float_values and static):
            if float_values[i] == KEPT_BY_USER:
                return f"overrides keep its input '{i}' in float"
            return f"its input '{i}' stays float: {float_values[i]}"
    head = group.head
    if head.outputs and not graph.is_float(head.output) and not _returns_no_values(options):
        return "its result is not a float tensor"
    if why := _table_read_elsewhere(graph, group, options):
        return why
    if needs_weight(head.op) and not graph.is_weight(head.operand("w")):
        return "its weights are computed at run time"
    # a constant may be moved, to where the batch size decides: it is stored as the codes of the result
    moved = head.facts.moves and not all(map(graph.is_weight, filter(None, head.inputs)))
    if all(graph.is_weight(i) for i in group.data) and not moved:
        return "all its inputs are constant"
    if not all(graph.is_float(i) for i in group.data) and any(o.ins for o in group.resolved.options):
        return "an input is not a float tensor"
    return ""


def _table_read_elsewhere(graph: Graph, group: FusedGroup, options: Sequence[Option]) -> str:
    """Return why rows of a table cannot be moved as quantized values: a layer multiplies by it, in its own format."""
    head = group.head
    if not _moves_rows(group) or all(o.w in NO_FORMAT or o.out in NO_FORMAT for o in options):
        return ""
    others = [n for n in graph.users().get(head.operand("w") or "", ()) if n.op in OPS and not n.facts.moves]
    return f"its table is also the weight of '{others[0].display_name}'" if others else ""


def _returns_no_values(options: Sequence[Option]) -> bool:
    """Return whether kernels read quantized values and return something else, such as indices."""
    return all(o.out == "none" for o in options)


def _with_bits(platform: Platform, group: FusedGroup, options: list[Option]) -> list[Option]:
    """Return the options with the weight and activation bits that overrides want."""
    for choice, (slots, what) in _BITS.items():
        wanted = group.choices.get(choice)
        if wanted == "float":  # reached only where quantizers belong to the operators that write; see `_obstacle`
            floats = ("w", "b") if choice == "bits" else ("out",)
            options = [o.model_copy(update={s: "float" for s in floats if getattr(o, s) is not None}) for o in options]
            continue
        widths = [_widths(platform, o, slots) for o in options]
        if wanted is None or not any(widths):
            continue
        fitting = [o for o, bits in zip(options, widths, strict=True) if bits <= {wanted}]
        options = fitting or [at for o in options if (at := _at_width(platform, o, slots, wanted)) is not None]
        if not options:
            names = {n for o in group.resolved.options for s in slots for n in as_tuple(getattr(o, s))}
            is_free = any(f.free for n, f in platform.formats.items() if n in names)
            widths += [set(range(1, WIDEST + 1))] * is_free
            allowed = ", ".join(map(str, sorted(set().union(*widths)))) + " bits"
            hint = "choose one of the allowed widths or leave the layer out of `overrides`"
            message = f"'{group.layer}' cannot have {wanted}-bit {what} on '{platform.name}'"
            raise UnsupportedError(message, got=wanted, allowed=allowed, hint=hint)
    return options


def _at_width(platform: Platform, option: Option, slots: Sequence[str], bits: int) -> Option | None:
    """Return the option with its formats of free width at another width; None if a slot has no format of that width."""

    def at(name: Any) -> Any:
        is_free = isinstance(name, str) and name in platform.formats and platform.formats[name].free
        if isinstance(name, tuple):
            return tuple(map(at, name))
        return variant_with_bits(platform, name, bits) if is_free else name

    changed = option.model_copy(update={s: at(getattr(option, s)) for s in slots})
    return changed if _widths(platform, changed, slots) <= {bits} else None


def _widths(platform: Platform, option: Option, slots: Sequence[str]) -> set[int]:
    """Return the bits of the formats that an option has in some slots."""
    return {platform.formats[n].bits for s in slots for n in as_tuple(getattr(option, s)) if n in platform.formats}
