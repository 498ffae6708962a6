"""A canonical operator as a Keras layer, where no layer of Keras says it as well."""

from collections.abc import Sequence
from typing import Any

import keras

from chipfit.frameworks.keras.backend import dtype_here
from chipfit.frameworks.keras.forms import FORMS


@keras.saving.register_keras_serializable(package="chipfit")
class CanonicalOperation(keras.layers.Layer):
    """One canonical operator as a layer.

    Args:
        op: name of the operator.
        settings: its attributes.
        slots: what each input of the operator is: "x", the next tensor that the layer is called with; "-", absent; or
            dtype, whether it is trained, and shape of a weight of the layer, ["float32", true, 3, 4]. Weights are named
            w0, w1, ... by their slot.
    """

    def __init__(self, op: str, settings: dict[str, Any], slots: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.op, self.settings, self.slots = op, settings, list(slots)

    def build(self, input_shape: Any = None) -> None:
        self.held = [None if isinstance(s, str) else self._weight(f"w{k}", *s) for k, s in enumerate(self.slots)]
        self.built = True

    def _weight(self, name: str, dtype: str, trainable: bool, *shape: int) -> Any:
        given = {"dtype": dtype_here(dtype), "trainable": trainable, "shape": shape}
        return self.add_weight(name=name, initializer="zeros", **given)

    def call(self, inputs: Any) -> Any:
        given = iter(inputs if isinstance(inputs, (list, tuple)) else [inputs])
        operands = [
            next(given) if s == "x" else None if s == "-" else keras.ops.convert_to_tensor(w)
            for s, w in zip(self.slots, self.held, strict=True)
        ]
        while operands and operands[-1] is None:
            operands.pop()
        kernel: Any = FORMS[self.op].kernel  # `lower` makes this layer of no operator without
        return kernel(*operands, **{k: _tuples(v) for k, v in self.settings.items()})

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "op": self.op, "settings": self.settings, "slots": self.slots}


def _tuples(x: Any) -> Any:
    """Sequences as tuples, which JSON and Keras make lists of."""
    return tuple(_tuples(v) for v in x) if isinstance(x, (list, tuple)) else x
