"""Gradients whose second moment is the Fisher information of a network's outputs.

The loss is taken at labels drawn from the network's own outputs: from the softmax of class scores, and from normal
distributions around other outputs, with the spread that weighs errors as `compare.Reference` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.calibration.collect import valid_token_mask, without_padding
from chipfit.calibration.data import Batch
from chipfit.engine.run import run
from chipfit.graph.ir import Graph, Node

#: number of samples whose mean is taken, and number that goes through the network at a time
IMAGES, CHUNK = 128, 32


def gradients(
    graph: Graph, batch: Sequence[Tensor], wanted: Collection[str], besides: Collection[str], random: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return values, and the gradients of the sampled loss with respect to them.

    Args:
        wanted: values with gradients; those on which no output depends get none.
        besides: values without gradients.
    """
    kept: dict[str, Tensor] = {}

    def watch(name: str, x: Any) -> Any:
        if name in wanted and isinstance(x, Tensor) and x.is_floating_point():
            x = kept[name] = x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()
            x.register_hook(finite)  # for the gradients of values before it
        return x

    def hook(node: Node, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(watch(o, x) for o, x in zip(node.outputs, outputs, strict=False))

    weights = {k: w.detach() for k, w in graph.weights.items()}
    with torch.enable_grad():
        inputs = [watch(name, x.detach()) for name, x in zip(graph.inputs, batch, strict=True)]
        env = run(graph, inputs, hook=hook, weights=weights, keep=set(besides))
        words = valid_token_mask(graph, batch)
        floats = [without_padding(env[o], words) for o in dict.fromkeys(graph.outputs) if graph.is_float(o)]
        loss = sum((sampled_loss(y, random) for y in floats if y.requires_grad), torch.zeros(()))
        found = torch.autograd.grad(loss, list(kept.values()), allow_unused=True) if loss.requires_grad else ()
    values = {k: x.detach() for k, x in {**env, **kept}.items() if isinstance(x, Tensor)}
    # `autograd.grad` returns gradients from before the hook
    return values, {k: finite(g.detach()) for k, g in zip(kept, found, strict=False) if g is not None}


def finite(g: Tensor) -> Tensor:
    """Return a gradient with 0 where the function has no slope, as a root at 0."""
    return g.nan_to_num(0.0, 0.0, 0.0)


def sampled_loss(y: Tensor, random: torch.Generator) -> Tensor:
    """Return a loss whose gradient has the Fisher information F of an output as its second moment.

    d' F d / 2 is then the KL divergence of class scores, or the energy of d as a share of the energy of the outputs.
    """
    if y.dim() == 2 and y.shape[1] > 1:
        labels = torch.multinomial(y.detach().softmax(1), 1, generator=random)[:, 0]
        return F.cross_entropy(y, labels, reduction="sum")
    energy = y.detach().square().sum() / max(len(y) if y.dim() else 1, 1)
    noise = torch.randn(y.shape, generator=random) * (2 / energy.clamp_min(1e-24)).sqrt()
    return (y * noise).sum()


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
        if len(sizes) > 1 or 0 in sizes:
            yield list(batch)
            left -= 1
        else:
            for parts in zip(*(x[:left].split(CHUNK) for x in batch), strict=True):
                yield list(parts)
            left -= sizes.pop()
        if left <= 0:
            return
