"""Quantizers that stand alone, trainable or inferable, as layers that hold them use them; the same in every framework.

A trainable one makes what it trains on the layer that holds it, is told whether a step of training runs, and converts
to an inferable one. An inferable one is a function.
"""

from typing import Any

from chipfit.errors import UnsupportedError


def initialize(quantizer: Any, shape: Any, name: str, host: Any, has: str) -> None:
    """Let a trainable quantizer make what it trains on its host, for a tensor of this shape; others have nothing.

    Args:
        has: what the host has, as in "weights of torch".

    Raises:
        UnsupportedError: the quantizer says that it is for something else.
    """
    if _trains(quantizer):
        if (fits := getattr(quantizer, "fits", has)) != has:
            raise UnsupportedError(f"{type(quantizer).__name__} fits another framework or role", got=has, allowed=fits)
        quantizer.initialize_quantization(shape, name, host)


def apply(quantizer: Any, x: Any, training: Any) -> Any:
    """x through a quantizer; as it is where that is not enabled."""
    if _trains(quantizer):
        return quantizer(x, bool(training))
    return x if hasattr(quantizer, "initialize_quantization") else quantizer(x)


def to_inferable(quantizer: Any) -> Any:
    """What a trainable quantizer converts to; others stay."""
    return quantizer.convert2inferable() if _trains(quantizer) else quantizer


def _trains(quantizer: Any) -> bool:
    return hasattr(quantizer, "initialize_quantization") and getattr(quantizer, "enabled", True)
