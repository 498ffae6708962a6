"""From a PyTorch module to the program that `torch.export` makes of it."""

import functools
import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.engine.process import quiet
from chipfit.errors import CaptureError, brief, theirs
from chipfit.frameworks.torch.origin import users_line

#: ATen operators whose result is read as the operand itself though their schema says that it is another tensor
_COPIES = ("clone", "_to_copy", "_unsafe_view")


def export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    """Trace a model, which may be changed for that; what it writes in place stays visible only where that is plain.

    Axis 0 may vary in every input where it has the size that it has in the first.

    Raises:
        CaptureError: naming the user's line and what to change.
    """
    shapes: Any = None
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if tensors:
        batch = tensors[0].shape[0]

        def free(x: Any) -> Any:
            counts = isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == batch
            return {0: torch.export.Dim.AUTO} if counts else None

        _name_keywords(model, kwargs)
        shapes = pytree.tree_map(free, dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments))
    try:
        with quiet():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as e:  # the user's code, traced by torch.export, may raise anything
        if not theirs(e):
            raise
        if "DataDependent" in type(e).__name__ or "data-dependent" in str(e).lower():
            raise CaptureError(
                "The model branches on the values of a tensor, which a fixed graph cannot hold",
                where=users_line(e),
                hint="replace the Python `if` by torch.where, or move it out of the model",
            ) from e
        hint = "rewrite this line with tensor operations, or quantize the part of the model around it"
        raise CaptureError(f"The model cannot be captured: {brief(e)}", where=users_line(e), hint=hint) from e
    return program.run_decompositions({}) if _needs_functional(program.graph) else program


def _name_keywords(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Let `forward(**kwargs)` name the keywords that it gets: dynamic shapes are given by the names of parameters."""
    forward = model.forward
    old = inspect.signature(forward)
    rest = [p for p in old.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(rest) == len(old.parameters):
        return
    extra = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in kwargs if k not in old.parameters]

    @functools.wraps(forward)
    def named(*args: Any, **keywords: Any) -> Any:
        return forward(*args, **keywords)

    named.__signature__ = old.replace(parameters=[*rest, *extra])  # type: ignore[attr-defined]  # inspect reads it
    model.forward = named  # type: ignore[method-assign]  # of the copy that is captured


def _needs_functional(graph: torch.fx.Graph) -> bool:
    """Whether something is written in place that a reader of single calls would miss.

    An in-place operator is read as the one without "_" whose result replaces the operand from there on. That loses the
    write where the operand is a view, has views or copies, or is the caller's own tensor, and where there is no such
    operator.
    """
    return any(_writes_elsewhere(n) for n in graph.nodes if _aten_name(n) and n.target._schema.is_mutable)


def _writes_elsewhere(n: torch.fx.Node) -> bool:
    name, target = _aten_name(n), n.args[0] if n.args else None
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
