"""The layers that quantize a Keras model: quantizer, wrapper of a layer with weights, holder of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from chipfit.quantizers.rounding import ROUNDINGS
from chipfit.quantizers.stored import Stored
from chipfit.quantizers.tables import boundaries

_registered = keras.saving.register_keras_serializable(package="chipfit")


@_registered
class KerasQuantizer(keras.layers.Layer):
    """Rounds a tensor to a grid: y = (clip(round(x / s) + z, qmin, qmax) - z) s.

    The gradient passes straight through rounding inside the range and stops outside; the scale gets that of LSQ (Esser
    et al. 2020, arXiv:1902.08153, eq. 3), which differentiating the formula gives. Everything is computed in float32.

    Args:
        qmin, qmax: least and greatest code.
        shape: of scale and zero point, which broadcast against the tensor; () is one of each for all of it.
        table: what the codes stand for in units of the scale, ascending, where it is not the codes themselves.
        logarithmic: entries of the table are chosen on the logarithm.
        train_scale: let training move the scale; afterwards `scale.trainable` tells.
        bits: width of a stored code, for display.
        rounding: of `chipfit.quantizers.rounding`.
    """

    def __init__(
        self,
        qmin: int,
        qmax: int,
        shape: Sequence[int] = (),
        table: Sequence[float] | None = None,
        logarithmic: bool = False,
        train_scale: bool = False,
        bits: int = 8,
        rounding: str = "half_even",
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"dtype": "float32", "autocast": False, **kwargs})
        self.qmin, self.qmax, self.shape, self.bits = int(qmin), int(qmax), tuple(shape), int(bits)
        self.table = None if table is None else tuple(float(t) for t in table)
        self.logarithmic, self.rounding = logarithmic, rounding
        self.scale = self.add_weight(name="scale", shape=self.shape, initializer="ones")
        self.scale.trainable = train_scale  # afterwards: TensorFlow never watches a variable that was made untrainable
        self.zero_point = self.add_weight(name="zero_point", shape=self.shape, initializer="zeros", trainable=False)
        self.built = True

    def call(self, x: Any, scale: Any = None) -> Any:
        """x: reals. Returns reals on the grid, same shape. `scale` takes the place of the quantizer's own."""
        s = ops.convert_to_tensor(self.scale if scale is None else scale)
        if self.table is not None:
            return self._nearest_entry(x, s, self.table)
        z = ops.convert_to_tensor(self.zero_point)
        v = ops.clip(x / s, -(2.0**40), 2.0**40)  # an infinity must not become inf - inf
        q = v + ops.stop_gradient(ROUNDINGS[self.rounding](v, ops) - v) + z  # exact, see `rounding`
        return (_clamp(q, self.qmin, self.qmax) - z) * s

    def _nearest_entry(self, x: Any, s: Any, table: Sequence[float]) -> Any:
        edges = boundaries(tuple(table), self.logarithmic).numpy().astype("float32")
        v = _clamp(x / s, table[0], table[-1])
        index = ops.searchsorted(ops.convert_to_tensor(edges), ops.reshape(ops.stop_gradient(v), (-1,)))
        entry = ops.reshape(ops.take(ops.convert_to_tensor(np.asarray(table, "float32")), index), ops.shape(v))
        return (v + ops.stop_gradient(entry - v)) * s

    def set(self, scale: np.ndarray, zero_point: np.ndarray) -> None:
        """Take these numbers; arrays of `shape`."""
        self.scale.assign(scale)
        self.zero_point.assign(zero_point.astype("float32"))

    def get_config(self) -> dict[str, Any]:
        own = ("qmin", "qmax", "shape", "table", "logarithmic", "bits", "rounding")
        return {**super().get_config(), **{k: getattr(self, k) for k in own}, "train_scale": self.scale.trainable}

    @classmethod
    def of(cls, stored: Stored, shape: Sequence[int] = (), **kwargs: Any) -> KerasQuantizer:
        """The quantizer of a tensor that is stored like this; its numbers are still to be set."""
        grid = stored.grid
        how: dict[str, Any] = {"bits": grid.bits, "rounding": grid.rounding}
        return cls(grid.qmin, grid.qmax, shape, grid.table, grid.kind == "log", **how, **kwargs)


def _clamp(x: Any, low: float, high: float) -> Any:
    """`ops.clip` whose gradient is 1 at both ends, on every backend."""
    return ops.where(x < low, float(low), ops.where(x > high, float(high), x))


