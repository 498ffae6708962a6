"""Tensors, calls and formulas on the backend that Keras runs on."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import torch
from keras import ops

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import fake_quantize

#: models on JAX -> their compiled forward pass, None where they cannot be compiled; uncompiled, JAX would compile each
#: operation by itself
_COMPILED: WeakKeyDictionary[Any, Callable[..., Any] | None] = WeakKeyDictionary()


def dtype_here(dtype: str) -> str:
    """Return the dtype in which this backend holds `dtype`: JAX has no types of 64 bits."""
    return dtype.replace("64", "32") if keras.backend.backend() == "jax" else dtype


@contextmanager
def in_float32() -> Iterator[None]:
    """Create layers that compute in float32, whatever types the program has chosen for its own, and that can train."""
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    try:
        with torch.inference_mode(False):  # a verification may be the first to need the model
            yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def to_backend(x: Any) -> Any:
    """Convert a torch tensor to a tensor of Keras's backend; return anything else unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    if keras.backend.backend() == "torch":
        return keras.ops.convert_to_tensor(x)
    return keras.ops.convert_to_tensor(x.detach().cpu().numpy(), dtype_here(str(x.dtype).removeprefix("torch.")))


def to_torch(x: Any) -> torch.Tensor:
    """Convert a tensor of Keras's backend to a torch tensor."""
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(keras.ops.convert_to_numpy(x).copy())


def forward(model: Any, inputs: Any) -> Any:
    """Compute `model(inputs, training=False)` without gradients.

    Args:
        inputs: torch tensors in the structure that the model takes.

    Returns:
        Torch tensors in the structure that the model returns.
    """
    given = keras.tree.map_structure(to_backend, inputs)
    compiled = _compiled(model) if keras.backend.backend() == "jax" else None
    if compiled is not None:
        variables = [v.value for v in model.variables]
        try:
            return keras.tree.map_structure(to_torch, compiled(variables, given))
        except Exception:  # code that cannot be compiled, such as branches on values, may raise anything
            _COMPILED[model] = None
    with torch.no_grad():
        return keras.tree.map_structure(to_torch, model(given, training=False))


def _compiled(model: Any) -> Callable[..., Any] | None:
    """Return a model as a compiled function of its variables and inputs; None where it cannot be one."""
    if model not in _COMPILED and getattr(model, "built", True):
        import jax

        _COMPILED[model] = jax.jit(_stateless(model))
    return _COMPILED.get(model)


def _stateless(model: Any) -> Callable[..., Any]:
    from weakref import ref

    reference: Any = ref(model)  # the compiled function must not keep its own key alive

    def call(values: Any, x: Any) -> Any:
        model = reference()
        # not `stateless_call`, which passes `training` to models that do not take it
        with keras.StatelessScope(state_mapping=list(zip(model.variables, values, strict=True))):
            return model(x, training=False)

    return call


class _FallsBackToKeras(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(ops, name)


class KerasOps(metaclass=_FallsBackToKeras):
    """The functions that training formulas use, as `quantizers.ops.TorchOps`; the others are those of `keras.ops`."""

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
        """Return the number of elements, as an integer if the shape is known, else as a tensor."""
        shape = tuple(x.shape)
        return ops.cast(ops.size(x), "float32") if None in shape else math.prod(shape)

    @staticmethod
    def entry(table: Any, edges: Any, x: Any) -> Any:
        return ops.reshape(ops.take(table, ops.searchsorted(edges, ops.reshape(x, (-1,)))), ops.shape(x))

    @staticmethod
    def fake_quantize(x: Any, s: Any, z: Any, grid: Grid, clip_first: bool = False) -> Any:
        return fake_quantize(KerasOps, x, s, z, grid, clip_first)
