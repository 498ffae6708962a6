"""Codes of weights that are learned by gradient descent, for those with minutes; see `rounding.reconstruct`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from chipfit.correction.rounding import GUARD
from chipfit.errors import interruption_note
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import Setting, register
from chipfit.rounding.compare import compare_plans, split_holdout
from chipfit.rounding.learned_rounding import ReconstructionSettings, learn_rounding
from chipfit.rounding.network_blocks import SCOPES


@register(
    "correction",
    "reconstruct",
    stage="correct",
    after=("rounding", "second_moment", "bias", "activation_bias"),
    needs=("original", "batches"),
    decides=True,
    setting=Setting("reconstruct", None, "codes and biases are learned, part by part", "scope", SCOPES),
    options=(
        Setting("reconstruct_steps", 1000, "gradient steps for each part, on 32 images each", "steps"),
        Setting("reconstruct_rate", 0.2, "step size of Adam", "rate"),
        Setting("reconstruct_float", 0.0, "probability that a value stays in float for a step", "floats"),
        Setting("reconstruct_anneal", False, "that probability falls to 0 in a line", "anneal"),
        Setting("reconstruct_pull", 1.0, "weight of the pull towards codes", "pull"),
        Setting("reconstruct_biases", True, "biases are learned as well", "biases"),
        Setting("reconstruct_fisher", False, "errors weigh as much as they change the network's outputs", "fisher"),
        GUARD,
    ),
)
def learn_codes(
    graph: Graph,
    plan: Plan,
    *,
    original: Graph,
    batches: Iterable[Sequence[Tensor]],
    steps: float = 1000,
    guard: bool = True,
    **how: Any,
) -> tuple[Graph, Plan, list[str]]:
    """The graph with learned weights and biases, the plan, whose scales stay, and notes.

    Args:
        original: the float network, which the outputs are compared with.
        how: fields of `rounding.reconstruct.How`.

    Raises:
        DataError: no batch at all.
    """
    images, held = split_holdout(list(batches)) if guard else (list(batches), [])
    chosen = ReconstructionSettings(**how, steps=int(steps), seed=plan.provenance.get("settings", {}).get("seed", 0))
    done, notes = learn_rounding(original, graph, plan, images, chosen)
    if held and not interruption_note(notes):
        fits, said = compare_plans(original, held, (graph, plan), (done, plan))
        if not fits:
            return graph, plan, [*notes, f"warning: weights keep the codes from before they were learned: {said}"]
        notes.append(f"learned codes are kept: {said}")
    tensors = {
        name: t.with_(origin=f"{t.origin}, codes learned by {chosen.scope}")
        for name, t in plan.tensors.items()
        if t.role == "weight" and t.quantized and done.weights[name] is not graph.weights[name]
    }
    return done, replace(plan, tensors={**plan.tensors, **tensors}), notes
