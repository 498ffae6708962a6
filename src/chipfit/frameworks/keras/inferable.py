"""Inferable quantizers for Keras: those of `quantizers.inferable`, on any backend; a model saves them."""

from typing import Any

import keras

from chipfit.frameworks.keras.backend import KerasOps
from chipfit.quantizers import inferable


class _OnKeras:
    ops = KerasOps
    ends_are_numbers = False

    def __call__(self, inputs: Any) -> Any:
        return super().__call__(keras.ops.convert_to_tensor(inputs, "float32"))  # type: ignore[misc]


_registered = keras.saving.register_keras_serializable(package="chipfit")
#: name -> class
CLASSES: dict[str, Any] = {
    name: _registered(type(name, (_OnKeras, cls), {"__module__": __name__, "__doc__": cls.__doc__}))
    for name, cls in inferable.CLASSES.items()
}
globals().update(CLASSES)
__all__ = list(CLASSES)
