"""Replace layers of a Keras model by others, before it is read."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from chipfit.errors import UnsupportedError

#: a layer -> the layer in its place and its weights by name, or None to keep the layer
Choice = Callable[[Any], tuple[Any, Mapping[str, Any]] | None]


def weights_of(layer: Any) -> dict[str, np.ndarray]:
    """Return copies of the variables of a layer by name."""
    return {v.name: np.array(keras.ops.convert_to_numpy(v)) for v in layer.variables}


def with_other_layers(model: Any, choose: Choice) -> Any:
    """Return a copy of a model in which layers are replaced, also in models inside it.

    Raises:
        UnsupportedError: The model is written as a class of the user, so that its calls are not known.
        KeyError, ValueError: Weights do not fit the layer that they are for.
    """
    if not isinstance(model, keras.Sequential) and not hasattr(model, "operations"):
        hint = "build the model from keras.Input, or replace the layer first"
        raise UnsupportedError("ReplaceLayer supports Functional and Sequential models", got=type(model), hint=hint)
    new: dict[int, Mapping[str, Any]] = {}  # weights by the id of the layer that gets them
    made = []  # keeps the new layers alive, so that no id is given twice

    def clone(layer: Any) -> Any:
        found = choose(layer)
        if found is None:
            return type(layer).from_config(layer.get_config())
        made.append(found[0])
        new[id(found[0])] = found[1]
        return found[0]

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        takes = inspect.signature(layer.call).parameters  # another class may lack options that are not given
        return layer(*args, **{k: v for k, v in kwargs.items() if v is not None or k in takes})

    copy = keras.models.clone_model(model, clone_function=clone, call_function=call, recursive=True)
    _copy_weights(model, copy, new)
    return copy


def _copy_weights(model: Any, copy: Any, new: Mapping[int, Mapping[str, Any]]) -> None:
    for old, layer in zip(model.layers, copy.layers, strict=True):
        if isinstance(old, keras.Model):
            _copy_weights(old, layer, new)
        elif id(layer) in new:
            variables = {v.name: v for v in layer.variables}
            for name, value in new[id(layer)].items():
                variables[name].assign(value)
        else:
            layer.set_weights(old.get_weights())
