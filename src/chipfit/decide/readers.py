"""What the readers of a value ask of its format, seen through operators that only move codes. Both walk backwards."""

from collections.abc import Sequence

from chipfit.decide.groups import NO_FORMAT, FusedGroup
from chipfit.decide.options import first_compatible_option
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Platform


def limit_to_consumers(platform: Platform, units: Sequence[FusedGroup]) -> list[FusedGroup]:
    """The units without the options whose result is wider than every reader can take.

    A reader whose options name the widths that it reads (`in_bits`) bounds its operands; a mover hands the least bound
    on its results to everything that it moves.

    Raises:
        UnsupportedError: a unit has no option left.
    """
    bounds: dict[str, tuple[int, str]] = {}  # value -> widest codes that its readers take [bit], and who says so
    out: list[FusedGroup] = []
    for unit in reversed(units):
        bound = min((bounds[o] for o in unit.tail.outputs if o in bounds), default=None)
        asked = bound
        if not unit.is_pass_through:
            widths = [] if unit.float_reason else [max(o.in_bits) for o in unit.resolved.options if o.in_bits]
            asked = (max(widths), unit.who) if widths else None
            if bound is not None and not unit.float_reason:
                unit = _narrower(platform, unit, *bound)
        if asked is not None:
            bounds |= {i: min(bounds.get(i, asked), asked) for i in unit.data}
        out.append(unit)
    return out[::-1]


def _narrower(platform: Platform, unit: FusedGroup, bits: int, reader: str) -> FusedGroup:
    """The unit with the options whose result has at most so many bits."""
    options = unit.resolved.options
    widths = {o.out: platform.formats[o.out].bits for o in options if o.out in platform.formats}
    left = [o for o in options if widths.get(o.out or "", bits) <= bits]
    if options and not left:
        hint = "keep one of them in float with overrides"
        what = f"'{unit.who}' writes codes that its reader '{reader}' cannot take on '{platform.name}'"
        raise UnsupportedError(what, got=sorted(set(widths.values())), allowed=f"at most {bits} bits", hint=hint)
    return unit.with_options(left)


def formats_wanted_by_consumers(graph: Graph, platform: Platform, units: Sequence[FusedGroup]) -> dict[str, str]:
    """Value -> the format in which its readers want it; "any" where they take whatever is written.

    Of several readers the last in execution order decides, but one that takes anything gives way to one that does not.
    Results of the model are wanted in the first format of `place.io_out`, where that names no float. A mover passes the
    request for its result on to what it moves, unless others read that too: then the value keeps the format that its
    maker gives it, and the mover takes that one.

    Args:
        units: with the options that they can take (`options.with_applicable_options`).
    """
    given = () if platform.unlisted == "cpu" else platform.place.io_out  # what is handed out is stored; the CPU is free
    out = dict.fromkeys(graph.outputs if given and "float" not in given else (), next(iter(given), ""))
    users, inputs = graph.users(), set(graph.inputs)
    for unit in reversed(units):
        if unit.is_pass_through:
            wanted = next((out[o] for o in unit.tail.outputs if o in out), None)
            if wanted is None or unit.float_reason:
                continue
            asked = {i: wanted for i in unit.data if len(users.get(i, ())) == 1 or i in inputs}
        else:
            option = first_compatible_option(platform, unit, {})
            asked = {} if option is None else unit.data_formats(option)
        for value, name in asked.items():
            if (name == "any" or name not in NO_FORMAT) and out.get(value, "any") == "any":
                out[value] = name
    return out
