"""Types of torch by the names that files and graphs give them: the only attributes of torch that a name can reach."""

from __future__ import annotations

from typing import Any

import torch

from chipfit.errors import GraphError

#: name without "torch." -> dtype
DTYPES: dict[str, torch.dtype] = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    )
}
_FORMATS = torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format
_CONSTANTS: dict[str, Any] = {
    **DTYPES,
    "strided": torch.strided,
    **{str(f).removeprefix("torch."): f for f in _FORMATS},
}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        GraphError: there is none.
    """
    if name not in DTYPES:
        raise GraphError(f"There is no type of numbers named '{name}'", allowed=", ".join(DTYPES))
    return DTYPES[name]


def constant_of(text: str) -> Any:
    """dtype, layout or memory format by its name, or the device of "device:cpu".

    Raises:
        GraphError: it is none of them.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    kind, _, name = text.partition(":")
    device, _, index = name.partition(":")
    if kind == "device" and device in ("cpu", "cuda", "mps", "xpu", "meta") and (not index or index.isdecimal()):
        return torch.device(name)
    raise GraphError(f"'{text}' is no constant that a graph can hold", allowed=f"device:cpu, {', '.join(_CONSTANTS)}")
