"""The importance of a unit: the loss of the outputs without it, by one of three label-free metrics.

fisher     second order: E[(sum over readers and positions of x dL/dx)^2] / 2, the Fisher information of the outputs
           in the direction of the removal, where L is sampled from the network's own outputs (`rounding.fisher`).
lfh        trace of the Hessian of a channel's weights times their squared norm over their number, the score of the
           Model Compression Toolkit (label-free Hessian), with the same Fisher information in place of the Hessian.
magnitude  squared norm of a channel's weights, as a share of its layer's mean. It needs no data.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from chipfit.calibration.data import Batch
from chipfit.channel_pruning.channels import Channels
from chipfit.channel_pruning.labels import FIXED
from chipfit.graph.ir import Node
from chipfit.graph.linear import TRANSPOSED
from chipfit.graph.placement import on_cpu, placed
from chipfit.rounding.fisher import gradients, squared_gradients
from chipfit.rounding.moments import as_rows, from_rows

#: metric: (channels, batches, seed) -> importance of each unit
Metric = Callable[[Channels, Iterable[Batch], int], dict[int, float]]


def fisher(channels: Channels, batches: Iterable[Batch], seed: int) -> dict[int, float]:
    """Return the loss of the outputs without each unit, to second order [nat, or share of energy]."""
    graph, reads = channels.graph.copy(), dict[str, tuple[str, int]]()
    for node in graph.nodes[:]:
        if node.name in channels.sinks and channels.sinks[node.name] in channels.units:
            value, axis = channels.sinks[node.name]
            reads[f"{value} in {node.name}"] = (value, axis)
            own = f"{value} in {node.name}"
            graph.values[own] = replace(graph.values[value], name=own)
            place = graph.nodes.index(node)
            inputs = tuple(own if i == value and s == 0 else i for s, i in enumerate(node.inputs))
            graph.nodes[place : place + 1] = [Node(own, "Identity", (value,), (own,)), node.with_(inputs=inputs)]
    places = {unit: k for k, unit in enumerate(channels.removable)}
    total, count = torch.zeros(len(places), dtype=torch.float64), 0
    columns = {own: _columns(channels.units[at], places) for own, at in reads.items()}
    there, random = placed(graph), torch.Generator().manual_seed(seed)
    for batch in batches:
        values, found = gradients(graph, batch, set(reads), (), random, there)
        rows = max((len(g) for g in found.values()), default=0)
        sums = torch.zeros(rows, len(places) + 1)
        for own, g in found.items():
            axis = reads[own][1]
            slopes = (g * values[own]).movedim(axis, 1).flatten(2).sum(2) if g.dim() > 2 else g * values[own]
            sums.index_add_(1, columns[own], on_cpu([slopes.float()])[0])
        total += sums[:, :-1].double().square().sum(0)
        count += rows
    return {unit: float(total[k]) / (2 * max(count, 1)) for unit, k in places.items()}


def _columns(units: Tensor, places: dict[int, int]) -> Tensor:
    """Return the column of each channel's unit; those that stay share the last."""
    return torch.tensor([places.get(u, len(places)) for u in units.tolist()])


def lfh(channels: Channels, batches: Iterable[Batch], seed: int) -> dict[int, float]:
    """Return trace of the Hessian x squared norm / number of weights, of each unit's output channels."""
    graph, nodes = channels.graph, {n.name: n for n in channels.graph.nodes}
    made = [nodes[name] for name in channels.producers if nodes[name].op != "MatMul"]
    there, random = placed(graph), torch.Generator().manual_seed(seed)
    traces = {n.name: torch.zeros_like(as_rows(n, there.weights[n.weight].detach().float())) for n in made}
    for batch in batches:
        values, found = gradients(graph, batch, {n.output for n in made}, {n.data for n in made}, random, there)
        for n in (n for n in made if n.output in found):
            w = there.weights[n.weight]
            traces[n.name] += squared_gradients(n, values[n.data], found[n.output], w)

    def score(n: Node) -> Tensor:
        w = graph.weights[n.weight].detach().float()
        trace = _by_output(n, from_rows(n, on_cpu([traces[n.name]])[0], w))
        return trace.sum(1) * _by_output(n, w).square().mean(1)

    return _by_unit(channels, made, score)


def magnitude(channels: Channels, batches: Iterable[Batch], seed: int) -> dict[int, float]:
    """Return the squared norm of each unit's output channels, as a share of the mean channel of their layer."""
    nodes = {n.name: n for n in channels.graph.nodes}

    def score(n: Node) -> Tensor:
        norms = _by_output(n, channels.graph.weights[n.weight].detach().float()).square().sum(1)
        return norms / norms.mean().clamp_min(1e-24)

    return _by_unit(channels, [nodes[name] for name in channels.producers if nodes[name].op != "MatMul"], score)


def _by_output(node: Node, w: Tensor) -> Tensor:
    """Return a weight as [channels of the axis with its outputs, weights of each]."""
    return w.transpose(0, 1).flatten(1) if node.op in TRANSPOSED else w.flatten(1)


def _by_unit(channels: Channels, nodes: Iterable[Node], score: Callable[[Node], Tensor]) -> dict[int, float]:
    out = dict.fromkeys(channels.removable, 0.0)
    for n in nodes:
        for unit, value in zip(channels.units[channels.producers[n.name]].tolist(), score(n).tolist(), strict=True):
            if unit != FIXED:
                out[unit] += value
    return out


METRICS: dict[str, Metric] = {"fisher": fisher, "lfh": lfh, "magnitude": magnitude}
