"""The calls that a layer of any framework makes to the quantizers that a user attached to it.

A trainable quantizer creates its parameters on the layer, quantizes given the training flag, and converts to an
inferable one. An inferable quantizer is a function.
"""

from typing import Any

from chipfit.errors import UnsupportedError


def initialize(quantizer: Any, shape: Any, name: str, host: Any, has: str) -> None:
    """Let a quantizer create its parameters on the host, for a tensor of this shape.

    Args:
        has: framework and role, as in "weights of torch".

    Raises:
        UnsupportedError: the quantizer is for another framework or role.
    """
    if hasattr(quantizer, "initialize_quantization") and getattr(quantizer, "enabled", True):
        if (fits := getattr(quantizer, "fits", has)) != has:
            what = f"{type(quantizer).__name__} is for another framework or role"
            raise UnsupportedError(what, got=has, allowed=fits)
        quantizer.initialize_quantization(shape, name, host)


def apply(quantizer: Any, x: Any, training: Any) -> Any:
    """Return x quantized; x itself if the quantizer is not enabled."""
    if not _trains(quantizer):
        return quantizer(x)
    return quantizer(x, bool(training)) if getattr(quantizer, "enabled", True) else x


def to_inferable(quantizer: Any) -> Any:
    """Return the inferable quantizer of a trainable one; others, and those that are not enabled, unchanged."""
    return quantizer.convert2inferable() if _trains(quantizer) and getattr(quantizer, "enabled", True) else quantizer


class WeightsHost:
    """The base of layers that round weights of another layer, under the names that MCT's wrappers have."""

    weights_quantizers: dict[str, Any]  #: name of a weight -> its quantizer

    @property
    def is_weights_quantization(self) -> bool:
        """Return whether any weight is rounded."""
        return self.num_weights_quantizers > 0

    @property
    def num_weights_quantizers(self) -> int:
        """The number of weights that are rounded."""
        return len(self.weights_quantizers)

    def convert_to_inferable_quantizers(self) -> None:
        """End training: convert every trainable quantizer to its inferable one."""
        self.weights_quantizers = {n: to_inferable(q) for n, q in self.weights_quantizers.items()}


class ActivationHost:
    """The base of layers that round the result of another layer, under the names that MCT's holders have."""

    activation_holder_quantizer: Any

    def convert_to_inferable_quantizers(self) -> None:
        """End training: convert a trainable quantizer to its inferable one."""
        self.activation_holder_quantizer = to_inferable(self.activation_holder_quantizer)


def _trains(quantizer: Any) -> bool:
    return hasattr(quantizer, "convert2inferable")
