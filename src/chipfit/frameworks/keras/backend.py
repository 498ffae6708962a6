"""Tensors and calls of whatever backend Keras runs on."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import torch
from keras import ops

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import fake_quantize

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


class _Alike(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(ops, name)


class KerasOps(metaclass=_Alike):
    """What `keras.ops` calls otherwise, or has not; the rest is its own."""

    @staticmethod
    def constant(values: Sequence[float], like: Any) -> Any:
        return ops.convert_to_tensor(np.asarray(values, "float32"))

    @staticmethod
    def traced(x: Any) -> bool:
        if keras.backend.backend() == "jax":
            import jax

            return isinstance(x, jax.core.Tracer)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            return not tf.executing_eagerly()
        return False

    @staticmethod
    def size(x: Any) -> Any:
        """An integer where the shape is known, else a tensor."""
        shape = tuple(x.shape)
        return ops.cast(ops.size(x), "float32") if None in shape else math.prod(shape)

    @staticmethod
    def entry(table: Any, edges: Any, x: Any) -> Any:
        return ops.reshape(ops.take(table, ops.searchsorted(edges, ops.reshape(x, (-1,)))), ops.shape(x))

    @staticmethod
    def fake_quantize(x: Any, s: Any, z: Any, grid: Grid) -> Any:
        return fake_quantize(KerasOps, x, s, z, grid)
