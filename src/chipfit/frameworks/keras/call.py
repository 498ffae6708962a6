"""The Graph while a Keras model is read, and the call that a reader is given."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch

from chipfit.frameworks.keras.kernel_layout import to_canonical
from chipfit.frameworks.reading import inferred, require
from chipfit.graph.builder import GraphBuilder, Origin, Outputs
from chipfit.graph.ir import Graph, Value


class Tensor(Value):
    """A value while the model is read; Keras records it by this class name in calls that take a list of tensors."""

    __slots__ = ()


class KerasGraphBuilder(GraphBuilder):
    """The growing Graph. Its weights are Keras's variables and constants, each entered once.

    Numbers of 64 bits, to which TensorFlow promotes floats where an operation has a NumPy array, are read in float32.
    """

    def __init__(self) -> None:
        super().__init__(Graph([], [], [], {}, {}, data_format="channels_last", framework="keras"))
        self.weight_names: dict[tuple[Any, ...], str] = {}  #: (id of variable, layout, shape) -> weight
        self.references: list[Any] = []  #: symbolic tensors and variables, kept so that their ids stay theirs
        self.has_float64 = False  #: whether something that was read is in float64

    def value(self, name: str, shape: Sequence[int | None], dtype: str) -> Value:
        self.has_float64 |= dtype == "float64"
        dtype = narrowed(dtype)
        super().value(name, shape, dtype)
        return Tensor(name, tuple(shape), dtype)

    def weight(
        self, variable: Any, origin: Origin, layout: str = "", name: str = "", shape: tuple[int, ...] | None = None
    ) -> str:
        """Enter a variable or constant, reshaped to `shape` and brought from this layout; return the weight's name."""
        key = (id(variable), layout, shape)
        if key not in self.weight_names:
            self.references.append(variable)
            last = name or getattr(variable, "name", "constant") or "constant"
            full = self.fresh("/".join(p for p in (origin.path, last) if p))
            tensor = torch.from_numpy(keras.ops.convert_to_numpy(variable).copy())
            tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
            self.graph.weights[full] = to_canonical(layout, tensor if shape is None else tensor.reshape(shape))
            if getattr(variable, "trainable", False):
                self.graph.trainable.add(full)
            self.weight_names[key] = full
        return self.weight_names[key]

    def forget(self, mark: tuple[int, int]) -> set[str]:
        gone = super().forget(mark)
        self.weight_names = {k: w for k, w in self.weight_names.items() if w not in gone}
        return gone


def narrowed(dtype: str) -> str:
    """Return the type in which values of `dtype` are read."""
    return "float32" if dtype == "float64" else dtype


class KerasCall:
    """One call of a layer or operation while it is read: arguments as operands, its result as new nodes."""

    def __init__(self, builder: KerasGraphBuilder, op: Any, outputs: Sequence[Any], origin: Origin, name: str) -> None:
        self.builder, self.op, self.outputs, self.origin, self.name = builder, op, outputs, origin, name

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of the first output."""
        return tuple(self.outputs[0].shape)

    @property
    def dtype(self) -> str:
        """Type of the first output, float32 for float64."""
        return narrowed(self.outputs[0].dtype)

    def emit(
        self, op: str, inputs: Sequence[Any], like: Sequence[int | None] | None = None, /, part: str = "", **attrs: Any
    ) -> Value:
        """Append a node with one output, of the dtype of the call's.

        Args:
            like: shape of the node's result; by default that of the call.
            part: suffix of the node's name where a layer becomes several nodes.
        """
        return self._append(op, inputs, attrs, [(self.shape if like is None else like, self.dtype)], part)

    def step(self, op: str, inputs: Sequence[Any], part: str = "", **attrs: Any) -> Value:
        """Append a node whose shape and dtype follow from its operands; not of an operator that knows channels."""
        return self._append(op, inputs, attrs, inferred(self.builder.graph, op, _names(inputs), attrs), part)

    def _append(self, op: str, inputs: Sequence[Any], attrs: dict[str, Any], outs: Outputs, part: str) -> Value:
        name = f"{self.name}/{part}" if part else self.name
        return self.builder.emit(self.origin, name, op, _names(inputs), attrs, outs)[0]

    def emit_all(self, op: str, inputs: Sequence[Any], **attrs: Any) -> list[Value]:
        """Append a node with the outputs of the call."""
        outs = [(tuple(o.shape), o.dtype) for o in self.outputs]
        return self.builder.emit(self.origin, self.name, op, _names(inputs), attrs, outs)

    def weight(
        self, variable: Any, layout: str = "", name: str = "", shape: tuple[int, ...] | None = None
    ) -> str | None:
        """Enter a variable, reshaped to `shape` and brought from this layout; return its name, None for None."""
        return None if variable is None else self.builder.weight(variable, self.origin, layout, name, shape)

    def operand(self, x: Any, dtype: str = "") -> str:
        """Return the name of a value or weight for a tensor, variable, array or number, cast to `dtype`.

        Args:
            dtype: by default that of the call's result.

        Raises:
            Unreadable: The argument is something else.
        """
        dtype, own = narrowed(dtype or self.dtype), self.name.rpartition("/")[2]
        if isinstance(x, Value):
            return x.name if x.dtype == dtype else self.step("Cast", [x], "cast", dtype=dtype).name
        if isinstance(x, (bool, int, float, np.number)):
            return self.builder.weight(np.asarray(x, dtype=dtype), self.origin, name=f"{own}.scalar")
        if isinstance(x, keras.Variable) and x.dtype == dtype:
            return self.builder.weight(x, self.origin)
        require(x is not None and not isinstance(x, (str, list, tuple)))
        array = keras.ops.convert_to_numpy(x).astype(dtype)
        return self.builder.weight(array, self.origin, name=f"{own}.constant")


def _names(inputs: Sequence[Any]) -> list[str | None]:
    return [x.name if isinstance(x, Value) else x for x in inputs]
