"""A traced model: calls of ATen operators, with the model's inputs and results; both tracers return it."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.files import package_data
from chipfit.graph.einsum import as_product

#: operators that are read after their decomposition
DECOMPOSED = frozenset(package_data("chipfit.frameworks.torch", "aten.yaml")["decomposed"].split())
#: ATen operators that are read as their operand, although their schema promises a copy
_COPIES = ("clone", "_to_copy", "_unsafe_view")


def decomposition_of(op: Any, default: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
    """Return a function that computes an operator by simpler ones, or None if the operator is read as it is.

    Args:
        default: the decomposition of the tracer.
    """
    if aten_name(op) not in DECOMPOSED:
        return None
    default = default or (op.decompose if op._can_decompose() else torch._decomp.decomposition_table.get(op))
    return functools.partial(_einsum, default) if op is torch.ops.aten.einsum.default else default


def _einsum(default: Any, equation: str, operands: Sequence[torch.Tensor], **settings: Any) -> Any:
    """Compute an einsum as one matrix product where it is one; PyTorch's decomposition adds axes of size 1."""
    product = as_product(equation) if len(operands) == 2 else None
    if product is None or operands[0].shape[product.left[-1]] != operands[1].shape[product.right[-2]]:
        return default(equation, operands, **settings)
    a, b = (_permuted(x, perm) for x, perm in zip(operands, product, strict=False))
    return _permuted(a @ b, product.result)


def _permuted(x: torch.Tensor, perm: Sequence[int]) -> torch.Tensor:
    return x if list(perm) == sorted(perm) else x.permute(*perm)


class Unrecordable(Exception):
    """Watching a model run does not show what it computes, or for which batch sizes."""


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A size that may vary, as it was in each recorded run."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SymbolicTensor:
    """Shape and type of a traced tensor; an open size is not an integer."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        return len(self.shape)

    def to(self, dtype: torch.dtype) -> "SymbolicTensor":
        return SymbolicTensor(self.shape, dtype)

    def new_empty(self, shape: tuple[Any, ...]) -> "SymbolicTensor":
        return SymbolicTensor(shape, self.dtype)


def symbolic(t: torch.Tensor) -> SymbolicTensor:
    return SymbolicTensor(tuple(t.shape), t.dtype)


@dataclass(frozen=True, slots=True)
class Program:
    """A traced model.

    The `meta` of a call holds its result (`val`: a SymbolicTensor, a list of them, or a number), the modules that it
    was made in, torch's function, and the line.
    """

    graph: torch.fx.Graph
    owner: Any  #: holds the program's own tensors and inner graphs, as attributes
    weights: dict[str, torch.Tensor]  #: by name in the state dict, with buffers that are not in it
    weight_of: dict[str, str]  #: placeholder -> weight
    inputs: dict[str, str]  #: placeholder -> name of an input that is a tensor; other placeholders are constants
    results: list[Any]  #: leaves of what the model returns: calls, or constants
    out_tree: pytree.TreeSpec


def open_axes(x: Any, others: Sequence[Any]) -> list[int]:
    """Return the axes, except the batch, in which one of these tensors has another size than `x`."""
    shapes = [y.shape for y in (x, *others)] if isinstance(x, torch.Tensor) else []
    return [k for k, sizes in enumerate(zip(*shapes, strict=False)) if k and len(set(sizes)) > 1]


def register_dataclasses(out: Any) -> None:
    """Register the user's dataclasses in a result with pytree."""
    for cls in map(type, _dataclasses(out)):
        if cls not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")


def _dataclasses(x: Any) -> list[Any]:
    """Return the instances of dataclasses in a nested result."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [x, *(d for f in dataclasses.fields(x) for d in _dataclasses(getattr(x, f.name)))]
    if isinstance(x, (Mapping, tuple, list)):
        return [d for v in (x.values() if isinstance(x, Mapping) else x) for d in _dataclasses(v)]
    return []


def needs_functionalization(graph: torch.fx.Graph) -> bool:
    """Return whether a call writes in place in a way that a reader of single calls would miss."""
    return any(writes_shared_memory(n) for n in graph.nodes if aten_name(n.target) and n.target._schema.is_mutable)


def writes_shared_memory(n: torch.fx.Node) -> bool:
    """Return whether an in-place call cannot be read as the operator without "_".

    That reading replaces the operand by the result from there on. It loses the write where the operand is a view, has
    views or copies, or is the caller's own tensor, and is impossible where there is no operator without "_".
    """
    name, target = aten_name(n.target), n.args[0] if n.args else None
    if name == "dropout_" and not n.args[2]:  # not in training: it writes nothing
        return False
    if not name.endswith("_") or not hasattr(torch.ops.aten, name[:-1]) or not isinstance(target, torch.fx.Node):
        return True
    return target.op == "placeholder" or _is_view(target) or any(_is_view(user) for user in target.users)


def _is_view(n: torch.fx.Node) -> bool:
    """Return whether the result may share memory with an operand, or is read as if it did."""
    if n.target is operator.getitem:
        return isinstance(n.args[0], torch.fx.Node) and _is_view(n.args[0])
    name = aten_name(n.target)
    aliases = [r.alias_info for r in n.target._schema.returns if r.alias_info is not None] if name else []
    return name in _COPIES or any(not a.is_write for a in aliases)


def aten_name(op: Any) -> str:
    """Return an operator's name without namespace and overload, or "" if it is not an operator of torch."""
    return op._schema.name.partition("::")[2] if isinstance(op, torch._ops.OpOverload) else ""
