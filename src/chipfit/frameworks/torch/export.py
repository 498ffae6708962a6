"""Trace a PyTorch module with `torch.export`."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from chipfit.engine.process import quiet
from chipfit.errors import CaptureError, raised_outside_chipfit, short_message
from chipfit.frameworks.torch.origin import users_line
from chipfit.frameworks.torch.program import (
    Program,
    SymbolicTensor,
    decomposition_of,
    needs_functionalization,
    symbolic,
)


def export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Trace a model, whose `forward` may be replaced for that.

    Calls that write in place stay in the program only where a reader of single calls understands them. Axis 0 is open
    in every input that has as many rows as the first.

    Raises:
        CaptureError: naming the user's line and what to change.
    """
    shapes: Any = None
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if tensors:
        batch = tensors[0].shape[0]

        def open_batch(x: Any) -> Any:
            has_batch = isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == batch
            return {0: torch.export.Dim.AUTO} if has_batch else None

        _name_keywords(model, kwargs)
        shapes = pytree.tree_map(open_batch, dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments))
    try:
        with quiet():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as e:  # the user's code, traced by torch.export, may raise anything
        if not raised_outside_chipfit(e):
            raise
        if "DataDependent" in type(e).__name__ or "data-dependent" in str(e).lower():
            raise CaptureError(
                "The model branches on the values of a tensor, which a fixed graph cannot hold",
                where=users_line(e),
                hint="replace the Python `if` by torch.where, or move it out of the model",
            ) from e
        hint = "rewrite this line with tensor operations, or quantize the part of the model around it"
        raise CaptureError(f"The model cannot be captured: {short_message(e)}", where=users_line(e), hint=hint) from e
    decompositions: dict[Any, Any] = {}
    if any(decomposition_of(n.target) for n in program.graph.nodes):
        for table in (torch._decomp.decomposition_table, torch.export.default_decompositions()):
            decompositions |= {op: decomposition_of(op, f) for op, f in table.items() if decomposition_of(op)}
    if decompositions or needs_functionalization(program.graph):
        program = program.run_decompositions(decompositions)
    return _program(program)


def _program(exported: torch.export.ExportedProgram) -> Program:
    """Copy what is read of torch's record, so that readers do not depend on torch's classes."""
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    for n in (n for g in graphs for n in g.nodes if "val" in n.meta):
        n.meta["val"] = pytree.tree_map_only(torch.Tensor, symbolic, n.meta["val"])
    inputs, weight_of = {}, dict[str, str]()
    for n, spec in zip(exported.graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            weight_of[n.name] = str(spec.target)
        elif isinstance(n.meta.get("val"), SymbolicTensor):
            inputs[n.name] = n.name
        else:
            n.meta["val"] = getattr(spec.arg, "value", n.meta.get("val"))
    specs = exported.graph_signature.output_specs
    (returned,) = exported.graph.output_node().args
    results = [x for x, spec in zip(returned, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    constants = {k: v for k, v in exported.constants.items() if isinstance(v, torch.Tensor)}
    weights = {**exported.state_dict, **constants}
    return Program(
        exported.graph, exported.graph_module, weights, weight_of, inputs, results, exported.call_spec.out_spec
    )


def _name_keywords(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Give `forward(**kwargs)` parameters of the names in `kwargs`, because dynamic shapes are given by parameter."""
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
