"""Codes and biases learned by gradient descent, so that each part of the network gives what it gives in float.

One engine for AdaRound (arXiv:2004.10568: one layer at a time), BRECQ (arXiv:2102.05426: one block), QDrop
(arXiv:2203.05740: values stay in float at random) and EPTQ (arXiv:2309.11531: the whole network, errors weighted by
second derivatives, fewer float values from step to step). Two streams of images go through the network, as in
`rounding.walk`: a unit learns on what those before it have left. All scales stay, so that the plan does.
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
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.ops import TorchOps
from chipfit.rounding.compare import before_codes
from chipfit.rounding.fisher import gradients
from chipfit.rounding.moments import as_rows
from chipfit.rounding.soft import WARM_UP, Soft, exponent, output_error, regularizer
from chipfit.rounding.streams import Stream, chunks
from chipfit.rounding.units import units
from chipfit.rounding.walk import why_not

#: rate of biases in the first step, as a share of that of weights, in units of the norm of their weights; it falls to 0
OF_BIASES = 0.01


@dataclass(frozen=True, kw_only=True)
class How:
    """What is learned, and how long."""

    scope: str = "block"  #: of `units.SCOPES`
    steps: int = 1000  #: of each unit, on a chunk of images each
    rate: float = 0.2  #: of Adam, for the variable behind each weight's share
    floats: float = 0.0  #: probability that a value stays in float for a step
    anneal: bool = False  #: that probability falls to 0 in a line
    pull: float = 1.0  #: weight of the regularizer's mean, beside the error as a share of what it was before
    biases: bool = True  #: are learned, too
    fisher: bool = False  #: errors weigh as much as they change the network's outputs, by sample and channel
    memory: int = 3 << 28  #: of all streams [byte]; what is beyond lies in mapped files
    seed: int = 0


def reconstruct(
    graph: Graph, start: Graph, plan: Plan, batches: Iterable[Sequence[Tensor]], how: How = How()
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
        return _Engine(graph, start, plan, how).run(batches)


class _Engine:
    def __init__(self, graph: Graph, start: Graph, plan: Plan, how: How) -> None:
        self.graph, self.start, self.out, self.plan, self.how = graph, start, start.copy(), plan, how
        self.out.weights = {k: w.detach().clone() for k, w in start.weights.items()}  # autograd may save them
        budget, raw = MemoryLimit(how.memory), {value for value, _ in plan.float_edges}
        self.floats: dict[str, Stream] = defaultdict(lambda: Stream(budget))
        self.codes = _Codes(budget, plan, raw)
        self.fisher: dict[str, list[Tensor]] = defaultdict(list)
        self.random = torch.Generator().manual_seed(how.seed)
        self.users = start.users()
        self.chunks = 0
        self.learned: dict[str, Tensor] = {}  #: weights and biases
        self.gains: list[float] = []  #: error of each unit, as a share of what it was

    def run(self, batches: Iterable[Sequence[Tensor]]) -> tuple[Graph, list[str]]:
        out, how = self.out, self.how
        parts = list(units(out, how.scope))
        heads = [n.output for n in out.nodes if is_linear(out, n)] if how.fisher and how.scope == "network" else []
        watched = {o for u in parts for o in u.gives} | set(heads)
        for batch in batches:
            for inputs in chunks(out, batch):
                self.chunks += 1
                for name, x in zip(out.inputs, inputs, strict=True):
                    self.floats[name].append(x)
                    self.codes[name].append(x)
                if how.fisher:
                    found = gradients(self.graph, inputs, watched, (), self.random)[1]
                    for name, g in found.items():
                        self.fisher[name].append(g.square().flatten(2).mean(2) if g.dim() > 2 else g.square())
        if not self.chunks:
            raise no_data()
        notes = []
        for k, u in enumerate(parts):
            try:
                notes += self._unit(u.of(out, heads), u.of(self.graph, heads))
            except KeyboardInterrupt:
                notes.append(f"{Interrupted.NOTE}: '{out.nodes[u.first].who}' and what follows it keep their codes")
                break
            later = {i for rest in parts[k + 1 :] for i in rest.reads}
            for streams in (self.floats, self.codes):
                for name in [n for n in streams if n not in later]:
                    streams.pop(name).free()
        new = self.start.copy()
        new.weights |= self.learned
        mean, better = sum(self.gains) / max(len(self.gains), 1), sum(g < 1 for g in self.gains)
        said = f"learned the codes of {better} of {len(self.gains)} units ({how.scope}), the others keep theirs"
        return new, [*notes, f"{said}: the error of their outputs falls to {mean:.0%} on average"]

    def _unit(self, unit: Graph, wanted: Graph) -> list[str]:
        """One unit on both streams, its weights learned in between."""
        for k in range(self.chunks):
            found = run(wanted, [self.floats[i][k] for i in wanted.inputs])
            for o in wanted.outputs:
                self.floats[o].append(found[o])
        soft, shifts, notes = {}, {}, []
        for n in unit.nodes:
            why = why_not(self.out, self.plan, self.users, n)
            if why == "":
                continue
            if any(n.weight == name for name, _ in self.plan.sums):
                why = "the chip bounds the sum of its codes"
            if why:
                notes.append(f"the rounding of '{n.who}' is not learned: {why}")
                continue
            w = self.graph.weights[n.weight].detach().float()
            soft[n.weight] = Soft(self.plan[n.weight], w, unit.weights[n.weight])
            if n.bias is not None and self.how.biases:
                norm = as_rows(n, w).norm(dim=2).flatten()
                shifts[n.bias] = norm, torch.zeros_like(norm).requires_grad_()
        before = self._error(unit) if soft else 0.0
        if before > 0:
            old = {name: unit.weights[name] for name in (*soft, *shifts)}
            self._learn(unit, soft, shifts, before)
            self.out.weights |= {name: s.hard() for name, s in soft.items()}
            self.out.weights |= {name: old[name] + norm * d.detach() for name, (norm, d) in shifts.items()}
            after = self._error(unit)
            self.gains.append(min(after / before, 1.0))
            if after < before:
                self.learned |= {name: self.out.weights[name] for name in old}
            else:
                self.out.weights |= old
        for k in range(self.chunks):
            got = before_codes(unit, self.plan, self._inputs(unit, k), done=self.codes.rounded)
            for o in unit.outputs:
                self.codes[o].append(got[o])
        return notes

    def _inputs(self, unit: Graph, k: int, floats: float = 0.0) -> list[Any]:
        """What a unit reads of a chunk, of which a share is float."""
        codes = [self.codes[i][k] for i in unit.inputs]
        if not floats:
            return codes
        return [self._mixed(x, self.floats[i][k], floats) for i, x in zip(unit.inputs, codes, strict=True)]

    def _mixed(self, x: Any, other: Any, share: float) -> Any:
        """`x`, of which a share of the numbers, at random, is the other's; all of it where that is no float tensor."""
        if not share or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.where(torch.rand(x.shape, generator=self.random) < share, other, x)

    def _loss(self, unit: Graph, got: dict[str, Any], k: int) -> Tensor:
        total = torch.zeros(())
        for o in unit.outputs:
            if unit.is_float(o):
                weight = self.fisher[o][k] if self.fisher.get(o) else None
                total = total + output_error(got[o], self.floats[o][k], weight)
        return total

    def _error(self, unit: Graph) -> float:
        """Of the outputs on all chunks, everything rounded."""
        errors = (
            self._loss(unit, before_codes(unit, self.plan, self._inputs(unit, k), done=self.codes.rounded), k)
            for k in range(self.chunks)
        )
        return float(sum(errors)) / self.chunks

    @torch.enable_grad()
    def _learn(self, unit: Graph, soft: dict[str, Soft], shifts: dict[str, Any], before: float) -> None:
        how, share = self.how, self.how.floats
        groups = [[s.v for s in soft.values()], [d for _, d in shifts.values()]]
        optimizer = torch.optim.Adam([{"params": g} for g in groups if g], lr=how.rate)
        numbers = sum(s.v.numel() for s in soft.values())

        def rounding(name: str, x: Tensor) -> Tensor:
            stored = self.plan[name]
            s, z = (shape_for(p, x, stored.axis) for p in (stored.scale, stored.zero_point))
            y = TorchOps.fake_quantize(x, s, z.to(s.dtype), stored.grid)
            return y if name in unit.weights else self._mixed(y, x, share)  # type: ignore[no-any-return]

        for step in range(how.steps):
            share = how.floats * (1 - step / max(how.steps - 1, 1) if how.anneal else 1)
            k = int(torch.randint(self.chunks, (), generator=self.random))
            weights = {**unit.weights, **{name: s.soft() for name, s in soft.items()}}
            weights |= {name: unit.weights[name] + norm * d for name, (norm, d) in shifts.items()}
            done = {*self.codes.rounded, *soft}
            got = before_codes(unit, self.plan, self._inputs(unit, k, share), weights, done, rounding)
            loss = self._loss(unit, got, k) / before
            if step >= WARM_UP * how.steps:
                pull = sum(regularizer(s.share(), exponent(step, how.steps)) for s in soft.values())
                loss = loss + how.pull / numbers * pull
            for group in optimizer.param_groups[1:]:
                group["lr"] = how.rate * OF_BIASES * (1 - step / how.steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Codes(dict[str, Stream]):
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
