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
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import TRANSPOSED
from chipfit.graph.placement import on_cpu, placed
from chipfit.rounding.fisher import gradients, squared_gradients
from chipfit.rounding.moments import as_rows, from_rows

#: metric: (channels, batches, seed) -> importance of each unit
Metric = Callable[[Channels, Iterable[Batch], int], dict[int, float]]


def fisher(channels: Channels, batches: Iterable[Batch], seed: int) -> dict[int, float]:
    """Return the loss of the outputs without each unit, to second order [nat, or share of energy]."""
    graph, copies = _with_copies(channels)
    column = {unit: k for k, unit in enumerate(channels.removable)}
    total, samples = torch.zeros(len(column), dtype=torch.float64), 0
    columns = {name: _columns(channels.units[source], column) for name, source in copies.items()}
    on_device, generator = placed(graph), torch.Generator().manual_seed(seed)
    for batch in batches:
        values, slopes = gradients(graph, batch, set(copies), (), generator, on_device)
        count = max((len(g) for g in slopes.values()), default=0)
        sums = torch.zeros(count, len(column) + 1)
        for name, g in slopes.items():
            change, (_, axis) = g * values[name], copies[name]
            change = change.movedim(axis, 1).flatten(2).sum(2) if g.dim() > 2 else change
            sums.index_add_(1, columns[name], on_cpu([change.float()])[0])
        total += sums[:, :-1].double().square().sum(0)
        samples += count
    return {unit: float(total[k]) / (2 * max(samples, 1)) for unit, k in column.items()}


def _with_copies(channels: Channels) -> tuple[Graph, dict[str, tuple[str, int]]]:
    """Return the graph in which each reader of removable channels reads a copy, so that each has a gradient of its own.

    Also return the copies: name -> the value and the axis of its channels.
    """
    graph, copies = channels.graph.copy(), dict[str, tuple[str, int]]()
    for node in graph.nodes[:]:
        if node.name in channels.sinks and channels.sinks[node.name] in channels.units:
            value, axis = channels.sinks[node.name]
            name = f"{value} in {node.name}"
            copies[name] = (value, axis)
            graph.values[name] = replace(graph.values[value], name=name)
            inputs = tuple(name if i == value and s == 0 else i for s, i in enumerate(node.inputs))
            at = graph.nodes.index(node)
            graph.nodes[at : at + 1] = [Node(name, "Identity", (value,), (name,)), node.with_(inputs=inputs)]
    return graph, copies


def _columns(units: Tensor, column: dict[int, int]) -> Tensor:
    """Return the column of each channel's unit; units that cannot be removed share the last column."""
    return torch.tensor([column.get(u, len(column)) for u in units.tolist()])


def lfh(channels: Channels, batches: Iterable[Batch], seed: int) -> dict[int, float]:
    """Return trace of the Hessian x squared norm / number of weights, of each unit's output channels."""
    graph, nodes = channels.graph, {n.name: n for n in channels.graph.nodes}
    linear = [nodes[name] for name in channels.producers if nodes[name].op != "MatMul"]
    on_device, generator = placed(graph), torch.Generator().manual_seed(seed)
    traces = {n.name: torch.zeros_like(as_rows(n, on_device.weights[n.weight].detach().float())) for n in linear}
    for batch in batches:
        outputs, inputs = {n.output for n in linear}, {n.data for n in linear}
        values, slopes = gradients(graph, batch, outputs, inputs, generator, on_device)
        for n in (n for n in linear if n.output in slopes):
            w = on_device.weights[n.weight]
            traces[n.name] += squared_gradients(n, values[n.data], slopes[n.output], w)

    def score(n: Node) -> Tensor:
        w = graph.weights[n.weight].detach().float()
        trace = _by_output(n, from_rows(n, on_cpu([traces[n.name]])[0], w))
        return trace.sum(1) * _by_output(n, w).square().mean(1)

    return _by_unit(channels, linear, score)


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
