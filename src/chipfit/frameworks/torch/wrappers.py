"""A layer that computes with rounded weights, and a place that rounds activations, to be used layer by layer."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from chipfit.errors import UnknownNameError
from chipfit.quantizers.hosting import apply, initialize, to_inferable


class PytorchQuantizationWrapper(nn.Module):
    """A layer that computes with rounded weights; its own, unrounded ones are kept, and trained.

    Args:
        layer: of any class; it is copied.
        weights_quantizers: name of a parameter -> its quantizer: trainable, inferable, or any function.
    """

    weights_quantizers: dict[str, Any]

    def __init__(self, layer: nn.Module, weights_quantizers: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.weights_quantizers = {}
        for name, quantizer in (weights_quantizers or {}).items():
            self.add_weights_quantizer(name, quantizer)

    def add_weights_quantizer(self, name: str, quantizer: Any) -> None:
        """Round a parameter; a trainable quantizer puts what it trains on this module.

        Raises:
            UnknownNameError: the layer has no parameter of that name.
        """
        if name not in (known := dict(self.layer.named_parameters())):
            raise UnknownNameError(f"parameter of {type(self.layer).__name__}", name, known)
        self.weights_quantizers[name] = quantizer
        initialize(quantizer, self.weight_of(name).shape, name, self, "weights of torch")

    def weight_of(self, name: str) -> torch.Tensor:
        """A parameter of the layer, unrounded."""
        return self.layer.get_parameter(name)

    def get_quantized_weights(self) -> dict[str, torch.Tensor]:
        """The weights that the layer computes with, by name, rounded as they are now."""
        return {n: apply(q, self.weight_of(n), self.training) for n, q in self.weights_quantizers.items()}

    def convert_to_inferable_quantizers(self) -> None:
        """Leave training: every trainable quantizer becomes the inferable one that it converts to."""
        self.weights_quantizers = {n: to_inferable(q) for n, q in self.weights_quantizers.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.layer, self.get_quantized_weights(), args, kwargs)


class PytorchActivationQuantizationHolder(nn.Module):
    """Stores the result of a layer as the chip does: rounds it.

    Args:
        activation_holder_quantizer: trainable, inferable, or any function.
    """

    def __init__(self, activation_holder_quantizer: Any) -> None:
        super().__init__()
        self.activation_holder_quantizer = activation_holder_quantizer
        initialize(activation_holder_quantizer, None, "activation_holder_quantizer", self, "activations of torch")

    def convert_to_inferable_quantizers(self) -> None:
        """Leave training: a trainable quantizer becomes the inferable one that it converts to."""
        self.activation_holder_quantizer = to_inferable(self.activation_holder_quantizer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return apply(self.activation_holder_quantizer, inputs, self.training)
