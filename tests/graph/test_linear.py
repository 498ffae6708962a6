"""How many multiplications operators need, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chipfit.frameworks.torch.capture import capture
from chipfit.graph.linear import products


class Between(nn.Module):
    """Attention of two heads, five queries and six keys of four numbers."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, q, k):
        if self.whole:
            return nn.functional.scaled_dot_product_attention(q, k, k)
        return (q @ k.transpose(2, 3)).softmax(-1) @ k


CASES = {
    "grouped": (nn.Conv2d(4, 6, 3, 2, 1, groups=2), [(4, 8, 8)], {"Conv2D": 4 * 6 / 2 * 9 * 16}),
    "transposed": (nn.ConvTranspose2d(4, 6, 2, 2), [(4, 3, 3)], {"TransposeConv2D": 4 * 6 * 4 * 9}),
    "linear": (nn.Linear(7, 5), [(6, 7)], {"Linear": 7 * 5 * 6}),
    "products": (Between(False), [(2, 5, 4), (2, 6, 4)], {"MatMul": 240 + 240}),
    "attention": (Between(True), [(2, 5, 4), (2, 6, 4)], {"SDPA": 480}),
    "others": (nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)), [(4, 8, 8)], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_multiplications_of_one_sample(name):
    model, shapes, expected = CASES[name]
    graph = capture(model.eval(), tuple(torch.randn(3, *s) for s in shapes))
    found: dict[str, float] = {}
    for n in graph.nodes:
        if products(graph, n):
            found[n.op] = found.get(n.op, 0) + products(graph, n)
    assert found == expected
