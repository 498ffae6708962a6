"""Fit what is left to what was: weights and batch norms of the smaller network reproduce the outputs of each layer.

Both networks run side by side, node by node. Each linear operator of the smaller one whose inputs differ is fitted by
least squares to the outputs of the whole one, from its own inputs, so that it repairs the errors before it too.

    W', b' = argmin E |t - W' x - b'|^2 + ridge |W' - W|^2,  x: inputs of the smaller network, t: outputs of the whole

A bias that the operator does not have goes to the mean of the batch norm behind it. No labels, no gradients.
Source: He et al. 2017, arXiv:1707.06168, eq. 1 (the reconstruction of the feature map).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.data import Batch
from chipfit.calibration.source import MemoryLimit
from chipfit.channel_pruning.resize import Kept
from chipfit.engine.kernels import execute
from chipfit.engine.run import done_after
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.passes.rewriting import Readers
from chipfit.rounding.gptq import corrected_weights
from chipfit.rounding.moments import Moments, as_rows, from_rows, patches, positions, targets
from chipfit.rounding.streams import MEMORY, Stream

#: output positions per operator, at least; of each sample at least one
POSITIONS = 20_000
#: ridge, as a share of the mean square of the inputs
RIDGE = 0.003
#: operators with more inputs for each output keep their weights, as their moments would fill the memory
LARGEST = 6000

Streams = dict[str, Stream]


@torch.no_grad()
def refit(whole: Graph, small: Graph, kept: Mapping[str, Kept], batches: Iterable[Batch], seed: int) -> Graph:
    """Return the smaller network with fitted weights, biases and means of batch norms.

    Args:
        kept: value -> the channels that `small` has of it.
        batches: of graph inputs; all of them are kept at each value that is still to be read, on disk beyond a limit.
    """
    return _Refit(placed(whole), placed(small).copy(), kept, seed).run(small, batches)


class _Refit:
    def __init__(self, whole: Graph, small: Graph, kept: Mapping[str, Kept], seed: int) -> None:
        self.whole, self.small, self.kept = whole, small, kept
        self.readers, self.random = Readers(small), torch.Generator().manual_seed(seed)
        self.wanted: Streams = {}
        self.given: Streams = {}
        self.changed = {name for name in kept if not bool(kept[name].mask.all())}
        self.before, self.chunks, self.memory = dict(small.weights), 0, MemoryLimit(MEMORY)

    def run(self, start: Graph, batches: Iterable[Batch]) -> Graph:
        for batch in batches:
            self.chunks += 1
            for name, x in zip(self.small.inputs, inputs_on(self.small.device, batch), strict=True):
                self._keep(self.wanted, name, x)
                self._keep(self.given, name, x)
        nodes = zip(self.whole.nodes, list(self.small.nodes), done_after(self.small), strict=True)
        for big, node, done in nodes:
            self._run(self.whole, big, self.wanted)
            if self.changed.intersection(self.small.activations(node)):
                self.changed |= set(node.outputs)
                if self._fits(node):
                    self._fit(node)
            self._run(self.small, node, self.given)
            for name in done:
                for streams in (self.wanted, self.given):
                    if name in streams:
                        streams.pop(name).free()
        names = [name for name, w in self.small.weights.items() if w is not self.before[name]]
        out = start.copy()
        for name in names:
            out.weights[name] = on_cpu([self.small.weights[name]])[0].clone()
        return out

    def _run(self, graph: Graph, node: Node, streams: Streams) -> None:
        for k in range(self.chunks):
            args = [None if i is None else streams[i][k] if i in streams else graph.weights[i] for i in node.inputs]
            for name, x in zip(node.outputs, execute(node, args), strict=False):
                self._keep(streams, name, x)

    def _keep(self, streams: Streams, name: str, x: Any) -> None:
        if name not in streams:
            streams[name] = Stream(self.memory, expected=self.chunks or None)
        streams[name].append(x)

    def _fits(self, node: Node) -> bool:
        if not is_linear(self.small, node) or self.small.is_weight(node.data) or self.readers.why_fixed(node):
            return False
        return as_rows(node, self.small.weights[node.weight]).shape[2] <= LARGEST

    def _norm_behind(self, node: Node) -> Node | None:
        reader = self.readers.only(node.output)
        return reader if reader is not None and reader.op == "BatchNorm" and reader.data == node.output else None

    def _fit(self, node: Node) -> None:
        w, norm = self.small.weights[node.weight], self._norm_behind(node)
        rows = as_rows(node, w.float())
        moments = self._moments(node, rows, w)
        bias = None if node.bias is None else self.small.weights[node.bias]
        if bias is not None or norm is not None:
            x, t = moments.means()
            fitted = corrected_weights(rows, *moments.centred(), RIDGE)
            constant = (t - (fitted @ x.unsqueeze(2))[..., 0]).flatten()
            self._move_constant(node, norm, constant, bias)
        else:
            fitted = corrected_weights(rows, *moments.about(torch.zeros_like(moments.t)), RIDGE)
        self.small.weights[node.weight] = from_rows(node, fitted, w).to(w.dtype)

    def _move_constant(self, node: Node, norm: Node | None, constant: Tensor, bias: Tensor | None) -> None:
        """Let a layer add a constant, by its bias or by the mean of the batch norm behind it."""
        if bias is not None:
            self.small.weights[node.bias or ""] = constant.to(bias.dtype)
        elif norm is not None and not self.readers.why_fixed(norm):
            mean = norm.inputs[3] or ""
            self.small.weights[mean] = self.small.weights[mean] - constant.to(self.small.weights[mean].dtype)

    def _moments(self, node: Node, rows: Tensor, w: Tensor) -> Moments:
        moments = Moments.empty(rows)
        samples = sum(len(x) for x in self.given[node.data].chunks)
        each = max(1, -(-POSITIONS // max(1, samples)))
        inputs = zip(self.given[node.data], self._outputs(node), strict=True)
        for x, t in inputs:
            where = positions(node, t, each, self.random)
            moments.add(patches(node, x.float(), w, where), targets(node, t, where))
        return moments

    def _outputs(self, node: Node) -> Iterable[Tensor]:
        """Yield the wanted outputs, without the channels that are gone."""
        kept = self.kept.get(node.output)
        for t in self.wanted[node.output]:
            yield t.float() if kept is None else t.float()[(slice(None),) * kept.axis + (kept.mask,)]
