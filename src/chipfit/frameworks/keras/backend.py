"""Tensors and calls of whatever backend Keras runs on."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras
import torch

#: models on JAX -> their compiled forward pass; uncompiled, JAX would compile each operation by itself
_COMPILED: WeakKeyDictionary[Any, Callable[..., Any]] = WeakKeyDictionary()


def dtype_here(dtype: str) -> str:
    """The dtype in which this backend holds `dtype`: JAX has none of 64 bits."""
    return dtype.replace("64", "32") if keras.backend.backend() == "jax" else dtype


def to_backend(x: Any) -> Any:
    """A torch tensor as one of Keras's backend; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    if keras.backend.backend() == "torch":
        return keras.ops.convert_to_tensor(x)
    return keras.ops.convert_to_tensor(x.detach().cpu().numpy(), dtype_here(str(x.dtype).removeprefix("torch.")))


def to_torch(x: Any) -> torch.Tensor:
    """A tensor of Keras's backend as one of torch."""
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(keras.ops.convert_to_numpy(x).copy())


def forward(model: Any, inputs: Any) -> Any:
    """`model(inputs, training=False)`, without gradients.

    Args:
        inputs: torch tensors in the structure that the model takes.

    Returns:
        Torch tensors in the structure that the model returns.
    """
    given = keras.tree.map_structure(to_backend, inputs)
    if keras.backend.backend() != "jax":
        with torch.no_grad():
            return keras.tree.map_structure(to_torch, model(given, training=False))
    if model not in _COMPILED:
        import jax

        _COMPILED[model] = jax.jit(_stateless(model))
    variables = ([v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables))
    return keras.tree.map_structure(to_torch, _COMPILED[model](*variables, given))


def _stateless(model: Any) -> Callable[..., Any]:
    from weakref import ref

    held: Any = ref(model)  # what is compiled must not keep its own key alive; the model lives while it is called

    def call(trainable: Any, others: Any, x: Any) -> Any:
        return held().stateless_call(trainable, others, x, training=False)[0]

    return call
