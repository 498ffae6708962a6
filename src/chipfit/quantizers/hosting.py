"""Quantizers that stand alone, trainable or inferable, as layers that hold them use them; the same in every framework.

A trainable one makes what it trains on the layer that holds it, is told whether a step of training runs, and converts
to an inferable one. An inferable one is a function.
"""

from typing import Any


def start(quantizer: Any, shape: Any, name: str, host: Any) -> None:
    """Let a trainable quantizer make what it trains on its host, for a tensor of this shape; others have nothing."""
    if hasattr(quantizer, "initialize_quantization"):
        quantizer.initialize_quantization(shape, name, host)


def rounded(quantizer: Any, x: Any, training: Any) -> Any:
    """x through a quantizer."""
    return quantizer(x, bool(training)) if hasattr(quantizer, "initialize_quantization") else quantizer(x)


def inferable(quantizer: Any) -> Any:
    """What a trainable quantizer converts to; others stay."""
    return quantizer.convert2inferable() if hasattr(quantizer, "convert2inferable") else quantizer
