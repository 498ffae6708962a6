"""Equations that are one matrix product, beside torch's own einsum."""

import pytest
import torch

from chipfit.graph.einsum import as_product

SIZES = {"b": 2, "h": 3, "q": 4, "k": 5, "d": 6}


@pytest.mark.parametrize(
    "equation",
    [
        "bqd,bkd->bqk",
        "bqd,bkd->bkq",
        "bdq,bdk->bqk",
        "bqhd,bkhd->bhqk",
        "bhqk, bkhd -> bqhd",
        "hbqd,bhkd->bqhk",
        "qd,kd->qk",
    ],
)
def test_an_equation_of_one_product_is_computed_by_it(equation):
    torch.manual_seed(0)
    operands = equation.replace(" ", "").split("->")[0].split(",")
    a, b = (torch.randn([SIZES[c] for c in letters]) for letters in operands)
    product = as_product(equation)
    got = (a.permute(product.left) @ b.permute(product.right)).permute(product.result)
    torch.testing.assert_close(got, torch.einsum(equation, a, b))


@pytest.mark.parametrize(
    "equation",
    [
        "bqd,bkd->bq",
        "bhqd,bkd->bhqk",
        "bchw,bdhw->bcd",
        "bqd,bkd",
        "...qd,...kd->...qk",
        "qq,qd->qd",
        "bqd,bbkd->bqk",
        "bd->b",
        "a,b,c->abc",
    ],
)
def test_another_equation_is_none(equation):
    assert as_product(equation) is None
