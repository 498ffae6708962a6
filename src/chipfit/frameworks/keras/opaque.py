"""Keras operations without canonical operator: opaque nodes hold the operation and run it on the engine's tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import keras
import torch

from chipfit.errors import GraphError, raised_outside_chipfit
from chipfit.frameworks.keras.backend import to_backend, to_torch
from chipfit.frameworks.keras.safe_loading import check_registered

PREFIX = "keras:"


class OpaqueTarget(str):
    """The target of an opaque node: the text is the operation's Keras serialization; an attribute is the operation."""

    operation: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueTarget:
        return self


def target_of(operation: Any) -> OpaqueTarget:
    """Return the target for a layer, an operation or a function."""
    try:
        text = json.dumps(keras.saving.serialize_keras_object(operation), sort_keys=True)
    except Exception:  # Keras raises many types for classes without a configuration
        text = f"a {type(operation).__name__} that has no get_config"
    target = OpaqueTarget(PREFIX + text)
    target.operation = operation
    return target


def function_of(target: str) -> Callable[..., Any]:
    """Return the function `f(variables, args, kwargs)` on torch tensors that runs an opaque node.

    Gradients flow through it on Keras's torch backend only.

    Raises:
        GraphError: The result was saved, and Keras cannot create its operation again.
    """
    operation = target.operation if isinstance(target, OpaqueTarget) else load_operation(target)

    def call(variables: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        variables, args, kwargs = keras.tree.map_structure(to_backend, (list(variables), list(args), kwargs))
        if isinstance(operation, keras.Layer):
            count = len(operation.trainable_variables)
            out, _ = operation.stateless_call(variables[:count], variables[count:], *args, **kwargs)
        else:
            out = operation(*args, **kwargs)
        flat = tuple(to_torch(x) for x in keras.tree.flatten(out))
        return flat[0] if len(flat) == 1 else flat

    return call


@lru_cache(maxsize=256)
def load_operation(target: str) -> Any:
    """Create the operation of a saved target; it may name only classes of Keras or registered ones, and no code.

    Raises:
        GraphError: The target names something else, or Keras cannot create the operation.
    """
    text = target.removeprefix(PREFIX)
    try:
        config = json.loads(text)
        check_registered(config)
        return keras.saving.deserialize_keras_object(config, safe_mode=True)
    except GraphError as e:
        message = f"A Keras layer of this saved result is refused: {e.what}"
        raise GraphError(message, got=e.got, allowed=e.allowed, hint=e.hint) from e
    except Exception as e:  # Keras raises many types, and so do the classes that are registered
        if not raised_outside_chipfit(e):
            raise
        hint = "register its class with keras.saving.register_keras_serializable, and import it before loading"
        raise GraphError("A Keras layer of this saved result cannot be made again", got=text[:200], hint=hint) from e


def new_operation(target: str, name: str) -> Any:
    """Create an operation like that of an opaque node under a new name; without configuration, return the user's own.

    Raises:
        GraphError: The target names something else, or Keras cannot create the operation.
    """
    operation = target.operation if isinstance(target, OpaqueTarget) else load_operation(target)
    if not isinstance(operation, keras.Operation):
        return keras.layers.Activation(operation, name=name)
    try:
        return type(operation).from_config({**operation.get_config(), "name": name})
    except Exception:  # custom layers without a configuration raise what they like
        return operation
