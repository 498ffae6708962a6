"""Formats made narrower by hand: some of the numbers that the chip can hold, never others."""

from typing import Any

from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Format

#: what a grid may be -> what it may be narrowed to
_INSIDE = {
    "uniform": ("uniform", "symmetric", "power_of_two"),
    "symmetric": ("symmetric", "power_of_two"),
    "power_of_two": ("power_of_two",),
    "lut_symmetric": ("lut_symmetric", "lut_power_of_two"),
    "lut_power_of_two": ("lut_power_of_two",),
}
METHODS = tuple(_INSIDE)


def method_of(fmt: Format) -> str | None:
    """The word of METHODS for a format; None for logarithmic and floating-point codes."""
    pot = fmt.scale == "pot"
    if fmt.kind == "lut":
        return "lut_power_of_two" if pot else "lut_symmetric"
    if fmt.kind != "int":
        return None
    return "uniform" if fmt.zero == "any" else "power_of_two" if pot else "symmetric"


def constrain_format(
    fmt: Format, *, who: str, method: str | None = None, signed: bool | None = None, per: str | None = None
) -> Format:
    """`fmt` with one zero point, power-of-two scales, a given sign, or one scale for all channels.

    Args:
        who: the layer, for messages.
        method: of METHODS.
        signed: where the format leaves the sign to the data.
        per: "tensor" for one scale; "channel" is what a format per channel has already.

    Raises:
        UnsupportedError: the chip's format does not hold the numbers of the wanted one.
    """
    changes: dict[str, Any] = {}
    mine = method_of(fmt)
    if method is not None and method != mine:
        allowed = _INSIDE[mine] if mine else ()
        if method not in allowed:
            raise _refuse(who, "method", method, allowed)
        if mine == "uniform":
            changes["zero"] = (0, 1 << fmt.bits - 1) if fmt.signed is False else 0
        if method.endswith("power_of_two"):
            changes["scale"] = "pot"
    if signed is not None and signed != fmt.signed:
        if fmt.signed != "auto":
            raise _refuse(who, "sign", signed, (fmt.signed,))
        changes["signed"] = signed
    if per is not None and per != fmt.per:
        if (per, fmt.per) != ("tensor", "channel"):
            raise _refuse(who, "scale per", per, (fmt.per,))
        changes["per"] = per
    return fmt.model_copy(update=changes)


def _refuse(who: str, what: str, got: Any, allowed: tuple[Any, ...]) -> UnsupportedError:
    may, hint = ", ".join(map(str, allowed)) or "nothing else", "describe a chip that can, or leave the layer as it is"
    return UnsupportedError(f"The chip's format for '{who}' cannot have this {what}", got=got, allowed=may, hint=hint)
