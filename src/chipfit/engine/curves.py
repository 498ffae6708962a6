"""The steps of a Curve, a function of each element of one tensor: their text, and how they are computed."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from chipfit.graph.ir import Node
from chipfit.operators.formulas import compute as compute_formula
from chipfit.operators.table import OPS

CURVE = "Curve"
#: layout of the operators that a curve may consist of
ELEMENTWISE = "elementwise"


class Step(NamedTuple):
    """One operator of a curve."""

    op: str
    operands: tuple[str | float, ...]  #: "0" is the operand of the curve, "k" the result of step k; or numbers
    attrs: Mapping[str, Any]


def text_of(steps: Sequence[Step]) -> str:
    """Return steps as the text of the attribute `steps`.

    >>> text_of([Step("Abs", ("0",), {}), Step("Add", ("1", 1.0), {})])
    '[["Abs", ["0"], {}], ["Add", ["1", 1.0], {}]]'
    """
    return json.dumps(steps)


def text_of_formula(formula: str) -> str:
    """Return the steps of a formula of x, see `operators.formulas`, as text.

    >>> text_of_formula("abs(x) + 1.0")
    '[["Abs", ["0"], {}], ["Add", ["1", 1.0], {}]]'
    """
    steps: list[Step] = []

    def append(op: str, operands: Sequence[str | float], **attrs: Any) -> str:
        steps.append(Step(op, tuple(operands), attrs))
        return str(len(steps))

    compute_formula(formula, append, x="0")
    return text_of(steps)


@cache
def steps_of(text: str) -> tuple[Step, ...]:
    """Return the steps of a text.

    Raises:
        ValueError: they are not the steps of a curve: an unknown operator, or one that combines elements.
    """
    steps = []
    for k, (op, operands, attrs) in enumerate(json.loads(text), 1):
        known = {str(i) for i in range(k)}
        fits = op in OPS and OPS[op].layout == ELEMENTWISE and attrs.keys() == {*OPS[op].attrs} and op != CURVE
        if not fits or not all(x in known if isinstance(x, str) else isinstance(x, float) for x in operands):
            raise ValueError(f"'{op}' of {operands} cannot be step {k} of a curve")
        steps.append(Step(op, tuple(operands), attrs))
    if not steps:
        raise ValueError("a curve has no step")
    return tuple(steps)


def steps_in(node: Node) -> tuple[Step, ...]:
    """Return the steps of a node that is a curve; none of any other node."""
    return steps_of(node.attrs["steps"]) if node.op == CURVE else ()


def compute(text: str, x: Any, kernel: Callable[[str], Callable[..., Any]], number: Callable[[float], Any]) -> Any:
    """Return the result of the last step.

    Args:
        x: the operand.
        kernel: operator -> the function that computes it.
        number: makes an operand of a number.
    """
    results = {"0": x}
    for k, s in enumerate(steps_of(text), 1):
        operands = [results[i] if isinstance(i, str) else number(i) for i in s.operands]
        results[str(k)] = kernel(s.op)(*operands, **s.attrs)
    return results[str(len(results) - 1)]
