"""Inputs and result of a concatenation share one grid."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from chipfit.passes.concat_ranges import concat_groups
from tests.build import model_of
from tests.steps import Steps, begin


def nested(m, x):
    inner = torch.cat([m.a(x), m.b(x)], 1)
    return torch.cat([inner, m.c(x), inner], 1).relu()


def steps_of_nested() -> Steps:
    return begin(model_of(nested, **{k: nn.Conv2d(3, 4, 1) for k in "abc"}), torch.randn(2, 3, 4, 4))


def test_each_concatenation_gives_its_result_and_its_inputs_the_inner_one_first():
    steps = steps_of_nested()
    a, b, inner, c, outer = (n.output for n in steps.graph.nodes[:5])
    assert concat_groups(steps.graph, steps.assignment) == [[inner, a, b], [outer, inner, c]]


def test_a_concatenation_that_is_not_stored_in_codes_has_no_group():
    steps = steps_of_nested()
    steps.assignment.tensors.clear()
    assert concat_groups(steps.graph, steps.assignment) == []


def test_what_is_stored_otherwise_or_not_at_all_stays_out_of_a_group():
    steps = steps_of_nested()
    a, b, inner, c, outer = (n.output for n in steps.graph.nodes[:5])
    del steps.assignment.tensors[a]
    steps.assignment.tensors[c] = replace(steps.assignment.tensors[c], format_name="another")
    assert concat_groups(steps.graph, steps.assignment) == [[inner, b], [outer, inner]]
    del steps.assignment.tensors[b]
    assert concat_groups(steps.graph, steps.assignment) == [[outer, inner]]
