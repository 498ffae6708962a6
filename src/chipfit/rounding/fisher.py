"""Gradients whose second moment is the Fisher information of a network's outputs, and the statistic "importance".

To second order, errors d in weights or activations cost sum h d^2 / 2 plus mixed terms. h, their importance, is the
diagonal of the Fisher information, the mean over samples of squared gradients. The loss is taken at labels drawn from
the network's own outputs: from the softmax of class scores, and from normal distributions around other outputs, with
the spread that weighs errors as `outputs.OutputErrors` does.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.collect import TensorStats, valid_tokens
from chipfit.calibration.data import Batch, IndivisibleBatch
from chipfit.engine.run import run
from chipfit.graph.data_sizes import with_comparable_outputs
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear, places
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.ranges.search import Sample
from chipfit.registry import register
from chipfit.rounding.moments import as_rows, from_rows, patches, targets
from chipfit.rounding.outputs import parts_of, sampled_loss

#: number of samples whose mean is taken, and number that goes through the network at a time
IMAGES, CHUNK = 128, 32
#: share of the mean squared gradient that is added to every activation's, so that few images alone do not decide
_FLOOR = 0.3
_BINS = 2048
#: numbers that `squared_gradients` holds at once
NUMBERS_AT_ONCE = 1 << 24


def gradients(
    graph: Graph,
    batch: Sequence[Tensor],
    wanted: Collection[str],
    besides: Collection[str],
    random: torch.Generator,
    there: Graph | None = None,
    consumers: Mapping[str, Callable[[Tensor, Tensor], None]] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return values, and the gradients of the sampled loss with respect to them, on the device of the graph.

    Args:
        wanted: values with gradients; those on which no output depends get none.
        besides: values without gradients.
        random: of the CPU.
        there: the graph as `placed` returns it, for many batches; None: it is placed for this one.
        consumers: further values -> functions of the value and its gradient, called as soon as it is known. Neither
            outlives the call, so that memory need not hold the gradients of all values at once.
    """
    graph = with_comparable_outputs(graph)  # lists whose length depends on data have gradients of little use, or none
    there = placed(graph) if there is None else with_comparable_outputs(there)
    batch = inputs_on(graph.device, batch)
    kept, slopes, consumers = dict[str, Tensor](), dict[str, Tensor](), consumers or {}

    def arrive(name: str, slope: Tensor) -> Tensor:
        slope = finite(slope.detach())
        value = kept[name] if name in wanted else kept.pop(name)
        if name in wanted:
            slopes[name] = slope
        if name in consumers:
            consumers[name](value.detach(), slope)
        return slope  # for the gradients of values before it

    def watch(name: str, x: Any) -> Any:
        if (name in wanted or name in consumers) and isinstance(x, Tensor) and x.is_floating_point():
            x = kept[name] = x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()
            x.register_hook(partial(arrive, name))
        return x

    def hook(node: Node, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(watch(o, x) for o, x in zip(node.outputs, outputs, strict=False))

    weights = {k: w.detach() for k, w in there.weights.items()}
    with torch.enable_grad():
        inputs = [watch(name, x.detach()) for name, x in zip(graph.inputs, batch, strict=True)]
        env = run(there, inputs, hook=hook, weights=weights, keep=set(besides))
        parts = parts_of(graph, env, valid_tokens(graph, batch)).values()
        loss = sum((sampled_loss(y, random) for y in parts if y.requires_grad), torch.zeros(()))
        values = {k: x.detach() for k, x in env.items() if isinstance(x, Tensor)}
        del env, parts
        if loss.requires_grad:
            torch.autograd.grad(loss, [x for x in kept.values() if x.is_leaf], allow_unused=True)
    return values | {k: x.detach() for k, x in kept.items()}, slopes


def finite(g: Tensor) -> Tensor:
    """Return a gradient with 0 where the function has no slope, as a root at 0."""
    return g.nan_to_num(0.0, 0.0, 0.0)


def split_float_readers(
    graph: Graph, edges: Collection[tuple[str, str]], names: Iterable[str]
) -> tuple[Graph, dict[str, str]]:
    """Return the graph with a name of its own for each quantized value that some operator reads in float.

    Args:
        edges: values and the nodes that read them in float, as of `Plan.float_edges`.
        names: quantized values.

    Returns:
        The graph, and quantized value -> name by which its readers read it.
    """
    before = {value for value, _ in edges}
    codes = {name: f"{name} in codes" if name in before else name for name in names}
    out, nodes = graph.copy(), list[Node]()

    def add(values: Iterable[str]) -> None:
        for v in (v for v in values if codes.get(v, v) != v):
            nodes.append(Node(codes[v], "Identity", (v,), (codes[v],)))
            out.values[codes[v]] = replace(graph.values[v], name=codes[v])

    add(graph.inputs)
    for n in graph.nodes:
        reads = (i if i is None or (i, n.name) in edges else codes.get(i, i) for i in n.inputs)
        nodes.append(n.with_(inputs=tuple(reads)))
        add(n.outputs)
    out.nodes[:], out.outputs[:] = nodes, [codes.get(o, o) for o in graph.outputs]
    return out, codes


def first_samples(batches: Iterable[Batch]) -> Iterable[list[Tensor]]:
    """Yield the first `IMAGES` samples, in chunks."""
    left = IMAGES
    for batch in batches:
        sizes = {len(x) if x.dim() else 0 for x in batch}
        if isinstance(batch, IndivisibleBatch) or len(sizes) > 1 or 0 in sizes:
            yield list(batch)
            left -= 1
        else:
            for parts in zip(*(x[:left].split(CHUNK) for x in batch), strict=True):
                yield list(parts)
            left -= sizes.pop()
        if left <= 0:
            return


# ---------------------------------------------------------------- importance


@register("statistic", "importance")
def importance(
    graph: Graph,
    edges: Collection[tuple[str, str]],
    names: Collection[str],
    stats: Mapping[str, TensorStats],
    batches: Iterable[Batch],
    seed: int,
) -> dict[str, Tensor | Sample]:
    """Return squared gradients of weights, and of activations as histograms, from one forward and backward pass.

    Args:
        edges: (value, node) pairs where the node reads the float value, as in `Plan.float_edges`.
        names: weights of linear operators, and activations; others are ignored.
        stats: calibration statistics of the float network, for the ranges of activations.
        batches: of graph inputs; the first `IMAGES` samples are used.

    Returns:
        For a weight: the sum over samples of (dL/dw)^2, in the weight's shape, divided by its mean. For an activation:
        a histogram over its range of (dL/dx)^2 + 0.3 times its mean, without exact zeros, which every grid contains.
        Tensors on which no output depends are missing.
    """
    spread = [n for n in names if n in stats and stats[n].low < stats[n].high]
    split, codes = split_float_readers(graph, edges, spread)
    linear = (n for n in split.nodes if is_linear(split, n) and n.weight in names and not split.is_weight(n.data))
    readers = [n for n in linear if (n.weight, n.name) not in edges]
    there, random = placed(split), torch.Generator().manual_seed(seed)
    weights = {n.weight: torch.zeros_like(as_rows(n, there.weights[n.weight].detach().float())) for n in readers}
    counts = {n: torch.zeros(_BINS, device=graph.device) for n in spread}

    def count(name: str, x: Tensor, slope: Tensor) -> None:
        x, weight = x.flatten(), slope.flatten().square()
        weight = (weight + _FLOOR * weight.mean()) * (x != 0)
        begin, width = stats[name].low, (stats[name].high - stats[name].low) / _BINS
        place = torch.sub(x, begin).div_(width).clamp_(0, _BINS - 1)
        # `bincount` would wait for its greatest index on a device, and `histogram` takes 5 times as long
        counts[name] += torch.zeros_like(counts[name]).index_add_(0, place.to(torch.int32), weight)

    consumers = {codes[name]: partial(count, name) for name in spread}
    made, read = {n.output for n in readers}, {n.data for n in readers}
    for batch in first_samples(batches) if made or consumers else ():
        values, found = gradients(split, batch, made, read, random, there, consumers)
        for n in (n for n in readers if n.output in found):
            weights[n.weight] += squared_gradients(n, values[n.data], found[n.output], there.weights[n.weight])
    out: dict[str, Tensor | Sample] = {}
    weights, counts = (dict(zip(sums, on_cpu([*sums.values()]), strict=True)) for sums in (weights, counts))
    for n in (n for n in readers if bool(weights[n.weight].any())):
        out[n.weight] = from_rows(n, weights[n.weight] / weights[n.weight].mean(), graph.weights[n.weight])
    for name in (name for name in spread if bool(counts[name].any())):
        ends = stats[name].low, stats[name].high
        low, high = (torch.tensor([v], dtype=torch.float64) for v in ends)
        edge = torch.linspace(*ends, _BINS + 1)[None]
        out[name] = Sample((edge[:, 1:] + edge[:, :-1]) / 2, counts[name][None], low, high, edge)
    return out


def squared_gradients(node: Node, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """Return the squared gradients of W: sum over samples n of (sum over positions p of g[n, p] x[n, p]')^2."""
    where, shape = torch.arange(places(node, g.shape), device=g.device), as_rows(node, w).shape
    at_once = max(1, NUMBERS_AT_ONCE // max(shape.numel(), shape[0] * shape[2] * len(where)))
    out = g.new_zeros(shape)
    for some, slopes in zip(x.split(at_once), g.split(at_once), strict=True):
        reads = patches(node, some, w, where).unflatten(2, (len(some), -1))  # [g, K, n, P]
        made = targets(node, slopes, where).unflatten(2, (len(some), -1))  # [g, O/g, n, P]
        out += (made.transpose(1, 2) @ reads.permute(0, 2, 3, 1)).square_().sum(1)
    return out
