"""Run a Graph on the torch engine, node by node."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from chipfit.engine.kernels import execute
from chipfit.engine.memory import memory_errors
from chipfit.errors import DataError, first_line
from chipfit.graph.ir import Graph, Node
from chipfit.graph.placement import inputs_on, placed

Hook = Callable[[Node, tuple[Any, ...]], tuple[Any, ...]]


def run(
    graph: Graph,
    inputs: Iterable[torch.Tensor],
    *,
    hook: Hook | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    keep: Collection[str] = (),
    reuse: bool = False,
) -> dict[str, Any]:
    """Execute every node in order and free each value after its last consumer.

    Args:
        inputs: one tensor per graph input.
        hook: called with each node and its outputs; its result replaces them.
        weights: replace `graph.weights`, for example by quantized ones.
        keep: names of values to return besides the outputs.
        reuse: let activations and sums overwrite an operand that has no further consumer: faster, with less memory and
            the same numbers. Not for tensors that autograd needs.

    Returns:
        The graph's outputs and the values in `keep`, by name.

    Raises:
        MemoryExceeded: the device of the graph ran out of memory.
    """
    env: dict[str, Any] = dict(zip(graph.inputs, inputs, strict=True))
    with memory_errors(graph.device, [x.shape for x in env.values()]):
        return _run(graph, env, hook, weights, keep, reuse)


def _run(
    graph: Graph,
    env: dict[str, Any],
    hook: Hook | None,
    weights: Mapping[str, torch.Tensor] | None,
    keep: Collection[str],
    reuse: bool,
) -> dict[str, Any]:
    """Execute the nodes on the values in `env`; see `run`."""
    table = graph.weights if weights is None else weights
    keep = set(keep)
    overwrites = _overwrites(graph, keep) if reuse else set()
    for n, done in zip(graph.nodes, done_after(graph), strict=True):
        args = [None if i is None else env[i] if i in env else table[i] for i in n.inputs]
        results = _OVERWRITE[n.op](*args) if n.name in overwrites else execute(n, args)
        del args
        if hook is not None:
            results = hook(n, results)
        env.update(zip(n.outputs, results, strict=False))
        del results
        for name in done:
            if name not in keep:
                env.pop(name, None)
    return {name: env[name] if name in env else table[name] for name in (*graph.outputs, *keep)}


#: tolerated difference between graph and model, from the order of additions, as a share of the largest output
_TOLERANCE = 1e-3


def first_deviation(
    graph: Graph, inputs: Sequence[torch.Tensor], want: Sequence[Any], tolerance: float = _TOLERANCE
) -> tuple[str, Any] | None:
    """Return the first output that deviates from the model's and its distance, shape or error; None if all agree.

    Args:
        inputs: on any device, as what follows.
        want: the model's outputs.
    """
    try:
        with torch.inference_mode():
            env = run(placed(graph), inputs_on(graph.device, inputs))
    except (RuntimeError, LookupError, TypeError, ValueError, DataError) as e:  # of torch, and of opaque layers
        return graph.outputs[0], first_line(e)
    for name, a in zip(graph.outputs, want, strict=True):
        pair = [torch.as_tensor(x).detach().cpu() for x in (a, env[name])]  # not every device has float64
        a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in pair)
        if a.shape != b.shape:
            return name, list(b.shape)
        largest = float(a.abs().max()) if a.numel() else math.inf
        if math.isfinite(largest) and not (a - b).abs().max() <= tolerance * max(largest, 1e-3):
            return name, float((a - b).abs().max())
    return None


def done_after(graph: Graph) -> list[list[str]]:
    """Return for each node the values and weights without later consumers, except outputs of the graph."""
    last: dict[str | None, int] = {}
    for k, n in enumerate(graph.nodes):
        last.update(dict.fromkeys((*n.outputs, *n.inputs), k))
    kept: set[str | None] = {None, *graph.outputs}
    out: list[list[str]] = [[] for _ in graph.nodes]
    for name, k in last.items():
        if name is not None and name not in kept:
            out[k].append(name)
    return out


#: operators that can overwrite their first operand with the result
_OVERWRITE: dict[str, Callable[..., tuple[Any, ...]]] = {
    "Relu": lambda x: (x.relu_(),),
    "Relu6": lambda x: (x.clamp_(0, 6),),
    "Add": lambda x, y: (x.add_(y),) if y.shape == x.shape and y.dtype == x.dtype else (x + y,),
}


def _overwrites(graph: Graph, keep: Collection[str]) -> set[str]:
    """Return the nodes that may overwrite: their first operand has no other consumer and shares no memory."""
    certain = [not n.facts.view for n in graph.nodes]  # the result shares no memory with operands
    fresh = {o for n, new in zip(graph.nodes, certain, strict=True) if new for o in n.outputs}
    fresh -= {i for n, new in zip(graph.nodes, certain, strict=True) if not new for i in n.inputs}
    out = set()
    for n, done in zip(graph.nodes, done_after(graph), strict=True):
        first = n.inputs[0] if n.op in _OVERWRITE else None
        if first in fresh and first in done and first not in keep and n.inputs.count(first) == 1:
            out.add(n.name)
    return out