@_registered
class KerasActivationQuantizationHolder(keras.layers.Layer):
    """Stores the result of a layer as the chip does: rounds it with its quantizer.

    Tensors that the chip keeps on one grid pass through one holder.

    Args:
        activation_holder_quantizer: what rounds.
        gives_scale: return (rounded tensor, scale), for the bias of a layer whose scale follows from it.
    """

    def __init__(self, activation_holder_quantizer: KerasQuantizer, gives_scale: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.activation_holder_quantizer = activation_holder_quantizer
        self.gives_scale = gives_scale
        self.built = True

    def call(self, inputs: Any) -> Any:
        y = self.activation_holder_quantizer(inputs)
        return (y, ops.convert_to_tensor(self.activation_holder_quantizer.scale)) if self.gives_scale else y

    def compute_output_spec(self, inputs: Any) -> Any:
        y = keras.KerasTensor(inputs.shape, "float32")  # given, not traced, which takes a while in large models
        return (y, keras.KerasTensor((), "float32")) if self.gives_scale else y

    def get_config(self) -> dict[str, Any]:
        quantizer = keras.saving.serialize_keras_object(self.activation_holder_quantizer)
        return {**super().get_config(), "activation_holder_quantizer": quantizer, "gives_scale": self.gives_scale}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KerasActivationQuantizationHolder:
        quantizer = keras.saving.deserialize_keras_object(config["activation_holder_quantizer"])
        return cls(**{**config, "activation_holder_quantizer": quantizer})


@_registered
class KerasQuantizationWrapper(keras.layers.Wrapper):
    """A layer that computes with rounded weights; its own, unrounded ones are kept, and trained.

    Args:
        layer: the layer, of any class.
        weights_quantizers: name of a variable of the layer -> its quantizer.
        bias_follows: name of the variable whose scale, times that of the input, is the scale of the bias; the scale of
            the input is then an argument of the call. "" when the bias has a scale of its own.
        uses: how many biases there are: called on inputs of several scales, the layer may have one for each call.
    """

    def __init__(
        self,
        layer: Any,
        weights_quantizers: Mapping[str, KerasQuantizer] | None = None,
        bias_follows: str = "",
        uses: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer, **kwargs)
        self.weights_quantizers = dict(weights_quantizers or {})
        self.bias_follows, self.uses = bias_follows, uses

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        shape = self.layer.bias.shape if self.uses > 1 else ()
        self.own_biases = [self.add_weight(name=f"bias_{k}", shape=shape) for k in range(1, self.uses)]

    def bias(self, use: int = 0) -> Any:
        """The bias of one of the uses, unrounded."""
        return self.own_biases[use - 1] if use else self.layer.bias

    def get_quantized_weights(self, input_scale: Any = None, use: int = 0) -> dict[str, Any]:
        """The weights that the layer computes with, by variable name, rounded as they are now.

        Args:
            input_scale: of the tensor that the layer reads. Without it, a bias whose scale follows from it is left out.
            use: which of several biases.
        """
        out = {}
        for name, quantizer in self.weights_quantizers.items():
            x = ops.convert_to_tensor(self.bias(use) if name == "bias" else self._variable(name))
            if name != "bias" or not self.bias_follows:
                out[name] = quantizer(x)
            elif input_scale is not None:
                s = ops.convert_to_tensor(self.weights_quantizers[self.bias_follows].scale)
                out[name] = quantizer(x, scale=input_scale * (ops.reshape(s, (-1,)) if len(s.shape) else s))
        return out

    def call(self, inputs: Any, input_scale: Any = None, use: int = 0) -> Any:
        values = {"bias": ops.convert_to_tensor(self.bias(use))} if use else {}
        values |= self.get_quantized_weights(input_scale, use)
        # every variable gets a value: the inner scope does not see those of an outer one (a training step of JAX)
        mapping = [(v, values.get(v.name, ops.convert_to_tensor(v))) for v in self.layer.variables]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            out = self.layer(inputs)
        for v, given in mapping:
            now = scope.get_current_value(v)
            if now is not None and now is not given and not v.trainable:
                v.assign(now)  # what the layer counts or averages in training
        return out

    def compute_output_spec(self, inputs: Any, input_scale: Any = None, use: int = 0) -> Any:
        return self.layer.compute_output_spec(inputs)

    def _variable(self, name: str) -> Any:
        return next(v for v in self.layer.variables if v.name == name)

    def get_config(self) -> dict[str, Any]:
        quantizers = {k: keras.saving.serialize_keras_object(q) for k, q in self.weights_quantizers.items()}
        return {
            **super().get_config(),
            "weights_quantizers": quantizers,
            "bias_follows": self.bias_follows,
            "uses": self.uses,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> KerasQuantizationWrapper:
        quantizers = {k: keras.saving.deserialize_keras_object(q) for k, q in config["weights_quantizers"].items()}
        layer = keras.saving.deserialize_keras_object(config["layer"], custom_objects=custom_objects)
        return cls(**{**config, "layer": layer, "weights_quantizers": quantizers})
