"""Fit weights and batch norms of a pruned network so that each layer reproduces the outputs of the original network.

Both networks run side by side, node by node. Each linear operator of the pruned network whose inputs differ is fitted
by least squares to the outputs of the original one, from its own inputs, so that it compensates errors before it, too.

    W', b' = argmin E |t - W' x - b'|^2 + ridge |W' - W|^2,  x: inputs of the pruned network, t: outputs of the original

An operator without a bias adds it by the mean of the batch norm behind it. No labels, no gradients.
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
from chipfit.rounding.gptq_solver import corrected_weights
from chipfit.rounding.moments import Moments, as_rows, from_rows, patches, positions, targets
from chipfit.rounding.streams import MEMORY, Stream

#: least number of output positions per operator; each sample gives at least one
POSITIONS = 20_000
#: weight of the ridge term, as a share of the mean square of the inputs
RIDGE = 0.003
#: most inputs for each output; operators with more keep their weights, as their moments would fill the memory
MOST_INPUTS = 6000

Streams = dict[str, Stream]


@torch.no_grad()
def refit(original: Graph, pruned: Graph, kept: Mapping[str, Kept], batches: Iterable[Batch], seed: int) -> Graph:
    """Return the pruned network with fitted weights, biases and means of batch norms.

    Args:
        kept: value -> the channels that the pruned network has of it.
        batches: of graph inputs; values that are still to be read are kept for all batches, on disk beyond a limit.
    """
    return _Refit(placed(original), placed(pruned).copy(), kept, seed).run(pruned, batches)


class _Refit:
    """Both networks, run node by node, and the values that later nodes read."""

    def __init__(self, original: Graph, pruned: Graph, kept: Mapping[str, Kept], seed: int) -> None:
        self.original, self.pruned, self.kept = original, pruned, kept
        self.readers, self.random = Readers(pruned), torch.Generator().manual_seed(seed)
        self.targets: Streams = {}  #: values of the original network
        self.values: Streams = {}  #: values of the pruned network
        self.changed = {name for name in kept if not bool(kept[name].mask.all())}
        self.unfitted, self.batches, self.memory = dict(pruned.weights), 0, MemoryLimit(MEMORY)

    def run(self, pruned: Graph, batches: Iterable[Batch]) -> Graph:
        """Return `pruned`, the network on the CPU, with the fitted weights."""
        for batch in batches:
            self.batches += 1
            for name, x in zip(self.pruned.inputs, inputs_on(self.pruned.device, batch), strict=True):
                self._store(self.targets, name, x)
                self._store(self.values, name, x)
        nodes = zip(self.original.nodes, list(self.pruned.nodes), done_after(self.pruned), strict=True)
        for original, node, done in nodes:
            self._advance(original, node)
            self._free(done)
        out = pruned.copy()
        for name in [name for name, w in self.pruned.weights.items() if w is not self.unfitted[name]]:
            out.weights[name] = on_cpu([self.pruned.weights[name]])[0].clone()
        return out

    def _advance(self, original: Node, node: Node) -> None:
        """Run a node of the original network, fit its counterpart if its inputs differ, and run that."""
        self._run_node(self.original, original, self.targets)
        if self.changed.intersection(self.pruned.activations(node)):
            self.changed |= set(node.outputs)
            if self._is_fitted(node):
                self._fit(node)
        self._run_node(self.pruned, node, self.values)

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            for streams in (self.targets, self.values):
                if name in streams:
                    streams.pop(name).free()

    def _run_node(self, graph: Graph, node: Node, streams: Streams) -> None:
        for k in range(self.batches):
            args = [None if i is None else streams[i][k] if i in streams else graph.weights[i] for i in node.inputs]
            for name, x in zip(node.outputs, execute(node, args), strict=False):
                self._store(streams, name, x)

    def _store(self, streams: Streams, name: str, x: Any) -> None:
        if name not in streams:
            streams[name] = Stream(self.memory, expected=self.batches or None)
        streams[name].append(x)

    def _is_fitted(self, node: Node) -> bool:
        if not is_linear(self.pruned, node) or self.pruned.is_weight(node.data) or self.readers.why_fixed(node):
            return False
        return as_rows(node, self.pruned.weights[node.weight]).shape[2] <= MOST_INPUTS

    def _norm_behind(self, node: Node) -> Node | None:
        reader = self.readers.only(node.output)
        return reader if reader is not None and reader.op == "BatchNorm" and reader.data == node.output else None

    def _fit(self, node: Node) -> None:
        w, norm = self.pruned.weights[node.weight], self._norm_behind(node)
        rows = as_rows(node, w.float())
        moments = self._moments(node, rows, w)
        bias = None if node.bias is None else self.pruned.weights[node.bias]
        if bias is not None or norm is not None:
            x, t = moments.means()
            fitted = corrected_weights(rows, *moments.centred(), RIDGE)
            constant = (t - (fitted @ x.unsqueeze(2))[..., 0]).flatten()
            self._move_constant(node, norm, constant, bias)
        else:
            fitted = corrected_weights(rows, *moments.with_fixed_bias(torch.zeros_like(moments.t)), RIDGE)
        self.pruned.weights[node.weight] = from_rows(node, fitted, w).to(w.dtype)

    def _move_constant(self, node: Node, norm: Node | None, constant: Tensor, bias: Tensor | None) -> None:
        """Let a layer add a constant, by its bias or by the mean of the batch norm behind it."""
        if bias is not None:
            self.pruned.weights[node.bias or ""] = constant.to(bias.dtype)
        elif norm is not None and not self.readers.why_fixed(norm):
            mean = norm.inputs[3] or ""
            self.pruned.weights[mean] = self.pruned.weights[mean] - constant.to(self.pruned.weights[mean].dtype)

    def _moments(self, node: Node, rows: Tensor, w: Tensor) -> Moments:
        moments = Moments.empty(rows)
        samples = sum(len(x) for x in self.values[node.data].chunks)
        each = max(1, -(-POSITIONS // max(1, samples)))
        inputs = zip(self.values[node.data], self._outputs(node), strict=True)
        for x, t in inputs:
            where = positions(node, t, each, self.random)
            moments.add(patches(node, x.float(), w, where), targets(node, t, where))
        return moments

    def _outputs(self, node: Node) -> Iterable[Tensor]:
        """Yield the wanted outputs, without the channels that are gone."""
        kept = self.kept.get(node.output)
        for t in self.targets[node.output]:
            yield t.float() if kept is None else t.float()[(slice(None),) * kept.axis + (kept.mask,)]
