"""Run a Graph on the torch engine, and move between a model's own arguments and flat lists of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.engine.kernels import execute
from chipfit.errors import DataError
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS

Hook = Callable[[Node, tuple[Any, ...]], tuple[Any, ...]]


def run(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    *,
    hook: Hook | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    keep: Collection[str] = (),
    reuse: bool = False,
) -> dict[str, Any]:
    """Execute every node in order; a value is freed after its last reader.

    Args:
        graph: what to run.
        inputs: one tensor per graph input.
        hook: called with each node and its outputs; what it returns takes their place.
        weights: replaces `graph.weights`, for example by quantized ones.
        keep: value names to hold beyond their last use.
        reuse: let activations and sums overwrite an operand that nothing reads any more: faster, less memory, same
            numbers. Not for tensors that autograd needs.

    Returns:
        The graph's outputs and the kept values, by name.
    """
    env: dict[str, Any] = dict(zip(graph.inputs, inputs, strict=True))
    table = graph.weights if weights is None else weights
    held = {*graph.outputs, *keep}
    last: dict[str, int] = {}
    for k, n in enumerate(graph.nodes):
        for i in n.inputs:
            if i is not None:
                last[i] = k
    made: dict[str, str] = {}  # value -> operator that wrote it
    aliased = {i for n in graph.nodes if not _fresh(n.op) for i in n.inputs if i is not None} if reuse else set()
    for k, n in enumerate(graph.nodes):
        args = [None if i is None else env[i] if i in env else table[i] for i in n.inputs]
        target = _overwritable(n, last, k, {*held, *aliased}, made) if reuse else None
        results = _OVERWRITE[n.op](*args) if target is not None else execute(n, args)
        made.update(dict.fromkeys(n.outputs, n.op))
        del args
        if hook is not None:
            results = hook(n, results)
        env.update(zip(n.outputs, results, strict=False))
        del results
        for i in {*n.inputs, *n.outputs}:
            if i in env and i not in held and last.get(i, -1) <= k:
                del env[i]
    return {name: env[name] if name in env else table[name] for name in held}


#: operators that can write their result over their first operand
_OVERWRITE: dict[str, Callable[..., tuple[Any, ...]]] = {
    "Relu": lambda x: (x.relu_(),),
    "Relu6": lambda x: (x.clamp_(0, 6),),
    "Add": lambda x, y: (x.add_(y),) if y.shape == x.shape and y.dtype == x.dtype else (x + y,),
}


def _fresh(op: str | None) -> bool:
    """The operator's result certainly shares no memory with an operand."""
    return op in OPS and not OPS[op].view


def _overwritable(
    node: Node, last: Mapping[str, int], k: int, held: Collection[str], made: Mapping[str, str]
) -> str | None:
    """The operand that `node` may overwrite: freshly made, read here for the last time, read once."""
    first = node.inputs[0] if node.inputs else None
    if node.op not in _OVERWRITE or first is None or first in held or not _fresh(made.get(first)):
        return None
    return first if last.get(first) == k and node.inputs.count(first) == 1 else None


def flatten_inputs(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """The tensors of a call, in the order of `graph.inputs`.

    Raises:
        DataError: the call has another structure than the captured one.
    """
    return flatten_call(json.loads(graph.in_spec), args, kwargs or {})


def flatten_call(spec: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """As `flatten_inputs`, from a parsed `in_spec`. An argument may be passed by name although it was captured by position.

    Raises:
        DataError: as above.
    """
    args, kwargs = tuple(args), dict(kwargs)
    for name in spec["names"][len(args) : spec["args"]]:
        if name not in kwargs:
            break
        args = (*args, kwargs.pop(name))
    leaves = pytree.tree_leaves((args, {k: kwargs[k] for k in spec["kwargs"] if k in kwargs}))
    if len(args) != spec["args"] or set(kwargs) != set(spec["kwargs"]) or len(leaves) != spec["leaves"]:
        raise DataError(
            "The model was captured with other inputs",
            got=f"{len(args)} positional and {sorted(kwargs)} keyword arguments, {len(leaves)} leaves",
            allowed=f"{spec['args']} positional and {sorted(spec['kwargs'])} keyword arguments, {spec['leaves']} leaves",
        )
    return [leaves[i] for i in spec["tensors"]]


def unflatten_outputs(graph: Graph, outputs: Sequence[Any]) -> Any:
    """The structure that the user's model returns, from one value per graph output."""
    spec = json.loads(graph.out_spec)
    leaves = [outputs[x["output"]] if "output" in x else x["constant"] for x in spec["leaves"]]
    return pytree.tree_unflatten(leaves, load_tree(spec))


def load_tree(spec: Mapping[str, Any]) -> Any:
    """The pytree of a saved spec; where its classes cannot be imported here, plain dicts and tuples of the same shape."""
    try:
        return pytree.treespec_loads(spec["tree"])
    except Exception:  # pytree raises many types for unknown classes; the plain form always loads
        return pytree.treespec_loads(spec["plain"])


def dump_tree(tree: Any, example: Any) -> dict[str, str]:
    """A pytree spec as JSON, with the plain form that loads without the user's classes."""
    plain = pytree.treespec_dumps(pytree.tree_structure(_plain(example)))
    try:
        return {"tree": pytree.treespec_dumps(tree), "plain": plain}
    except Exception:  # a class without serialised name
        return {"tree": plain, "plain": plain}


def _plain(x: Any) -> Any:
    import dataclasses

    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items() if v is not None or type(x) is dict}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x) if getattr(x, f.name) is not None}
    if isinstance(x, (tuple, list)):
        return type(x)(_plain(v) for v in x) if type(x) in (tuple, list) else tuple(_plain(v) for v in x)
    return x
