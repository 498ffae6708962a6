"""float32 functions of the C library that runtimes use: the last bit of those in tables is the library's own."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch


@cache
def function_of(name: str) -> Callable[[float], float] | None:
    """Return the function of this process's C library; None if it exports none (Windows)."""
    try:
        f = getattr(ctypes.CDLL(None), f"{name}f")
    except (AttributeError, OSError, TypeError):
        return None
    f.restype, f.argtypes = ctypes.c_float, [ctypes.c_float]
    found: Callable[[float], float] = f
    return found


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a b + c in float32, rounded once (a fused multiply-add)."""
    return (a.double() * b.double() + c.double()).float()


def libm(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return exp, expm1, log, tanh or erfc of float32, element by element: for tables, not for tensors of a network.

    Without a C library, return the float32 nearest to the true result: the library's differs by one unit at most.
    """
    f = function_of(name)
    if f is None:
        module = torch.special if name == "erfc" else torch
        exact: torch.Tensor = getattr(module, name)(x.double())
        return exact.float()
    return torch.tensor([f(v) for v in x.reshape(-1).tolist()], dtype=torch.float32).reshape(x.shape)
