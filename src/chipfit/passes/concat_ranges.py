"""Tie the result of each concatenation to its inputs: it then moves quantized values and rounds nothing."""

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import Constraint
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Rule
from chipfit.registry import Setting, register

_SETTING = Setting("concat_ranges", False, "what a concatenation joins shares one grid with its result")


@register("pass", "concat_ranges", stage="formats", setting=_SETTING)
def concat_ranges(graph: Graph, assignment: Assignment) -> tuple[Assignment, list[str]]:
    """Tie each concatenation's result to its inputs, as far as they are stored in the result's format."""
    tie = (Rule(tie=("ins", "out")),)
    constraints = (
        Constraint(op="Concat", rules=tie, slots={"ins": tuple(inputs), "out": (result,)})
        for result, *inputs in concat_groups(graph, assignment)
    )
    return assignment.with_constraints(constraints), []


def concat_groups(graph: Graph, assignment: Assignment) -> list[list[str]]:
    """Return, for each concatenation, its result and then its inputs, as far as they are stored in the result's format.

    Lists are in execution order: of nested concatenations the inner one comes first.
    """
    out = []
    for n in graph.nodes:
        if n.op == "Concat" and n.output in assignment.tensors:
            wanted, slots = assignment.tensors[n.output].format_name, assignment.tensors
            stored = (slots[i] for i in dict.fromkeys(n.inputs) if i is not None and i in slots)
            inputs = [s.name for s in stored if s.format_name == wanted]
            if inputs:
                out.append([n.output, *inputs])
    return out
