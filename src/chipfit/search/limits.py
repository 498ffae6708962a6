"""Limits on the memory, operations and loss of a quantized model."""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, fields
from typing import Any

from chipfit.errors import ConfigError, UnknownNameError
from chipfit.registry import is_number

_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 1024.0, "MIB": 1024.0**2, "GIB": 1024.0**3}
#: limit that is about a whole file -> the limit on the tensors in it
OF_FILE = {"flash": "weights", "ram": "activations"}
_OF_TIME = "latency", "time", "cycles", "seconds"
#: "50%", "120 KB", a number
Amount = str | float | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the memory, operations or loss of a quantized model.

    Memory is a number of bytes, a text with a unit ("1.5 MB"), or a share ("50%") of what the same tensors take in 8
    bits; operations are a number or such a share. Inside these limits the bits with the least loss are chosen or, with
    a limit on the loss, those with the least memory of weights. `ram` and `flash` are a chip's own memories: bits
    change only where the network as it is does not fit.

    Raises:
        ConfigError: an amount is not valid, two limits are about the same memory, or there is no limit.
        UnknownNameError: there is no such limit; there is none on time, which platforms do not state.

    Examples:
        >>> from chipfit import Limits
        >>> Limits(weights="50%", ram="256 KB").weights
        '50%'
    """

    weights: Amount = None  #: memory of quantized weights [byte]
    activations: Amount = None  #: most memory of values alive at one time, for one sample [byte]
    total: Amount = None  #: both together [byte]
    bops: Amount = None  #: multiplications x bits of weights x bits of their inputs, for one sample
    #: that the widths may add, as it is predicted: KL divergence for class scores [nat], else share of outputs' energy
    loss: Amount = None
    ram: Amount = None  #: arena that TensorFlow Lite Micro needs for the `.tflite` file, for one sample [byte]
    flash: Amount = None  #: `.tflite` file [byte]
    #: memory of activations, here and in `total`, is that of the largest quantized value alone
    largest_value: bool = False
    #: operations are those of kernels that read their input alone; kernels whose input others read, too, do not count
    sole_readers: bool = False

    def __new__(cls, **given: Any) -> Limits:
        for name in given.keys() - {f.name for f in fields(cls)}:
            hint = "limit 'bops', and measure a file with Result.time(data)" if name in _OF_TIME else ""
            raise UnknownNameError("limit", name, [f.name for f in fields(cls)], hint=hint)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not self.to_record():
            raise ConfigError("Limits need at least one limit", allowed=", ".join(f.name for f in amounts()))
        for name, value in self.to_record().items():
            parse_amount(value, 1.0, name)
        for name, tensors in OF_FILE.items():
            if self.to_record().keys() >= {name} and (other := self.to_record().keys() & {tensors, "total"}):
                got = " and ".join([name, *sorted(other)])
                hint = f"`{name}` also holds what the file adds to the {tensors}"
                raise ConfigError("Two limits are about the same memory", got=got, allowed="one of them", hint=hint)

    def to_record(self) -> dict[str, Amount]:
        """Return the limits as JSON data."""
        return {f.name: v for f in amounts() if (v := getattr(self, f.name)) is not None}

    def of_file(self) -> dict[str, float]:
        """Return the limits that a file has to keep [byte]."""
        return {k: parse_amount(v, 0.0, k) for k, v in self.to_record().items() if k in OF_FILE}


def amounts() -> tuple[Field[Amount], ...]:
    """Return the fields of `Limits` that are amounts."""
    return fields(Limits)[:-2]


def parse_amount(value: Amount, whole: float, name: str) -> float:
    """Return an amount as a number; a share is one of `whole`."""
    number, unit = value, ""
    units = (
        {"": 1.0}
        | ({} if name in ("loss", *OF_FILE) else {"%": whole / 100})
        | ({} if name in ("loss", "bops") else _BYTES)
    )
    if isinstance(value, str):
        parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*|%)\s*", value)
        number, unit = (float(parts[1]), parts[2].upper()) if parts else (None, "")
    if not (is_number(number) and number > 0 and unit in units):
        allowed = ["a number above 0", *(["a share like '50%'"] if "%" in units else [])]
        allowed += [f"a number with one of {', '.join(_BYTES)}"] if "B" in units else []
        raise ConfigError(f"Limit on {name} is not a valid amount", got=repr(value), allowed=", or ".join(allowed))
    return number * units[unit]
