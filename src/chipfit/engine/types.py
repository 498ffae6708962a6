"""Types of torch by their names in files and graphs: the only attributes of torch that such a name can reach."""

from typing import Any

import torch

from chipfit.errors import GraphError

_DTYPES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64
    complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
_ACCELERATORS = "cuda mps xpu hpu npu mtia xla maia ipu vulkan privateuseone".split()
_OTHERS = "strided contiguous_format channels_last channels_last_3d preserve_format"
#: name without "torch." -> dtype
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES.split()}
_CONSTANTS: dict[str, Any] = {**DTYPES, **{name: getattr(torch, name) for name in _OTHERS.split()}}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        GraphError: it does not exist.
    """
    if name not in DTYPES:
        raise GraphError(f"There is no number type named '{name}'", allowed=", ".join(DTYPES))
    return DTYPES[name]


def describe_value(x: Any) -> str:
    """Return the description of a value for messages, such as float32[2, 3]."""
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    return type(x).__name__


def constant_of(text: str) -> Any:
    """Return the dtype, layout or memory format of a name, or the device of "device:cpu".

    A graph is on the CPU wherever its model was captured, so that a file is read on machines without its accelerator.

    Raises:
        GraphError: the name is not allowed.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    kind, _, name = text.partition(":")
    device, _, index = name.partition(":")
    if kind == "device" and (not index or index.isdecimal()):
        if device in ("cpu", "meta"):
            return torch.device(name)
        if device in (*_ACCELERATORS, torch._C._get_privateuse1_backend_name()):
            return torch.device("cpu")
    raise GraphError(
        f"'{text}' is not a constant that a graph can hold", allowed=f"device:cpu, {', '.join(_CONSTANTS)}"
    )
