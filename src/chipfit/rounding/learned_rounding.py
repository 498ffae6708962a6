"""Codes and biases learned by gradient descent, so that each part of the network gives what it gives in float.

One engine for AdaRound (arXiv:2004.10568: one layer at a time), BRECQ (arXiv:2102.05426: one block), QDrop
(arXiv:2203.05740: values stay in float at random) and EPTQ (arXiv:2309.11531: the whole network, errors weighted by
second derivatives, fewer float values from step to step). A float and a quantized copy of the
calibration samples go through the network block by block, as in `rounding.sequential_reconstruction`, so that each
block learns on the outputs that the quantized blocks before it produce. Scales stay, and with them the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.batch_cache import MemoryLimit
from chipfit.calibration.data import no_data
from chipfit.engine.run import run
from chipfit.errors import Interrupted
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.ops import TorchOps
from chipfit.rounding.adaround import WARM_UP, SoftWeight, output_error, regularizer, regularizer_exponent
from chipfit.rounding.compare import unrounded_outputs
from chipfit.rounding.fisher import gradients
from chipfit.rounding.moments import as_rows
from chipfit.rounding.network_blocks import network_blocks
from chipfit.rounding.sequential_reconstruction import why_not_fitted
from chipfit.rounding.streams import MEMORY, Stream, chunks

#: rate of biases in the first step, as a share of that of weights, in units of the norm of their weights; it falls to 0
BIAS_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class ReconstructionSettings:
    """What is learned, and for how long."""

    scope: str = "block"  #: of `network_blocks.SCOPES`
    steps: int = 1000  #: of each block, on a chunk of images each
    rate: float = 0.2  #: of Adam, for the variable behind each weight's share
    floats: float = 0.0  #: probability that a value stays in float for a step
    anneal: bool = False  #: that probability falls to 0 in a line
    pull: float = 1.0  #: weight of the regularizer's mean, beside the error as a share of what it was before
    biases: bool = True  #: are learned, too
    fisher: bool = False  #: errors weigh as much as they change the network's outputs, by sample and channel


def learn_rounding(
    graph: Graph,
    start: Graph,
    plan: Plan,
    batches: Iterable[Sequence[Tensor]],
    settings: ReconstructionSettings = ReconstructionSettings(),
    *,
    seed: int = 0,
) -> tuple[Graph, list[str]]:
    """The network with learned codes and biases, and notes.

    Args:
        graph: the float network.
        start: the same with the weights and biases to start from, on their grids or to be rounded to the nearest code.
        plan: of both; nothing in it changes.
        batches: of graph inputs; they are read once.

    Raises:
        DataError: no batch at all.
    """
    with torch.no_grad():
        return _Learner(graph, start, plan, settings, seed).run(batches)


class _Learner:
    def __init__(self, graph: Graph, start: Graph, plan: Plan, settings: ReconstructionSettings, seed: int = 0) -> None:
        self.graph, self.start, self.out, self.plan, self.settings = graph, start, start.copy(), plan, settings
        self.out.weights = {k: w.detach().clone() for k, w in start.weights.items()}  # autograd may save them
        budget, raw = MemoryLimit(MEMORY), {value for value, _ in plan.float_edges}
        self.floats: dict[str, Stream] = defaultdict(lambda: Stream(budget))
        self.codes = _QuantizedStreams(budget, plan, raw)
        self.fisher: dict[str, list[Tensor]] = defaultdict(list)
        self.random = torch.Generator().manual_seed(seed)
        self.readers = Readers(start)
        self.chunks = 0
        self.learned: dict[str, Tensor] = {}  #: weights and biases
        self.gains: list[float] = []  #: error of each block, as a share of what it was

    def run(self, batches: Iterable[Sequence[Tensor]]) -> tuple[Graph, list[str]]:
        out, settings = self.out, self.settings
        blocks = list(network_blocks(out, settings.scope))
        by_layer = settings.fisher and settings.scope == "network"
        heads = [n.output for n in out.nodes if by_layer and is_linear(out, n)]
        watched = {o for b in blocks for o in b.outputs} | set(heads)
        for batch in batches:
            for inputs in chunks(out, batch):
                self.chunks += 1
                for name, x in zip(out.inputs, inputs, strict=True):
                    self.floats[name].append(x)
                    self.codes[name].append(x)
                if settings.fisher:
                    found = gradients(self.graph, inputs, watched, (), self.random)[1]
                    for name, g in found.items():
                        self.fisher[name].append(g.square().flatten(2).mean(2) if g.dim() > 2 else g.square())
        if not self.chunks:
            raise no_data()
        notes = []
        for k, b in enumerate(blocks):
            try:
                notes += self._learn_block(b.subgraph(out, heads), b.subgraph(self.graph, heads))
            except KeyboardInterrupt:
                notes.append(f"{Interrupted.NOTE}: '{out.nodes[b.first].who}' and what follows it keep their codes")
                break
            later = {i for rest in blocks[k + 1 :] for i in rest.inputs}
            for streams in (self.floats, self.codes):
                for name in [n for n in streams if n not in later]:
                    streams.pop(name).free()
        new = self.start.copy()
        new.weights |= self.learned
        mean, better = sum(self.gains) / max(len(self.gains), 1), sum(g < 1 for g in self.gains)
        said = f"learned the codes of {better} of {len(self.gains)} units ({settings.scope}), the others keep theirs"
        return new, [*notes, f"{said}: the error of their outputs falls to {mean:.0%} on average"]

    def _learn_block(self, block: Graph, wanted: Graph) -> list[str]:
        """One block on both streams, its weights learned in between."""
        for k in range(self.chunks):
            found = run(wanted, [self.floats[i][k] for i in wanted.inputs])
            for o in wanted.outputs:
                self.floats[o].append(found[o])
        soft, shifts, notes = {}, {}, []
        for n in block.nodes:
            why = why_not_fitted(self.out, self.plan, self.readers, n)
            if why == "":
                continue
            if any(n.weight == name for name, _ in self.plan.sums):
                why = "the chip bounds the sum of its codes"
            if why:
                notes.append(f"the rounding of '{n.who}' is not learned: {why}")
                continue
            w = self.graph.weights[n.weight].detach().float()
            soft[n.weight] = SoftWeight(self.plan[n.weight], w, block.weights[n.weight])
            if n.bias is not None and self.settings.biases:
                norm = as_rows(n, w).norm(dim=2).flatten()
                shifts[n.bias] = norm, torch.zeros_like(norm).requires_grad_()
        before = self._error(block) if soft else 0.0
        if before > 0:
            old = {name: block.weights[name] for name in (*soft, *shifts)}
            self._learn(block, soft, shifts, before)
            self.out.weights |= {name: s.hard() for name, s in soft.items()}
            self.out.weights |= {name: old[name] + norm * d.detach() for name, (norm, d) in shifts.items()}
            after = self._error(block)
            self.gains.append(min(after / before, 1.0))
            if after < before:
                self.learned |= {name: self.out.weights[name] for name in old}
            else:
                self.out.weights |= old
        for k in range(self.chunks):
            got = unrounded_outputs(block, self.plan, self._inputs(block, k), done=self.codes.rounded)
            for o in block.outputs:
                self.codes[o].append(got[o])
        return notes

    def _inputs(self, block: Graph, k: int, floats: float = 0.0) -> list[Any]:
        """What a block reads of a chunk, of which a share is float."""
        codes = [self.codes[i][k] for i in block.inputs]
        if not floats:
            return codes
        return [self._mixed(x, self.floats[i][k], floats) for i, x in zip(block.inputs, codes, strict=True)]

    def _mixed(self, x: Any, other: Any, share: float) -> Any:
        """`x`, of which a share of the numbers, at random, is the other's; all of it where that is no float tensor."""
        if not share or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.where(torch.rand(x.shape, generator=self.random) < share, other, x)

    def _loss(self, block: Graph, got: dict[str, Any], k: int) -> Tensor:
        total = torch.zeros(())
        for o in block.outputs:
            if block.is_float(o):
                weight = self.fisher[o][k] if self.fisher.get(o) else None
                total = total + output_error(got[o], self.floats[o][k], weight)
        return total

    def _error(self, block: Graph) -> float:
        """Of the outputs on all chunks, everything rounded."""
        errors = (
            self._loss(block, unrounded_outputs(block, self.plan, self._inputs(block, k), done=self.codes.rounded), k)
            for k in range(self.chunks)
        )
        return float(sum(errors)) / self.chunks

    @torch.enable_grad()
    def _learn(self, block: Graph, soft: dict[str, SoftWeight], shifts: dict[str, Any], before: float) -> None:
        settings, share = self.settings, self.settings.floats
        groups = [[s.v for s in soft.values()], [d for _, d in shifts.values()]]
        optimizer = torch.optim.Adam([{"params": g} for g in groups if g], lr=settings.rate)
        numbers = sum(s.v.numel() for s in soft.values())

        def rounding(name: str, x: Tensor) -> Tensor:
            stored = self.plan[name]
            s, z = (shape_for(p, x, stored.axis) for p in (stored.scale, stored.zero_point))
            y = TorchOps.fake_quantize(x, s, z.to(s.dtype), stored.grid)
            return y if name in block.weights else self._mixed(y, x, share)  # type: ignore[no-any-return]

        for step in range(settings.steps):
            share = settings.floats * (1 - step / max(settings.steps - 1, 1) if settings.anneal else 1)
            k = int(torch.randint(self.chunks, (), generator=self.random))
            weights = {**block.weights, **{name: s.soft() for name, s in soft.items()}}
            weights |= {name: block.weights[name] + norm * d for name, (norm, d) in shifts.items()}
            done = {*self.codes.rounded, *soft}
            got = unrounded_outputs(block, self.plan, self._inputs(block, k, share), weights, done, rounding)
            loss = self._loss(block, got, k) / before
            if step >= WARM_UP * settings.steps:
                pull = sum(regularizer(s.share(), regularizer_exponent(step, settings.steps)) for s in soft.values())
                loss = loss + settings.pull / numbers * pull
            for group in optimizer.param_groups[1:]:
                group["lr"] = settings.rate * BIAS_RATE * (1 - step / settings.steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _QuantizedStreams(dict[str, Stream]):
    """Streams of values as the chip has them: in codes, unless some operator reads what was before them."""

    def __init__(self, budget: MemoryLimit, plan: Plan, raw: set[str]) -> None:
        super().__init__()
        self.rounded: set[str] = set()  #: what is read from here needs no rounding
        self._budget, self._plan, self._raw = budget, plan, raw

    def __missing__(self, name: str) -> Stream:
        stored = None if name in self._raw else self._plan.stored(name)
        if stored is not None:
            self.rounded.add(name)
        self[name] = Stream(self._budget, stored)
        return self[name]
