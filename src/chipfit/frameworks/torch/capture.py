"""From a PyTorch module to a Graph."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.engine.run import first_deviation
from chipfit.engine.trees import flatten_inputs
from chipfit.engine.types import described
from chipfit.errors import CaptureError, raised_outside_chipfit, short_message
from chipfit.frameworks.torch.export import export
from chipfit.frameworks.torch.origin import users_line
from chipfit.frameworks.torch.program import Unrecordable, open_axes, register_dataclasses
from chipfit.frameworks.torch.record import record
from chipfit.frameworks.torch.translate import read
from chipfit.graph.check import check
from chipfit.graph.ir import Graph

_HALVES = frozenset(map(chr, range(0xD800, 0xE000)))  #: of UTF-16 surrogate pairs, which UTF-8 does not have

_FIXED = "What the model computes does not follow the sizes in which the batches differ"


def capture(model: torch.nn.Module, args: Sequence[Any], kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read a model into a Graph.

    The model is not changed; it is captured in eval mode: what depends on training (dropout, stochastic depth) takes
    its inference form. Axis 0 of every input that has the first one's batch size becomes dynamic where the model
    allows.

    Args:
        model: any module that `torch.export` can trace.
        args: example positional inputs; any structure of tensors.
        kwargs: example keyword inputs.
        others: further calls, as (args, kwargs), which the model takes: sizes in which they differ stay open.

    Raises:
        CaptureError: naming the user's line and what to change; a weight is beyond float32; a layer's name no text; a
            size decides what the model computes.

    Parameters are not copied: `Graph.weights` holds the model's own tensors until a pass replaces them
    (`passes.copy_captured_weights` replaces those that are left).
    """
    if isinstance(model, torch.jit.ScriptModule):
        allowed = "a torch.nn.Module, or the module() of a program of torch.export"
        what = "A scripted or traced module (torch.jit) cannot be read"
        raise CaptureError(what, got=type(model).__name__, allowed=allowed, hint="pass the module that was scripted")
    if not isinstance(model, torch.nn.Module):
        hint = "pass the model object, not its class or its weights"
        raise CaptureError("A PyTorch model is an instance of torch.nn.Module", got=type(model).__name__, hint=hint)
    for name, _ in model.named_modules():
        if not _HALVES.isdisjoint(name):
            raise CaptureError("A layer's name holds half a character, which no file can", got=ascii(name))
    calls = pytree.tree_map(_single, [(tuple(args), dict(kwargs or {})), *others])
    calls = [c for c in calls if pytree.tree_structure(c) == pytree.tree_structure(calls[0])]
    # the largest first, for a size of 1 would be taken for a constant
    calls.sort(key=lambda call: -sum(getattr(x, "nbytes", 0) for x in pytree.tree_leaves(call)))
    if next((len(x) for x in pytree.tree_leaves(calls[0]) if isinstance(x, torch.Tensor) and x.dim()), 1) == 0:
        raise CaptureError("The example holds no sample", allowed="a batch of one or more")
    args, kwargs = _at_least_two(*calls[0])
    twin, cast = _twin(model)
    try:
        program, example_out = record(twin, args, kwargs, calls[1:])
        graph = read(program, twin if cast else model, (args, kwargs), example_out)
    except Unrecordable as e:
        twin, cast = _twin(model)
        example_out = _try_once(twin, args, kwargs)
        if others:
            raise CaptureError(_FIXED, where=users_line(e.__cause__ or e)) from e
        graph = read(export(twin, args, kwargs), twin if cast else model, (args, kwargs), example_out)
    if cast:
        graph.notes.append(f"warning: the model computes in {cast}; it was read, and is simulated, in float32")
    check(graph, blame="capture")
    if others:
        _check_same(graph, _twin(model)[0], [*calls[1:], pytree.tree_map(_longer, *calls)])
    return graph


def _longer(x: Any, *like: Any) -> Any:
    """A tensor with one element more along each axis in which others differ from it."""
    for k in open_axes(x, like):
        x = torch.cat([x, x.narrow(k, -1, 1)], k)
    return x


def _check_same(graph: Graph, model: torch.nn.Module, calls: Sequence[Any]) -> None:
    """What a graph with open sizes computes is what the model does, for other sizes that it takes.

    Raises:
        CaptureError: it is not.
    """
    for args, kwargs in calls:
        try:
            out = _try_once(model, args, kwargs)
        except CaptureError:
            continue
        inputs = flatten_inputs(graph, args, kwargs)
        if found := first_deviation(graph, inputs, [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]):
            raise CaptureError(_FIXED, got=f"{found[0]}: {found[1]}, of " + ", ".join(map(described, inputs)))


def _single(x: Any) -> Any:
    """Data in float32, whatever float they are; each a tensor of its own, for one given twice is read as one input."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().float() if x.is_floating_point() else x.detach()


def _twin(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """A copy in eval mode that shares the parameters, which nothing writes to, and owns its buffers.

    A model of another float type than float32 is copied whole, in float32; the types that it had come with it. A
    tensor with history that a module keeps, as `weight_norm` of old does, cannot be copied: its numbers are.
    """
    kept = (v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor) and not v.is_leaf)
    memo: dict[int, Any] = {id(v): v.detach().clone() for v in kept}
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if not floats:
        return copy.deepcopy(model, memo | {id(p): p for p in model.parameters()}).eval(), ""
    twin = copy.deepcopy(model, memo).eval().float()
    for (name, old), new in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        if bool((old.isfinite() & ~new.isfinite()).any()):
            got = float(old.abs().max())
            raise CaptureError(f"'{name}' holds numbers that float32 does not, in which models are read", got=got)
    return twin, " and ".join(sorted(str(f).removeprefix("torch.") for f in floats))


def _at_least_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of one would be taken for a constant: repeat it."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    batched = [isinstance(t, torch.Tensor) and t.dim() > 0 for t in leaves]
    if True not in batched or leaves[batched.index(True)].shape[0] != 1:
        return args, kwargs
    single = (b and t.shape[0] == 1 for t, b in zip(leaves, batched, strict=True))
    twice = [torch.cat([t, t]) if one else t for t, one in zip(leaves, single, strict=True)]
    return pytree.tree_unflatten(twice, tree)


def _try_once(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the model as the user would; teaches pytree the user's dataclasses."""
    try:
        with torch.no_grad():
            out = model(*args, **kwargs)
    except Exception as e:  # the user's code may raise anything
        if not raised_outside_chipfit(e):
            raise
        given = [described(a) for a in args] + [f"{k}={described(v)}" for k, v in kwargs.items()]
        hint = "call the model on this input yourself, in eval mode, and correct the input or the model"
        what = f"The model fails on the example input: {short_message(e)}"
        raise CaptureError(what, where=users_line(e), got=", ".join(given) or "no input", hint=hint) from e
    register_dataclasses(out)
    return out
