"""Rounding of weights by the methods that `Settings(rounding=...)` names; see `chipfit.rounding.methods`."""

from typing import Any

from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import OFF, Setting, register
from chipfit.rounding.method import STEP, apply_methods, default_method

_DOES = "methods that round weights, 'gptq' or 'gptq + learned'; None: 'gptq' below 6 bits, or as a repair"
_SETTING = Setting("rounding", None, _DOES, "methods", (OFF,), kind="rounding")
_REPLACED = ("bias", "activation_bias", "second_moment")


@register("correction", "rounding", excludes=_REPLACED, default_value=default_method, setting=_SETTING, **STEP)
def round_weights(graph: Graph, plan: Plan, *, methods: str, **given: Any) -> tuple[Graph, Plan, list[str]]:
    """Round the weights of a network; see `apply_methods`."""
    return apply_methods(methods, graph, plan, **given)
