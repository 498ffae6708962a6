"""A traced model: calls of ATen operators, and what its inputs and results are; the same from either tracer."""

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

#: operators that are read in parts
_PARTED = frozenset(package_data("chipfit.frameworks.torch", "aten.yaml")["parted"].split())
#: ATen operators whose result is read as the operand itself though their schema says that it is another tensor
_COPIES = ("clone", "_to_copy", "_unsafe_view")


def parts_of(op: Any, known: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
    """What says an operator in simpler ones, of those that have to be; None of others.

    Args:
        known: what the tracer has for it.
    """
    if not isinstance(op, torch._ops.OpOverload) or op._schema.name.partition("::")[2] not in _PARTED:
        return None
    known = known or (op.decompose if op._can_decompose() else torch._decomp.decomposition_table.get(op))
    return functools.partial(_einsum, known) if op is torch.ops.aten.einsum.default else known


def _einsum(known: Any, equation: str, operands: Sequence[torch.Tensor], **how: Any) -> Any:
    """One matrix product where it is one: PyTorch's own parts hide it behind axes of size 1."""
    product = as_product(equation) if len(operands) == 2 else None
    if product is None or operands[0].shape[product.left[-1]] != operands[1].shape[product.right[-2]]:
        return known(equation, operands, **how)
    a, b = (_permuted(x, perm) for x, perm in zip(operands, product, strict=False))
    return _permuted(a @ b, product.result)


def _permuted(x: torch.Tensor, perm: Sequence[int]) -> torch.Tensor:
    return x if list(perm) == sorted(perm) else x.permute(*perm)


class Unrecordable(Exception):
    """Watching a model run does not tell what it computes, or with which batches."""


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A size that is open: what it was in each run that was watched."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SymbolicTensor:
    """Shape and type of a traced tensor; a size that follows the batch is no integer there."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        return len(self.shape)

    def to(self, dtype: torch.dtype) -> "SymbolicTensor":
        return SymbolicTensor(self.shape, dtype)

    def new_empty(self, shape: tuple[Any, ...]) -> "SymbolicTensor":
        return SymbolicTensor(shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Program:
    """A traced model.

    The `meta` of a call holds its result (`val`: a SymbolicTensor, a list of them, or a number), the modules that it
    was made in, torch's function, and the line.
    """

    graph: torch.fx.Graph
    owner: Any  #: holds the program's own tensors and inner graphs, as attributes
    weights: dict[str, torch.Tensor]  #: by name in the state dict, also buffers that are not in it
    weight_of: dict[str, str]  #: placeholder -> weight
    inputs: dict[str, str]  #: placeholder -> name of an input that is a tensor; other placeholders are constants
    results: list[Any]  #: leaves of what the model returns: calls, or constants
    out_tree: pytree.TreeSpec


def open_axes(x: Any, like: Sequence[Any]) -> list[int]:
    """The axes, but for the batch, in which one of these tensors has another size."""
    shapes = [y.shape for y in (x, *like)] if isinstance(x, torch.Tensor) else []
    return [k for k, sizes in enumerate(zip(*shapes, strict=False)) if k and len(set(sizes)) > 1]


def register_dataclasses(out: Any) -> None:
    """Teach pytree the user's dataclasses in a result."""
    for cls in map(type, _dataclasses(out)):
        if cls not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")


def _dataclasses(x: Any) -> list[Any]:
    """The instances of dataclasses in a nested result."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [x, *(d for f in dataclasses.fields(x) for d in _dataclasses(getattr(x, f.name)))]
    if isinstance(x, (Mapping, tuple, list)):
        return [d for v in (x.values() if isinstance(x, Mapping) else x) for d in _dataclasses(v)]
    return []


def needs_functional(graph: torch.fx.Graph) -> bool:
    """Whether something is written in place that a reader of single calls would miss.

    An in-place operator is read as the one without "_" whose result replaces the operand from there on. That loses the
    write where the operand is a view, has views or copies, or is the caller's own tensor, and where there is no such
    operator.
    """
    return any(writes_elsewhere(n) for n in graph.nodes if _aten_name(n) and n.target._schema.is_mutable)


def writes_elsewhere(n: torch.fx.Node) -> bool:
    name, target = _aten_name(n), n.args[0] if n.args else None
    if name == "dropout_" and not n.args[2]:  # outside of training
        return False
    if not name.endswith("_") or not hasattr(torch.ops.aten, name[:-1]) or not isinstance(target, torch.fx.Node):
        return True
    return target.op == "placeholder" or _is_view(target) or any(_is_view(user) for user in target.users)


def _is_view(n: torch.fx.Node) -> bool:
    """Whether the result may share memory with an operand, or is read as if it did."""
    if n.target is operator.getitem:
        return isinstance(n.args[0], torch.fx.Node) and _is_view(n.args[0])
    name = _aten_name(n)
    aliases = [r.alias_info for r in n.target._schema.returns if r.alias_info is not None] if name else []
    shares = any(not a.is_write for a in aliases)
    return shares or name in _COPIES


def _aten_name(n: torch.fx.Node) -> str:
    """The operator's name without namespace and overload; "" of what is not one."""
    return n.target._schema.name.partition("::")[2] if isinstance(n.target, torch._ops.OpOverload) else ""
