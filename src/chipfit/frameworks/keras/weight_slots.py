"""Where the numbers of Graph and Plan live in the lowered Keras model."""

from dataclasses import dataclass
from typing import Any

from chipfit.frameworks.keras.layers import NORM_VARIABLES, KerasQuantizationWrapper, KerasQuantizer


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where a weight of the graph lives in the model."""

    layer: str
    variable: str  #: its name; the number of it in an opaque layer
    use: int = 0  #: which of a wrapper's biases
    layout: str = ""  #: how Keras lays it out (`weights`); "": as it is
    groups: int = 1  #: of a depthwise convolution

    def variable_in(self, model: Any) -> Any:
        """The Keras variable."""
        layer = model.get_layer(self.layer)
        if isinstance(layer, KerasQuantizationWrapper):
            if self.use:
                return layer.bias(self.use)
            if self.variable in NORM_VARIABLES:
                return getattr(layer, self.variable)
            layer = layer.layer
        if self.variable.isdigit():
            return [*layer.trainable_variables, *layer.non_trainable_variables][int(self.variable)]
        return next(v for v in layer.variables if v.name == self.variable)


@dataclass(frozen=True, slots=True)
class ScaleSlot:
    """Where the scale of a planned tensor lives in the model."""

    tensor: str
    where: str  #: the user's layer
    layer: str
    variable: str = ""  #: of a wrapper; "" in a holder

    def quantizer_in(self, model: Any) -> KerasQuantizer:
        layer = model.get_layer(self.layer)
        return layer.weights_quantizers[self.variable] if self.variable else layer.activation_holder_quantizer
