"""Places of the numbers of Graph and Plan in the lowered Keras model."""

from dataclasses import dataclass
from typing import Any

from chipfit.frameworks.keras.layers import NORM_VARIABLES, KerasQuantizationWrapper, KerasQuantizer


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of a weight of the graph in the model."""

    layer: str
    variable: str  #: its name, or its index in an opaque layer
    use: int = 0  #: index of the bias of a wrapper
    layout: str = ""  #: layout in Keras, see `kernel_layout`; "" if unchanged
    groups: int = 1  #: groups of a depthwise convolution

    def variable_in(self, model: Any) -> Any:
        """Return the Keras variable."""
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
    """The place of the scale of a planned tensor in the model."""

    tensor: str
    user_layer: str
    layer: str
    variable: str = ""  #: variable of a wrapper; "" in a holder

    def quantizer_in(self, model: Any) -> KerasQuantizer:
        """Return the quantizer that has the scale."""
        layer = model.get_layer(self.layer)
        return layer.weights_quantizers[self.variable] if self.variable else layer.activation_holder_quantizer
