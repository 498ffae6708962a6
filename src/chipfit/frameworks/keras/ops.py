"""The functions that training formulas are written in, on whatever backend Keras runs: twin of `quantizers.ops`."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import fake_quantize


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
