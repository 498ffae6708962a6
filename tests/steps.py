"""The steps of `chipfit.quantize` one by one, for tests of intermediate values."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from chipfit.calibration.collect import TensorStats, collect
from chipfit.correction.bias import with_means
from chipfit.decide import scales, statistics
from chipfit.decide.assignment import Assignment, assign
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.frameworks.torch.lower import lower
from chipfit.graph.ir import Graph
from chipfit.passes.duplicate_shared_biases import duplicate_shared_biases
from chipfit.passes.fold_batch_norm import fold_batch_norm
from chipfit.passes.fuse import fuse
from chipfit.passes.shift_negative import fuse_shifts
from chipfit.plan.record import Plan
from chipfit.platform.load import load
from chipfit.platform.match import fusions
from chipfit.platform.schema import Platform
from chipfit.quantizers.grids import fake_quantize


def captured(model: nn.Module, x: torch.Tensor) -> Graph:
    """Return the graph of a model with folded batch norms."""
    return duplicate_shared_biases(fold_batch_norm(capture(model.eval(), (x,), {}))[0])[0]


def assert_same(before: Graph, after: Graph, *inputs: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Check that two graphs compute the same outputs."""
    want, got = (list(run(graph, list(inputs)).values()) for graph in (before, after))
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@dataclass
class Steps:
    """A model on its way to a plan."""

    graph: Graph
    platform: Platform
    x: torch.Tensor  #: calibration data and test data in one
    assignment: Assignment
    stats: dict[str, TensorStats]
    bits: int | None = None  #: of all weights, where they are not the platform's first choice

    def decided(self, graph: Graph, stats: dict[str, TensorStats] | None = None) -> "Steps":
        """Return the steps with another graph, for which formats are decided again."""
        return replace(
            self, graph=graph, assignment=_decide(graph, self.platform, self.bits), stats=stats or self.stats
        )

    def plan(self, rule: str = "mse") -> Plan:
        tensors = scales.choose(
            self.graph, self.assignment, self.stats, statistics.RangeRules(rule=rule, weight_rule=rule)
        )
        a = self.assignment
        return Plan(tensors=tensors, nodes=dict(a.nodes), groups=a.groups, float_edges=frozenset(a.float_edges))

    def float(self, *keep: str) -> list[torch.Tensor]:
        """Return the float network's outputs and the values named in `keep`."""
        values = run(self.graph, [self.x], keep=keep)
        return [values[k] for k in (*self.graph.outputs, *keep)]

    def quantized(self, plan: Plan, *keep: str) -> list[torch.Tensor]:
        """Return the outputs under a plan and the values named in `keep`."""
        with torch.no_grad():
            return lower(self.graph, plan).run_flat([self.x], keep)

    def rounding(self, name: str) -> float:
        """Return the mean squared error of quantizing one value, in that value."""
        t, x = self.plan().tensors[name], self.float(name)[-1]
        return float((fake_quantize(x, t.scale, t.zero_point, t.grid, t.axis) - x).square().mean())

    def error(self, *only: str) -> float:
        """Return the relative squared error of the first output if `only` these tensors (or all) are quantized."""
        plan = self.plan()
        tensors = {k: t if not only or k in only else t.with_(stored=None) for k, t in plan.tensors.items()}
        want, got = self.float()[0], self.quantized(replace(plan, tensors=tensors))[0]
        return float((got - want).square().mean() / want.square().mean())


def begin(
    model: nn.Module | Graph, x: torch.Tensor, platform: str | Platform = "imx500", bits: int | None = None
) -> Steps:
    graph, target = model if isinstance(model, Graph) else captured(model, x), load(platform)
    assignment = _decide(graph, target, bits)
    stats = collect(graph, [[x]], tensors=with_means(graph, statistics.needs(assignment)))
    return Steps(graph, target, x, assignment, stats, bits)


def _decide(graph: Graph, platform: Platform, bits: int | None) -> Assignment:
    overrides = {} if bits is None else {n.name: {"bits": bits} for n in graph.nodes}
    return assign(graph, platform, fuse_shifts(graph, fuse(graph, fusions(platform))[0]), overrides)
