"""Shapes and dtypes of results, as the kernels of the engine compute them from tensors without numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chipfit.engine.curves import ELEMENTWISE
from chipfit.engine.kernels import execute
from chipfit.engine.types import dtype_of
from chipfit.graph.builder import Outputs
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS

Shape = tuple[int | None, ...]
#: two numbers that stand for open sizes; a size of a result that differs between them is open
_ANY = 55_440, 83_160


def results_of(graph: Graph, op: str, inputs: Sequence[str | None], attrs: Mapping[str, Any]) -> Outputs:
    """Return shape and dtype of each result of a node; operators that know channels take channels first.

    Raises:
        RuntimeError, LookupError: The kernel does not compute it.
    """
    node, layout = Node("", op, tuple(inputs), (), dict(attrs)), OPS[op].layout
    if layout == "reshape":  # where a number in place of an open size may not divide
        return [(_reshaped(graph.shape(node.data), node.attrs["shape"]), _dtype(graph, node.data))]
    if layout == ELEMENTWISE:  # a real number is far quicker than a tensor without numbers
        (result,) = execute(node, [_stand_in(graph, i, 1, real=True) for i in inputs])
        return [(broadcast([graph.shape(i) for i in inputs if i is not None]), _name(result))]
    runs = [execute(node, [_stand_in(graph, i, size) for i in inputs]) for size in _ANY]
    return [(_common_shape(*results), _name(results[0])) for results in zip(*runs, strict=True)]


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an element-wise result."""
    rank = max(len(s) for s in shapes)
    columns = zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True)
    return tuple(next((d for d in column if d != 1), 1) for column in columns)


def _reshaped(shape: Shape, target: Sequence[int | None]) -> Shape:
    """Return the shape of a Reshape; -1 is known where every open size is kept by 0 or given by an operand (None)."""
    sizes = [shape[k] if s == 0 else s for k, s in enumerate(target)]
    rest = math.prod(filter(None, shape)) // math.prod(s for s in sizes if s and s > 0)
    left = rest if shape.count(None) == sizes.count(None) else None
    return tuple(left if s == -1 else s for s in sizes)


def _stand_in(graph: Graph, name: str | None, size: int, real: bool = False) -> Any:
    """Return an integer, or a tensor in place of an operand: without numbers, or of a single real one."""
    if name is None or _dtype(graph, name) == "int":
        return name and size
    shape = [1 if real else size if d is None else d for d in graph.shape(name)]
    return torch.ones(shape, dtype=dtype_of(_dtype(graph, name)), device=None if real else "meta")


def _dtype(graph: Graph, name: str) -> str:
    return _name(graph.weights[name]) if name in graph.weights else graph.values[name].dtype


def _name(result: Any) -> str:
    return str(result.dtype).removeprefix("torch.") if isinstance(result, torch.Tensor) else "int"


def _common_shape(a: Any, b: Any) -> Shape:
    """Return the shape of a result, given the results for two sizes."""
    return tuple(m if m == n else None for m, n in zip(getattr(a, "shape", ()), getattr(b, "shape", ()), strict=True))
