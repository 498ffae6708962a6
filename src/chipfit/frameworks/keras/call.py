"""What readers work with: the Graph that a Keras model is read into, and the call that is being read."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch

from chipfit.frameworks.keras.kernel_layout import to_canonical
from chipfit.graph.builder import GraphBuilder, Origin
from chipfit.graph.ir import Graph, Value


class Unreadable(Exception):
    """This form of the operation has no canonical equivalent."""


class Tensor(Value):
    """A value while it is read. Settings of calls that take a list of tensors record it under this name."""

    __slots__ = ()


class KerasGraphBuilder(GraphBuilder):
    """A growing Graph whose weights are Keras's variables and constants, each of them once."""

    def __init__(self) -> None:
        super().__init__(Graph([], [], [], {}, {}, data_format="channels_last", framework="keras"))
        self.known: dict[tuple[Any, ...], str] = {}  #: (variable, layout in which it is read, shape) -> weight
        self.alive: list[Any] = []  #: symbolic tensors and variables whose identity is remembered

    def value(self, name: str, shape: Sequence[int | None], dtype: str) -> Value:
        super().value(name, shape, dtype)
        return Tensor(name, tuple(shape), dtype)

    def weight(
        self, variable: Any, origin: Origin, layout: str = "", name: str = "", shape: tuple[int, ...] | None = None
    ) -> str:
        """The weight that a variable or constant of this layout is, seen as `shape` before."""
        key = (id(variable), layout, shape)
        if key not in self.known:
            self.alive.append(variable)
            own = name or getattr(variable, "name", "constant") or "constant"
            full = self.fresh("/".join(p for p in (origin.path, own) if p))
            tensor = torch.from_numpy(keras.ops.convert_to_numpy(variable).copy())
            self.graph.weights[full] = to_canonical(layout, tensor if shape is None else tensor.reshape(shape))
            if getattr(variable, "trainable", False):
                self.graph.trainable.add(full)
            self.known[key] = full
        return self.known[key]

    def forget(self, mark: tuple[int, int]) -> set[str]:
        gone = super().forget(mark)
        self.known = {k: w for k, w in self.known.items() if w not in gone}
        return gone


class KerasCall:
    """One call of a layer or operation while it is read."""

    def __init__(self, builder: KerasGraphBuilder, op: Any, outputs: Sequence[Any], origin: Origin, name: str) -> None:
        self.builder, self.op, self.outputs, self.origin, self.name = builder, op, outputs, origin, name

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of the first output."""
        return tuple(self.outputs[0].shape)

    @property
    def dtype(self) -> str:
        return self.outputs[0].dtype

    def emit(
        self,
        op: str,
        inputs: Sequence[Any],
        like: Sequence[int | None] | None = None,
        of: str = "",
        /,
        part: str = "",
        **attrs: Any,
    ) -> Value:
        """Append a node with one output.

        Args:
            like: shape of its result, where it is not the call's.
            of: dtype of its result, where it is not the call's.
            part: put behind the layer's name where a layer is several nodes.
        """
        name = f"{self.name}/{part}" if part else self.name
        outs = [(self.shape if like is None else like, of or self.dtype)]
        return self.builder.emit(self.origin, name, op, _names(inputs), attrs, outs)[0]

    def emit_all(self, op: str, inputs: Sequence[Any], **attrs: Any) -> list[Value]:
        """Append a node with the outputs of the call."""
        outs = [(tuple(o.shape), o.dtype) for o in self.outputs]
        return self.builder.emit(self.origin, self.name, op, _names(inputs), attrs, outs)

    def weight(
        self, variable: Any, layout: str = "", name: str = "", shape: tuple[int, ...] | None = None
    ) -> str | None:
        """The name of a variable in this layout, seen as `shape` before; None for None."""
        return None if variable is None else self.builder.weight(variable, self.origin, layout, name, shape)

    def operand(self, x: Any, dtype: str = "") -> str:
        """A tensor, variable, array or number as the name of a value or weight, cast to `dtype` where it has another.

        Args:
            dtype: that of the result of the call where it is not given.

        Raises:
            Unreadable: it is something else.
        """
        dtype, own = dtype or self.dtype, self.name.rpartition("/")[2]
        if isinstance(x, Value):
            return x.name if x.dtype == dtype else self.emit("Cast", [x], x.shape, dtype, part="cast", dtype=dtype).name
        if isinstance(x, (bool, int, float, np.number)):
            return self.builder.weight(np.asarray(x, dtype=dtype), self.origin, name=f"{own}.scalar")
        if isinstance(x, keras.Variable) and x.dtype == dtype:
            return self.builder.weight(x, self.origin)
        if x is None or isinstance(x, (str, list, tuple)):
            raise Unreadable
        array = keras.ops.convert_to_numpy(x).astype(dtype)
        return self.builder.weight(array, self.origin, name=f"{own}.constant")


def _names(inputs: Sequence[Any]) -> list[str | None]:
    return [x.name if isinstance(x, Value) else x for x in inputs]
