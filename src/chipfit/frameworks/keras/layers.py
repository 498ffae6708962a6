"""Layers that quantize a Keras model: quantizer, wrapper of a layer with weights, holder of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import keras
import numpy as np
import torch
from keras import ops

from chipfit.errors import PlanError, UnknownNameError
from chipfit.frameworks.keras.backend import KerasOps
from chipfit.frameworks.keras.inferable import CLASSES
from chipfit.quantizers.algorithm import Algorithm, algorithm_text, with_levels
from chipfit.quantizers.bn_fold import Channels, Norm, NormalizedLayer, updated_statistics
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.hosting import ActivationHost, WeightsHost, apply, initialize
from chipfit.quantizers.inferable import class_name, description
from chipfit.quantizers.pairs import fake_bounded, output_axes
from chipfit.quantizers.stored import Stored
from chipfit.registry import create

#: names of the variables of a batch norm
NORM_VARIABLES = ("gamma", "beta", "moving_mean", "moving_variance")
#: entries of a quantizer's configuration that describe its numbers under the names of MCT; a saved one has them beside
_DESCRIBED = frozenset(
    "num_bits signed threshold min_range max_range per_channel channel_axis lut_values lut_values_bitwidth".split()
)
#: a decorator of classes that Keras saves and loads
registered = keras.saving.register_keras_serializable(package="chipfit")


@registered
class KerasQuantizer(keras.layers.Layer):
    """A layer that rounds a tensor to a grid, y = (clip(round(x / s) + z, qmin, qmax) - z) s, by its algorithm.

    It computes in float32. Scale and zero point are variables, trainable if the algorithm trains them. Gradients follow
    from differentiating the algorithm's formula.

    Args:
        qmin, qmax: least and greatest quantized value.
        shape: shape of scale and zero point, which broadcast against the tensor; () is one of each per tensor.
        train_scale: let training change the scale; `scale.trainable` holds this later.
        algorithm: name of a training algorithm, with its options, or the quantizer of a user as Keras saves it.
        trains: names of the variables that the algorithm trains.
        constants: names of its other variables.
        kwargs: other fields of `quantizers.grids.Grid`, and arguments of every layer.
    """

    role = "weight"  #: of the tensor that it rounds

    def __init__(
        self,
        qmin: int,
        qmax: int,
        shape: Sequence[int] = (),
        train_scale: bool = False,
        algorithm: str | Algorithm | dict[str, Any] = "ste",
        trains: Sequence[str] = (),
        constants: Sequence[str] = ("scale", "zero_point", "least"),
        **kwargs: Any,
    ) -> None:
        grid: dict[str, Any] = {"bits": 8, "kind": "int" if kwargs.get("table") is None else "lut"}
        own = {f.name: kwargs.pop(f.name) for f in fields(Grid) if f.name in kwargs}
        grid |= {k: tuple(v) if isinstance(v, list) else v for k, v in own.items()}  # JSON has lists
        super().__init__(**{"dtype": "float32", "autocast": False, **kwargs})
        self.planned, self.shape, self.trains = Grid(qmin=qmin, qmax=qmax, **grid), tuple(shape), tuple(trains)
        if isinstance(algorithm, dict):
            given = {**algorithm}
            algorithm = keras.saving.deserialize_keras_object(given.pop("quantizer")).as_algorithm(**given)
        found: Any = create("training", algorithm) if isinstance(algorithm, str) else algorithm
        self.algorithm = found
        self.grid = self.algorithm.grid(self.planned)
        fixed = tuple(n for n in constants if n not in self.trains)
        for name in (*self.trains, *fixed):
            start = "ones" if name == "scale" else "zeros"
            size = (len(self.grid.table or ()),) if name in found.vectors else self.shape
            variable = self.add_weight(name=name, shape=size, initializer=start)
            # set afterwards: TensorFlow never watches a variable that was created untrainable
            variable.trainable = name in self.trains or (name == "scale" and train_scale)
            setattr(self, name, variable)
        self.constants, self.input_names = fixed, (*self.trains, *fixed)
        self.algorithm.start(self)
        self.built = True

    def algorithm_inputs(self) -> dict[str, Any]:
        """Return the inputs of the algorithm by name, each of `shape`, or [N] for its levels."""
        return {name: ops.convert_to_tensor(getattr(self, name)) for name in self.input_names}

    def broadcast_inputs(self, x: Any) -> dict[str, Any]:
        """Return the inputs of the algorithm so that they broadcast against x; those of blocks are repeated."""
        given = self.algorithm_inputs()
        if self.grid.per != "block":
            return given
        axis = next((d for d, (n, size) in enumerate(zip(self.shape, x.shape, strict=True)) if n != size), 0)
        return {name: ops.repeat(p, x.shape[axis] // self.shape[axis], axis) for name, p in given.items()}

    def numbers(self) -> tuple[Any, Any]:
        """Return the current scale and zero point, of `shape`; gradients flow to the variables that train."""
        return self.algorithm.numbers(KerasOps, self.algorithm_inputs(), self.grid)

    def call(self, x: Any, scale: Any = None, training: Any = None) -> Any:
        """Return floats rounded to the grid, with the shape of x. `scale` replaces the quantizer's own scale."""
        p = {**self.broadcast_inputs(x), "training": bool(training)}
        if scale is not None:
            p["scale"] = ops.convert_to_tensor(scale)
        y = self.algorithm.call(KerasOps, x, p, self.grid)
        if self.grid.pair_limit is None:
            return y
        scale = self.algorithm.numbers(KerasOps, p, self.grid)[0]
        return fake_bounded(KerasOps, y, scale, self.grid.pair_limit, output_axes(self.shape))

    def trainable_parameters(self) -> dict[str, Any]:
        """Return the variables that train now, by name."""
        return {name: ops.convert_to_tensor(v) for name in self.trains if (v := getattr(self, name)).trainable}

    def rescale(self, factor: Any) -> None:
        """Multiply the scale by a factor, one or one for each channel."""
        factor = ops.reshape(factor, self.shape)
        for name, value in self.algorithm.rescaled(KerasOps, self.trainable_parameters(), factor).items():
            getattr(self, name).assign(value)

    def reals(self, w: Any) -> Any:
        """Return the weight that the algorithm rounds in place of w; the plan's grid is for this weight."""
        return self.algorithm.reals(KerasOps, w, self.broadcast_inputs(w), self.grid)

    def assign(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Assign variables by name, from arrays with as many numbers."""
        for name, value in numbers.items():
            variable = getattr(self, name)
            variable.assign(value.astype("float32").reshape(tuple(variable.shape)))

    @property
    def num_bits(self) -> int:
        """The bits of a quantized value."""
        return self.grid.bits

    def __getattr__(self, name: str) -> Any:
        """Return an argument of the inferable quantizer with this grid, for the present numbers."""
        if name in _DESCRIBED and name in (known := self._description()):
            return known[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def inferable_class(self) -> type | None:
        """The inferable quantizer that this one is like: None if it trains, or if there is none with this grid."""
        like = self.planned.kind in ("int", "lut") and self.planned.per != "block" and not self.trainable_parameters()
        return CLASSES.get(class_name(self.grid, self.role)) if like else None

    def trained_grid(self) -> Grid:
        """Return the grid with the levels that training gave it."""
        table = self.algorithm.table(KerasOps, self.algorithm_inputs(), self.grid)
        return with_levels(self.grid, None if table is None else ops.convert_to_numpy(table).tolist())

    def check_grid(self, grid: Grid) -> None:
        """Check that a plan's grid is the grid of this quantizer.

        Raises:
            PlanError: It is another grid.
        """
        if (allowed := self.algorithm.grid(grid)) != self.grid:
            what = f"This model belongs to another plan: the grid of '{self.name}' differs"
            raise PlanError(what, got=repr(self.grid), allowed=repr(allowed))

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        store["grid"] = np.frombuffer(repr(self.grid).encode(), "uint8")

    def load_own_variables(self, store: Any) -> None:
        given, here = {name: store[name] for name in list(store.keys())}, repr(self.grid)
        there = np.asarray(given.pop("grid", np.frombuffer(here.encode(), "uint8"))).tobytes().decode()
        if there != here:  # Keras puts the text into an error of its own, which `QuantizedModel` reads
            raise PlanError(f"the grid of '{self.name}' is {there}, here {here}")
        super().load_own_variables(given)

    def get_config(self) -> dict[str, Any]:
        config = {**asdict(self.planned), "shape": self.shape, "trains": self.trains, "constants": self.constants}
        algorithm: Any = getattr(self.algorithm, "quantizer", None)  # of the user
        if algorithm is not None:
            algorithm = {"quantizer": keras.saving.serialize_keras_object(algorithm), **self.algorithm.get_config()}
        else:
            algorithm = algorithm_text(self.algorithm)
        train_scale = self.scale.trainable if hasattr(self, "scale") else False
        own = {"train_scale": train_scale, "algorithm": algorithm}
        return {**self._description(), **super().get_config(), **config, **own}

    def _description(self) -> dict[str, Any]:
        """Return the current numbers as arguments of MCT's inferable quantizers; nothing for a grid that has none."""
        grid = self.trained_grid()
        if grid.kind not in ("int", "lut") or grid.per == "block":
            return {"num_bits": self.num_bits}
        axis = next((k for k, size in enumerate(self.shape) if size > 1), 0) if self.shape else None
        scale, zero = (torch.from_numpy(np.array(ops.convert_to_numpy(n))).flatten() for n in self.numbers())
        return description(grid, scale, zero, axis)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KerasQuantizer:
        return super().from_config({k: v for k, v in config.items() if k not in _DESCRIBED})  # type: ignore[no-any-return]

    @classmethod
    def from_stored(
        cls, stored: Stored, algorithm: Algorithm, weight: torch.Tensor | None, shape: Sequence[int], **kwargs: Any
    ) -> KerasQuantizer:
        """Create the quantizer of a stored tensor, with its numbers.

        Args:
            weight: the weight in the plan's layout; None for an activation.
            shape: shape of scale and zero point in Keras's layout.
        """
        trains, fixed = algorithm.init(stored, weight), algorithm.constants(stored, weight)
        names: dict[str, Any] = {"trains": tuple(trains), "constants": tuple(n for n in fixed if n not in trains)}
        made = cls(**asdict(stored.grid), **names, shape=shape, algorithm=algorithm, **kwargs)
        made.assign({n: p.detach().numpy() for n, p in {**fixed, **trains}.items()})
        return made

    @classmethod
    def for_layer(cls, stored: Stored, algorithm: Algorithm, weight: Any, rank: int, **kwargs: Any) -> KerasQuantizer:
        """Create the quantizer of a weight of this rank (all in Keras's layout), or of an activation."""
        shape = [1] * rank if stored.axis is not None else []
        if stored.axis is not None:
            shape[stored.axis] = len(stored.scale)
        x = None if weight is None else torch.from_numpy(ops.convert_to_numpy(weight).copy())
        return cls.from_stored(stored, algorithm, x, shape, **kwargs)


@registered
class KerasActivationQuantizationHolder(ActivationHost, keras.layers.Layer):
    """A layer that rounds the result of another layer, as the chip stores it.

    Tied tensors pass through one holder.

    Args:
        activation_holder_quantizer: a KerasQuantizer, a trainable or inferable quantizer, or a function.
        gives_scale: whether to return (rounded tensor, scale), for biases whose scale follows from this one.
    """

    def __init__(self, activation_holder_quantizer: Any, gives_scale: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.activation_holder_quantizer = activation_holder_quantizer
        if isinstance(activation_holder_quantizer, KerasQuantizer):
            activation_holder_quantizer.role = "activation"
        self.gives_scale = gives_scale
        initialize(activation_holder_quantizer, None, "activation_holder_quantizer", self, "activations of keras")
        self.built = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        y = apply(self.activation_holder_quantizer, inputs, training)
        return (y, self.activation_holder_quantizer.numbers()[0]) if self.gives_scale else y

    def compute_output_spec(self, inputs: Any, training: Any = None) -> Any:
        y = keras.KerasTensor(inputs.shape, "float32")  # returned without tracing, which is slow in large models
        return (y, keras.KerasTensor((), "float32")) if self.gives_scale else y

    def get_config(self) -> dict[str, Any]:
        quantizer = keras.saving.serialize_keras_object(self.activation_holder_quantizer)
        return {**super().get_config(), "activation_holder_quantizer": quantizer, "gives_scale": self.gives_scale}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KerasActivationQuantizationHolder:
        quantizer = keras.saving.deserialize_keras_object(config["activation_holder_quantizer"])
        return cls(**{**config, "activation_holder_quantizer": quantizer})


@registered
class KerasQuantizationWrapper(WeightsHost, keras.layers.Wrapper):
    """A layer that computes with rounded weights; its unrounded weights stay its variables, and train.

    Args:
        layer: a layer of any class.
        weights_quantizers: name of a variable of the layer -> its quantizer (as for a holder).
        bias_follows: name of the variable whose scale, times that of the input, is the scale of the bias; the scale of
            the input is then an argument of the call. "" if the bias has a scale of its own.
        uses: number of biases: a layer that is called on inputs of several scales may have one for each call.
        gives_scale: name of the variable whose scale is that of the result, which is then returned with it, as a holder
            does; "" for none.
    """

    def __init__(
        self,
        layer: Any,
        weights_quantizers: Mapping[str, Any] | None = None,
        bias_follows: str = "",
        uses: int = 1,
        gives_scale: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(layer, **kwargs)
        self.weights_quantizers = dict(weights_quantizers or {})
        self.bias_follows, self.uses, self.gives_scale = bias_follows, uses, gives_scale

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        shape = self.layer.bias.shape if self.uses > 1 else ()
        self.own_biases = [self.add_weight(name=f"bias_{k}", shape=shape) for k in range(1, self.uses)]
        for name, quantizer in self.weights_quantizers.items():
            initialize(quantizer, tuple(self.weight_of(name).shape), name, self, "weights of keras")

    def bias(self, use: int = 0) -> Any:
        """Return the unrounded bias of one of the uses."""
        return self.own_biases[use - 1] if use else self.layer.bias

    @property
    def weight_values(self) -> dict[int, Any]:
        """The unrounded constants of an operation, by their places among its operands; none of a layer with names."""
        held = enumerate(getattr(self.layer, "slot_weights", ()))
        return {k: ops.convert_to_numpy(w) for k, w in held if w is not None}

    def get_quantized_weights(self, input_scale: Any = None, use: int = 0, training: Any = None) -> dict[str, Any]:
        """Return the rounded weights that the layer computes with, by variable name.

        Args:
            input_scale: scale of the layer's input. Without it, a bias whose scale follows from it is left out.
            use: index of the bias.
        """
        given = {n: self.bias(use) if n == "bias" else self.weight_of(n) for n in self.weights_quantizers}
        if self.bias_follows and input_scale is None:
            given.pop("bias", None)
        return {n: self._rounded(n, ops.convert_to_tensor(x), input_scale, training) for n, x in given.items()}

    def _rounded(self, name: str, x: Any, input_scale: Any, training: Any) -> Any:
        """Return a weight as the layer computes with it."""
        quantizer = self.weights_quantizers.get(name)
        if quantizer is None:
            return x
        if name != "bias" or not self.bias_follows:
            return apply(quantizer, x, training)
        s = self.weights_quantizers[self.bias_follows].numbers()[0]
        return quantizer(x, scale=input_scale * (ops.reshape(s, (-1,)) if len(s.shape) else s))

    def call(self, inputs: Any, input_scale: Any = None, use: int = 0, training: Any = None) -> Any:
        values = {"bias": ops.convert_to_tensor(self.bias(use))} if use else {}
        y = self._run(inputs, values | self.get_quantized_weights(input_scale, use, training))
        return (y, self.weights_quantizers[self.gives_scale].numbers()[0]) if self.gives_scale else y

    def _run(self, inputs: Any, values: Mapping[str, Any]) -> Any:
        """Run the layer with other values of its variables, by name."""
        # every variable gets a value: an inner scope does not see those of an outer scope (a training step of JAX)
        mapping = [(v, values.get(v.name, ops.convert_to_tensor(v))) for v in self.layer.variables]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            out = self.layer(inputs)
        for v, given in mapping:
            now = scope.get_current_value(v)
            if now is not None and now is not given and not v.trainable:
                v.assign(now)  # counts and averages that the layer updates in training
        return out

    def compute_output_spec(self, inputs: Any, input_scale: Any = None, use: int = 0, training: Any = None) -> Any:
        y = self.layer.compute_output_spec(inputs)
        return (y, keras.KerasTensor((), "float32")) if self.gives_scale else y

    def weight_of(self, name: str) -> Any:
        """Return a variable of the layer, unrounded.

        Raises:
            UnknownNameError: There is no such variable.
        """
        if not (found := [v for v in self.layer.variables if v.name == name]):
            raise UnknownNameError(f"variable of '{self.layer.name}'", name, [v.name for v in self.layer.variables])
        return found[0]

    def get_config(self) -> dict[str, Any]:
        quantizers = {k: keras.saving.serialize_keras_object(q) for k, q in self.weights_quantizers.items()}
        own = {k: getattr(self, k) for k in ("bias_follows", "uses", "gives_scale")}
        return {**super().get_config(), "weights_quantizers": quantizers, **own}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> KerasQuantizationWrapper:
        quantizers = {k: keras.saving.deserialize_keras_object(q) for k, q in config["weights_quantizers"].items()}
        layer = keras.saving.deserialize_keras_object(config["layer"], custom_objects=custom_objects)
        return cls(**{**config, "layer": layer, "weights_quantizers": quantizers})


@registered
class KerasBatchNormWrapper(KerasQuantizationWrapper):
    """A layer with a kernel and the batch norm behind it, which train separately and are rounded after folding.

    Args:
        bn_fold: strategy of `chipfit.quantizers.bn_fold`; setting it to 1 freezes the statistics.
        epsilon: epsilon of the batch norm.
        bn_momentum: weight of one step in the running statistics.
        trains: names out of "gamma", "beta" and the layer's "bias" that train.
        factor: shape in which [C] broadcasts against the kernel.
    """

    def __init__(
        self,
        *wrapped: Any,
        bn_fold: int = 1,
        epsilon: float = 1e-3,
        bn_momentum: float = 0.1,
        trains: Sequence[str] = ("gamma", "beta", "bias"),
        factor: Sequence[int] = (-1,),
        **kwargs: Any,
    ) -> None:
        super().__init__(*wrapped, **kwargs)
        self.bn_fold, self.epsilon, self.bn_momentum = bn_fold, epsilon, bn_momentum
        self.trains, self.factor = tuple(trains), tuple(factor)

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        shape = tuple(self.layer.bias.shape)
        self.layer.bias.trainable = "bias" in self.trains
        for name in NORM_VARIABLES:
            start = "ones" if name in ("gamma", "moving_variance") else "zeros"
            variable = self.add_weight(name=name, shape=shape, initializer=start, trainable=name in self.trains)
            setattr(self, name, variable)

    def _normalized(self) -> NormalizedLayer:
        w, b = (ops.convert_to_tensor(v) for v in (self.layer.kernel, self.layer.bias))
        gamma, beta, mean, variance = (ops.convert_to_tensor(v) for v in self.norm_variables)
        norm, at = Norm(gamma, beta, mean, variance, self.epsilon), Channels(tuple(w.shape), self.factor, -1)
        return NormalizedLayer(KerasOps, w, b, norm, at)

    @property
    def norm_variables(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in NORM_VARIABLES)

    def folded(self) -> tuple[Any, Any]:
        """Return the folded kernel and bias."""
        return self._normalized().folded()

    def call(self, inputs: Any, input_scale: Any = None, use: int = 0, training: Any = None) -> Any:
        own = self._normalized()

        def layer(kernel: Any, bias: Any) -> Any:
            return self._run(inputs, {"kernel": kernel, "bias": ops.zeros_like(own.bias) if bias is None else bias})

        def rounding_of(name: str) -> Any:
            return lambda x: self._rounded(name, x, input_scale, training)

        y, batch = own.run(self.bn_fold, bool(training), layer, rounding_of("kernel"), rounding_of("bias"))
        if batch is not None:
            mean, variance = updated_statistics(own.norm, batch, self.bn_momentum)
            self.moving_mean.assign(ops.stop_gradient(mean))
            self.moving_variance.assign(ops.stop_gradient(variance))
        return y

    def get_config(self) -> dict[str, Any]:
        own = ("bn_fold", "epsilon", "bn_momentum", "trains", "factor")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}
