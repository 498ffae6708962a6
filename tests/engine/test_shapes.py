"""Shapes and dtypes of results that follow from the operands."""

import pytest
import torch

from chipfit.engine.shapes import results_of
from chipfit.frameworks.reading import Unreadable, inferred
from chipfit.graph.ir import Graph, Value

X = Graph([], ["x"], [], {"x": Value("x", (None, 6, 4))}, {"one": torch.ones(()), "row": torch.ones(5)})


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "shape", "dtype"),
    [
        ("Less", "x one", {}, (None, 6, 4), "bool"),
        ("Size", "x", {"axis": 0}, (), "int"),
        ("Reshape", "x", {"shape": (-1, 7)}, (None, 7), "float32"),  # as many rows as 7 divides
        ("Reshape", "x", {"shape": (0, -1)}, (None, 24), "float32"),
    ],
)
def test_the_result_of_an_open_operand_is_known(op, inputs, attrs, shape, dtype):
    assert results_of(X, op, inputs.split(), attrs) == [(shape, dtype)]


def test_operands_that_do_not_fit_are_unreadable():
    with pytest.raises(Unreadable):
        inferred(X, "Concat", ["x", "row"], {"axis": 1})
