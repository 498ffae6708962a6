"""Formulas are computed by operators, in the order in which Python would compute them."""

import pytest

from chipfit.errors import UnknownNameError
from chipfit.operators.formulas import compute


def applied(formula, **given):
    """Return the operators of a formula with their operands and attributes; the results are called r0, r1, .."""
    found = []
    compute(formula, lambda *call, **attrs: found.append((*call, attrs)) or f"r{len(found) - 1}", **given)
    return found


@pytest.mark.parametrize(
    ("formula", "steps"),
    [
        ("x * tanh(x)", [("Tanh", ["x"], {}), ("Mul", ["x", "r0"], {})]),
        ("-x / 2", [("Neg", ["x"], {}), ("Div", ["r0", 2.0], {})]),
        ("not x < -1", [("Less", ["x", -1.0], {}), ("LogicalNot", ["r0"], {})]),
        ("y = abs(x); min(y, k) - y", [("Abs", ["x"], {}), ("Min", ["r0", 3.0], {}), ("Sub", ["r1", "r0"], {})]),
        ("sum(x, axes=axes, keepdims=False)", [("Sum", ["x"], {"axes": (1,), "keepdims": False})]),
    ],
)
def test_a_formula_becomes_the_operators_of_its_parts_from_left_to_right(formula, steps):
    assert applied(formula, x="x", k=3, axes=(1,)) == steps


def test_other_functions_may_apply_the_last_operator_and_make_operands_of_numbers():
    found = compute("exp(x) - 1", lambda op, x: "e", lambda op, x: (op, x), "constant {}".format, x="x")
    assert found == ("Sub", ["e", "constant 1"])


def test_a_function_that_is_no_operator_is_refused_with_similar_names():
    with pytest.raises(UnknownNameError, match="sigmoid"):
        compute("sigmiod(x)", print, x=0)
