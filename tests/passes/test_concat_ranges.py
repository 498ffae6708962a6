"""What a concatenation joins should lie on one grid."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from chipfit.passes.concat_ranges import concat_groups
from tests.steps import begin


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 4, 1) for _ in range(3))

    def forward(self, x):
        inner = torch.cat([self.a(x), self.b(x)], 1)
        return torch.cat([inner, self.c(x), inner], 1).relu()


def test_each_concatenation_gives_its_result_and_its_inputs_the_inner_one_first():
    steps = begin(Nested(), torch.randn(2, 3, 4, 4))
    a, b, inner, c, outer = (n.output for n in steps.graph.nodes[:5])
    assert concat_groups(steps.graph, steps.assignment) == [[inner, a, b], [outer, inner, c]]


def test_a_concatenation_that_is_not_stored_in_codes_has_no_group():
    steps = begin(Nested(), torch.randn(2, 3, 4, 4))
    steps.assignment.tensors.clear()
    assert concat_groups(steps.graph, steps.assignment) == []


def test_what_is_stored_otherwise_or_not_at_all_stays_out_of_a_group():
    steps = begin(Nested(), torch.randn(2, 3, 4, 4))
    a, b, inner, c, outer = (n.output for n in steps.graph.nodes[:5])
    del steps.assignment.tensors[a]
    steps.assignment.tensors[c] = replace(steps.assignment.tensors[c], format_name="another")
    assert concat_groups(steps.graph, steps.assignment) == [[inner, b], [outer, inner]]
    del steps.assignment.tensors[b]
    assert concat_groups(steps.graph, steps.assignment) == [[outer, inner]]
