"""Learned rounding: quantized weights and biases found by gradient descent, so that blocks keep their float outputs.

One method for AdaRound (arXiv:2004.10568: one layer at a time), BRECQ (arXiv:2102.05426: one block), QDrop
(arXiv:2203.05740: values stay in float at random) and EPTQ (arXiv:2309.11531: the whole network, errors weighted by
second derivatives, fewer float values from step to step). A float and a quantized copy of the calibration samples go
through the network block by block, as in `rounding.sequential_reconstruction`, so that each block learns on the
outputs that the quantized blocks before it produce. Scales stay, and with them the plan.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chipfit.calibration.data import Batch
from chipfit.engine.run import run
from chipfit.errors import ConfigError, Interrupted
from chipfit.graph.ir import CPU, Graph
from chipfit.graph.linear import is_linear
from chipfit.graph.placement import placed
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.ops import TorchOps
from chipfit.registry import Setting, option, register
from chipfit.rounding.adaround import (
    WARM_UP,
    SoftWeight,
    StraightThroughWeight,
    output_error,
    regularizer,
    regularizer_exponent,
)
from chipfit.rounding.compare import QuantizedRun, split_holdout
from chipfit.rounding.fisher import gradients
from chipfit.rounding.method import STEP, RoundingContext, RoundingResult, apply_methods, keep_better
from chipfit.rounding.moments import as_rows
from chipfit.rounding.sequential_reconstruction import why_not_fitted
from chipfit.rounding.streams import SampleStreams, Stream

#: learning rate of biases in the first step, as a share of that of weights, in units of the norm of their weights
BIAS_RATE = 0.01
SCOPES = ("layer", "block", "network")
#: note of a guard that has dropped what was learned
REJECTED = "weights keep the codes from before they were learned"
#: classes of `torch.optim` with which rounding is learned, with their defaults
OPTIMIZERS = "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "SGD"
#: linear operators in a chain without a branch that make a block
IN_A_ROW = 3


@register("rounding", "learned")
@dataclass(frozen=True, kw_only=True)
class Learned:
    """Rounding learned by gradient descent, from the weights and biases that the graph has."""

    scope: str = "block"  #: part of the network whose outputs are kept: one of `SCOPES`
    steps: int = option("reconstruct_steps", 1000, "gradient steps for each part, on 32 images each")
    rate: float = option("reconstruct_rate", 0.2, "learning rate; that of biases falls linearly to 0")
    optimizer: str = option("reconstruct_optimizer", "Adam", "class of torch.optim", choices=OPTIMIZERS)
    floats: float = option("reconstruct_float", 0.0, "probability that a value stays in float for a step")
    anneal: bool = option("reconstruct_anneal", False, "that probability falls linearly to 0")
    pull: float = option("reconstruct_pull", 1.0, "weight of the pull towards quantized values")
    straight: bool = option("reconstruct_straight_through", False, "weights are rounded in every step (STE)")
    biases: bool = option("reconstruct_biases", True, "biases are learned as well")
    fisher: bool = option("reconstruct_fisher", False, "errors weigh as much as they change the network's outputs")
    guard: bool = option("rounding_guard", True, "an eighth of the images decides whether the plan before is better")

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ConfigError("Scope of learned rounding is unknown", got=repr(self.scope), allowed=", ".join(SCOPES))

    def __call__(self, graph: Graph, plan: Plan, context: RoundingContext) -> RoundingResult:
        batches, held_out = split_holdout(context.batches, self.guard)
        learned, notes = BlockReconstruction(context.original, graph, plan, self, context.seed).run(batches)
        tensors = {
            name: t.with_(origin=f"{t.origin}, codes learned by {self.scope}")
            for name, t in plan.tensors.items()
            if t.role == "weight" and t.quantized and learned.weights[name] is not graph.weights[name]
        }
        result = RoundingResult(learned, replace(plan, tensors={**plan.tensors, **tensors}), notes)
        return keep_better(result, (graph, plan), context.original, held_out, "learned codes are kept", REJECTED)


_SETTING = Setting("reconstruct", None, "rounding is learned after all corrections, part by part", "scope", SCOPES)
_AFTER = ("rounding", "second_moment", "bias", "activation_bias")


@register("correction", "reconstruct", after=_AFTER, setting=_SETTING, **STEP)
def learn_after_corrections(graph: Graph, plan: Plan, *, scope: str, **given: Any) -> tuple[Graph, Plan, list[str]]:
    """Learn the rounding of a network after all other corrections; see `apply_methods`."""
    return apply_methods(f"learned(scope='{scope}')", graph, plan, **given)


@dataclass
class BlockVariables:
    """The variables of one block: weights between two quantized values each, and shifts of biases."""

    soft: dict[str, SoftWeight] = field(default_factory=dict)
    #: bias -> norms of the weights of each output, and shifts in units of them
    shifts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def values(self, weights: Mapping[str, Tensor], hard: bool) -> dict[str, Tensor]:
        """Return weights, on their grids or between quantized values, and biases."""
        out = {name: s.hard() if hard else s.soft() for name, s in self.soft.items()}
        shifts = {name: norm * (d.detach() if hard else d) for name, (norm, d) in self.shifts.items()}
        return out | {name: weights[name] + shift for name, shift in shifts.items()}


class BlockReconstruction(SampleStreams):
    """A pass over a network that learns its weights and biases block after block.

    Args:
        graph: the float network.
        start: `graph` with the weights and biases to start from; weights may lie on their grids.
        plan: of both; it stays valid.
    """

    def __init__(self, graph: Graph, start: Graph, plan: Plan, method: Learned, seed: int) -> None:
        super().__init__(plan)
        self.original, self.graph, self.start, self.out, self.method = (
            graph,
            placed(graph),
            start,
            placed(start),
            method,
        )
        weights = {k: w.detach().clone() for k, w in self.out.weights.items()}  # autograd may save them
        self.out = replace(self.out, weights=weights)
        self.fisher: dict[str, list[Tensor]] = defaultdict(list)
        self.random = torch.Generator().manual_seed(seed)
        #: masks as large as activations are drawn where these are, so that they depend on the kind of device
        on_cpu = graph.device == CPU
        self.masks = self.random if on_cpu else torch.Generator(graph.device).manual_seed(seed)
        self.learned: dict[str, Tensor] = {}  #: weights and biases
        self.gains: list[float] = []  #: error of each block, as a share of the error before learning

    @torch.no_grad()
    def run(self, batches: Iterable[Batch]) -> tuple[Graph, list[str]]:
        """Return the network with learned weights and biases, and notes; batches of graph inputs are read once."""
        out, scope, notes = self.out, self.method.scope, list[str]()
        blocks = list(network_blocks(out, scope))
        by_layer = self.method.fisher and scope == "network"
        heads = [n.output for n in out.nodes if by_layer and is_linear(out, n)]
        watched = {o for b in blocks for o in b.outputs} | set(heads)
        for inputs in self.read_inputs(out, batches):
            how = (self.original, inputs, watched, (), self.random, self.graph)
            for name, g in gradients(*how)[1].items() if self.method.fisher else ():  # how much errors weigh
                self.fisher[name].append(g.square().flatten(2).mean(2) if g.dim() > 2 else g.square())
        for k, b in enumerate(blocks):
            try:
                notes += self.reconstruct(b.subgraph(out, heads), b.subgraph(self.graph, heads))
            except KeyboardInterrupt:
                rest = f"'{out.nodes[b.first].display_name}' and what follows it keep their codes"
                notes.append(f"{Interrupted.NOTE}: {rest}")
                break
            self.free({*self.floats, *self.quantized} - {i for rest in blocks[k + 1 :] for i in rest.inputs})
        new = self.start.copy()
        new.weights |= {name: w.cpu() for name, w in self.learned.items()}
        mean, better = sum(self.gains) / max(len(self.gains), 1), sum(g < 1 for g in self.gains)
        note = f"learned the codes of {better} of {len(self.gains)} units ({scope}), the others keep theirs"
        return new, [*notes, f"{note}: the error of their outputs falls to {mean:.0%} on average"]

    def reconstruct(self, block: Graph, wanted: Graph) -> list[str]:
        """Run one block on both streams, with its weights learned in between; returns notes."""
        self.floats |= {o: Stream(self.memory) for o in wanted.outputs}
        for k in range(self.chunks):
            found = run(wanted, [self.floats[i][k] for i in wanted.inputs])
            for o in wanted.outputs:
                self.floats[o].append(found[o])
        variables, notes = self.variables(block)
        before = self.error(block) if variables.soft else 0.0
        if before > 0:
            old = {name: block.weights[name] for name in (*variables.soft, *variables.shifts)}
            self.learn(block, variables, before)
            self.out.weights |= variables.values(old, hard=True)
            after = self.error(block)
            self.gains.append(min(after / before, 1.0))
            if after < before:
                self.learned |= {name: self.out.weights[name] for name in old}
            else:
                self.out.weights |= old
        self.quantized |= {o: self.quantized_stream(o) for o in block.outputs}
        for k in range(self.chunks):
            got = self.outputs(block, k)
            for o in block.outputs:
                self.quantized[o].append(got[o])
        return notes

    def rounded(self, block: Graph) -> set[str]:
        """Return the inputs of a block whose streams hold quantized values."""
        return {name for name in block.inputs if self.quantized[name].stored is not None}

    def variables(self, block: Graph) -> tuple[BlockVariables, list[str]]:
        """Return what a block can learn, and a note for each weight that it cannot."""
        out, notes, readers = BlockVariables(), list[str](), Readers(self.start)
        for n in block.nodes:
            why = why_not_fitted(self.out, self.plan, readers, n)
            if why is None and any(n.weight == name for name, _ in self.plan.sums):
                why = "the chip bounds the sum of its codes"
            if why:
                notes.append(f"the rounding of '{n.display_name}' is not learned: {why}")
            if why is not None:
                continue
            w = self.graph.weights[n.weight].detach().float()
            kind = StraightThroughWeight if self.method.straight else SoftWeight
            out.soft[n.weight] = kind(self.plan[n.weight], w, block.weights[n.weight])
            if n.bias is not None and self.method.biases:
                norm = as_rows(n, w).norm(dim=2).flatten()
                out.shifts[n.bias] = norm, torch.zeros_like(norm).requires_grad_()
        return out, notes

    def outputs(self, block: Graph, k: int, floats: float = 0.0, **options: Any) -> dict[str, Any]:
        """Return the outputs of a block on a chunk, of whose inputs a share stays in float."""
        inputs = [self.mixed(self.quantized[i][k], self.floats[i][k] if floats else None, floats) for i in block.inputs]
        return QuantizedRun(block, self.plan, inputs, **{"done": self.rounded(block), **options}).finish()

    def mixed(self, x: Any, other: Any, share: float) -> Any:
        """Replace a share of the numbers of `x`, at random, by those of `other`; only in float tensors."""
        if not share or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.where(torch.rand(x.shape, generator=self.masks, device=x.device) < share, other, x)

    def loss(self, block: Graph, got: dict[str, Any], k: int) -> Tensor:
        """Return the error of a block's float outputs on a chunk."""
        total = torch.zeros(())
        for o in (o for o in block.outputs if block.is_float(o)):
            weight = self.fisher[o][k] if self.fisher.get(o) else None
            total = total + output_error(got[o], self.floats[o][k], weight)
        return total

    def error(self, block: Graph) -> float:
        """Return the mean error of a block's outputs over all chunks, with everything rounded."""
        return float(sum(self.loss(block, self.outputs(block, k), k) for k in range(self.chunks))) / self.chunks

    @torch.enable_grad()
    def learn(self, block: Graph, variables: BlockVariables, before: float) -> None:
        """Train the variables of a block by the error of its outputs, as a share of the error before."""
        method, share = self.method, self.method.floats
        soft = variables.soft.values()
        groups = [[s.v for s in soft], [d for _, d in variables.shifts.values()]]
        optimizer = getattr(torch.optim, method.optimizer)([{"params": g} for g in groups if g], lr=method.rate)
        numbers = sum(s.v.numel() for s in soft)

        def rounding(name: str, x: Tensor) -> Tensor:
            stored = self.plan[name]
            s, z = (shape_for(p, x, stored.axis) for p in stored.numbers_on(x.device))
            y = TorchOps.fake_quantize(x, s, z.to(s.dtype), stored.grid)
            return y if name in block.weights else self.mixed(y, x, share)  # type: ignore[no-any-return]

        for step in range(method.steps):
            share = method.floats * (1 - step / max(method.steps - 1, 1) if method.anneal else 1)
            k = int(torch.randint(self.chunks, (), generator=self.random))
            weights = {**block.weights, **variables.values(block.weights, hard=False)}
            done = {*self.rounded(block), *variables.soft}
            got = self.outputs(block, k, share, weights=weights, done=done, rounding=rounding)
            loss = self.loss(block, got, k) / before
            if step >= WARM_UP * method.steps:
                exponent = regularizer_exponent(step, method.steps)
                loss = loss + method.pull / numbers * sum(regularizer(s.share(), exponent) for s in soft)
            for group in optimizer.param_groups[1:]:
                group["lr"] = method.rate * BIAS_RATE * (1 - step / method.steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ---------------------------------------------------------------- parts of a network


class Block(NamedTuple):
    """Nodes `first` to `last - 1`, the values that they read, and the values that later nodes read of them."""

    first: int
    last: int
    inputs: list[str]
    outputs: list[str]

    def subgraph(self, graph: Graph, more: list[str]) -> Graph:
        """Return these nodes as a network, with `more` outputs."""
        outputs = [*dict.fromkeys([*self.outputs, *more])]
        return replace(graph, nodes=graph.nodes[self.first : self.last], inputs=self.inputs, outputs=outputs)


def network_blocks(graph: Graph, scope: str) -> Iterator[Block]:
    """Yield the parts of a network in execution order.

    Args:
        scope: "layer": a linear operator and the nodes up to the next one. "block": the nodes between two values that
            alone connect the network before and behind, as around residual branches; without a branch, up to three
            linear operators. "network": all nodes.
    """
    heads = [k for k, n in enumerate(graph.nodes) if is_linear(graph, n)]
    cuts = {"layer": heads[1:], "block": _block_starts(graph, heads), "network": []}[scope]
    made = {o: k for k, n in enumerate(graph.nodes) for o in n.outputs}
    used = _last_used(graph)
    for first, last in zip([0, *cuts], [*cuts, len(graph.nodes)], strict=True):
        nodes = graph.nodes[first:last]
        inputs = dict.fromkeys(i for n in nodes for i in n.inputs if i is not None and not graph.is_weight(i))
        outputs = [o for n in nodes for o in n.outputs if used.get(o, -1) >= last or o in graph.outputs]
        yield Block(first, last, [i for i in inputs if made.get(i, -1) < first], outputs)


def _last_used(graph: Graph) -> dict[str, int]:
    return {i: k for k, n in enumerate(graph.nodes) for i in n.inputs if i is not None}


def _block_starts(graph: Graph, heads: list[int]) -> list[int]:
    """Return the index of the first node of each block but the first."""
    used, alive = _last_used(graph), {i for i in graph.inputs if graph.is_float(i)}
    pieces: list[tuple[int, int]] = []  # begin, linear operators in it
    for k, node in enumerate(graph.nodes):
        alive = {v for v in alive if used.get(v, -1) >= k}
        if k == 0 or len(alive) == 1:
            pieces.append((k, 0))
        pieces[-1] = pieces[-1][0], pieces[-1][1] + (k in heads)
        alive |= {o for o in node.outputs if graph.is_float(o)}
    cuts, row = [], 0
    for begin, linear in pieces:
        if linear and row and (linear > 1 or row + 1 > IN_A_ROW):
            cuts.append(begin)
            row = 0
        row += IN_A_ROW if linear > 1 else linear
    return cuts
