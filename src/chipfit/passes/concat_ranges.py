"""Tie the result of each concatenation to its inputs: it then moves quantized values and rounds nothing."""

from dataclasses import replace

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import Constraint
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Rule
from chipfit.registry import Setting, register

_SETTING = Setting("concat_ranges", False, "inputs and result of a concatenation share one quantization grid")


@register("pass", "concat_ranges", stage="formats", setting=_SETTING)
def concat_ranges(graph: Graph, assignment: Assignment) -> tuple[Assignment, list[str]]:
    """Tie each concatenation's result to its inputs, as far as they are stored in the result's format.

    The kernel then joins integers, even if the shared grid is coarse for one of the inputs.
    """
    tie, slots, ties = (Rule(tie=("ins", "out")),), assignment.tensors, list[Constraint]()
    for n in graph.nodes:
        if n.op == "Concat" and n.output in slots:
            stored = (slots[i] for i in dict.fromkeys(n.inputs) if i is not None and i in slots)
            if inputs := tuple(s.name for s in stored if s.format_name == slots[n.output].format_name):
                ties.append(Constraint(op="Concat", rules=tie, slots={"ins": inputs, "out": (n.output,)}))
    tied = {name for constraint in ties for name in constraint.slots["out"]}
    # a tied concatenation needs no float result of its own
    joins = {kernel: value for kernel, value in assignment.joins.items() if value not in tied}
    return replace(assignment.with_constraints(ties), joins=joins), []
