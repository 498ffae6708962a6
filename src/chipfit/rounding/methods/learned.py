"""Learned rounding: AdaRound, BRECQ, QDrop and EPTQ, by the options of one method; see `rounding.learned_rounding`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from chipfit.errors import ConfigError
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import Setting, register
from chipfit.rounding.compare import split_holdout
from chipfit.rounding.learned_rounding import ReconstructionSettings, learn_rounding
from chipfit.rounding.method import NEEDS, RoundingContext, RoundingResult, apply_methods, keep_better
from chipfit.rounding.methods import gptq
from chipfit.rounding.network_blocks import SCOPES

OPTIONS = (
    Setting("reconstruct_steps", 1000, "gradient steps for each part, on 32 images each", "steps"),
    Setting("reconstruct_rate", 0.2, "step size of Adam", "rate"),
    Setting("reconstruct_float", 0.0, "probability that a value stays in float for a step", "floats"),
    Setting("reconstruct_anneal", False, "that probability falls linearly to 0", "anneal"),
    Setting("reconstruct_pull", 1.0, "weight of the pull towards quantized values", "pull"),
    Setting("reconstruct_biases", True, "biases are learned as well", "biases"),
    Setting("reconstruct_fisher", False, "errors weigh as much as they change the network's outputs", "fisher"),
    gptq.OPTIONS[-1],
)


@register("rounding", "learned", options=OPTIONS)
@dataclass(frozen=True, kw_only=True)
class Learned(ReconstructionSettings):
    """Rounding learned by gradient descent from the weights that the graph has; scales stay."""

    guard: bool = True  #: an eighth of the samples is held out; the weights from before stay where they lose less

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ConfigError("Scope of learned rounding is unknown", got=repr(self.scope), allowed=", ".join(SCOPES))

    def __call__(self, graph: Graph, plan: Plan, context: RoundingContext) -> RoundingResult:
        batches, held_out = split_holdout(context.batches, self.guard)
        learned, notes = learn_rounding(context.original, graph, plan, batches, self, seed=context.seed)
        tensors = {
            name: t.with_(origin=f"{t.origin}, codes learned by {self.scope}")
            for name, t in plan.tensors.items()
            if t.role == "weight" and t.quantized and learned.weights[name] is not graph.weights[name]
        }
        result = RoundingResult(learned, replace(plan, tensors={**plan.tensors, **tensors}), notes)
        rejected = "weights keep the codes from before they were learned"
        return keep_better(context, held_out, (graph, plan), result, "learned codes are kept", rejected)


@register(
    "correction",
    "reconstruct",
    stage="correct",
    after=("rounding", "second_moment", "bias", "activation_bias"),
    needs=NEEDS,
    decides=True,
    setting=Setting("reconstruct", None, "rounding is learned after all corrections, part by part", "scope", SCOPES),
)
def learn_after_corrections(graph: Graph, plan: Plan, *, scope: str, **given: Any) -> tuple[Graph, Plan, list[str]]:
    """Learn the rounding of a network after all other corrections; see `apply_methods`."""
    return apply_methods(f"learned(scope='{scope}')", graph, plan, **given)
