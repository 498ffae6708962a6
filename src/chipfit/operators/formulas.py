"""Formulas such as "x * tanh(softplus(x))", which canonical operators compute.

A formula is written as in Python. Names are operands, functions are operators in lower case, keywords are attributes.
Before the last expression, "name = ...;" gives an intermediate result a name.
"""

import ast
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from chipfit.errors import UnknownNameError
from chipfit.operators.table import OPS, read_column

#: infix operator of Python, by the class of the syntax tree -> canonical operator
_INFIX: dict[type[ast.AST], str] = {}
read_column("infix", lambda op, name: _INFIX.update({getattr(ast, name): op}), _INFIX)


class _Step(NamedTuple):
    """The application of an operator in a formula."""

    op: str
    operands: list[Any]  #: other steps, names of operands, or numbers
    attrs: dict[str, Any]  #: attribute -> syntax tree of a name or a constant


def compute(formula: str, apply: Any, last: Any = None, number: Any = float, /, **given: Any) -> Any:
    """Compute a formula by `apply(op, operands, **attributes)`, from left to right.

    Args:
        last: what applies the last operator, by default `apply`.
        number: what makes an operand of a number.
        given: name in the formula -> operand, number or attribute.

    >>> compute("y = 2 * x; y + exp(y)", lambda op, x: f"{op}({x[0]}, {x[1]})" if x[1:] else f"{op}({x[0]})", x="a")
    'Add(Mul(2.0, a), Exp(Mul(2.0, a)))'

    Raises:
        UnknownNameError: a function is not an operator.
    """

    def value(part: Any, apply: Callable[..., Any] = apply) -> Any:
        if isinstance(part, _Step):
            attrs = {k: given[e.id] if isinstance(e, ast.Name) else ast.literal_eval(e) for k, e in part.attrs.items()}
            return apply(part.op, [value(x) for x in part.operands], **attrs)
        x = given[part] if isinstance(part, str) else part
        return number(x) if isinstance(x, (int, float)) else x

    *named, (_, result) = _parsed(formula)
    for name, part in named:
        given[name] = value(part)
    return value(result, last or apply)


@cache
def _parsed(formula: str) -> list[tuple[str, Any]]:
    """Return the name and the expression of each line; the last has no name."""
    lines: list[Any] = ast.parse(formula).body
    return [("" if isinstance(x, ast.Expr) else x.targets[0].id, _part(x.value)) for x in lines]


def _part(e: Any) -> Any:
    """Return a step, the name of an operand, or a number."""
    if isinstance(e, ast.Name):
        return e.id
    if isinstance(e, ast.Call):
        return _Step(_operator(e.func), [*map(_part, e.args)], {k.arg or "": k.value for k in e.keywords})
    if isinstance(e, ast.Compare):
        return _Step(_INFIX[type(e.ops[0])], [_part(e.left), _part(e.comparators[0])], {})
    if isinstance(e, ast.BinOp):
        return _Step(_INFIX[type(e.op)], [_part(e.left), _part(e.right)], {})
    if isinstance(e, ast.UnaryOp) and not isinstance(e.operand, ast.Constant):
        return _Step(_INFIX[type(e.op)], [_part(e.operand)], {})
    return ast.literal_eval(e)


def _operator(function: Any) -> str:
    """Return the operator that a function is in lower case."""
    known = {op.lower(): op for op in OPS}
    if function.id not in known:
        raise UnknownNameError("operator", function.id, known)
    return known[function.id]
