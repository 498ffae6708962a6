"""Inputs and result of a concatenation share one grid."""

from dataclasses import replace

import torch
from torch import nn

import chipfit
from chipfit.passes.concat_ranges import concat_ranges
from tests.build import model_of, quantized, randn
from tests.steps import Steps, begin


def nested(m, x):
    inner = torch.cat([m.a(x), m.b(x)], 1)
    return torch.cat([inner, m.c(x), inner], 1).relu()


def steps_of_nested() -> Steps:
    return begin(model_of(nested, **{k: nn.Conv2d(3, 4, 1) for k in "abc"}), torch.randn(2, 3, 4, 4))


def tied(steps: Steps) -> list[list[str]]:
    """The result of each concatenation, and the inputs that are tied to it."""
    adjusted, notes = concat_ranges(steps.graph, steps.assignment)
    more = adjusted.constraints[len(steps.assignment.constraints) :]
    assert notes == [] and all(c.tied == [[*c.of("ins"), *c.of("out")]] for c in more)
    return [[*c.of("out"), *c.of("ins")] for c in more]


def test_each_concatenation_gives_its_result_and_its_inputs_the_inner_one_first():
    steps = steps_of_nested()
    a, b, inner, c, outer = (n.output for n in steps.graph.nodes[:5])
    assert tied(steps) == [[inner, a, b], [outer, inner, c]]


def test_a_concatenation_that_is_not_stored_in_codes_has_no_group():
    steps = steps_of_nested()
    steps.assignment.tensors.clear()
    assert tied(steps) == []


def test_what_is_stored_otherwise_or_not_at_all_stays_out_of_a_group():
    steps = steps_of_nested()
    a, b, inner, c, outer = (n.output for n in steps.graph.nodes[:5])
    del steps.assignment.tensors[a]
    steps.assignment.tensors[c] = replace(steps.assignment.tensors[c], format_name="another")
    assert tied(steps) == [[inner, b], [outer, inner]]
    del steps.assignment.tensors[b]
    assert tied(steps) == [[outer, inner]]


def test_parts_of_very_different_size_share_the_grid_too_where_that_is_asked_for():
    net = model_of(lambda m, x: torch.cat([m.a(x), 8 * m.b(x)], 1), a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1))
    data, chip = randn(8, 3, 6, 6), chipfit.get_target_platform_capabilities("pytorch")
    settings = {on: chipfit.Settings(concat_ranges=on, repairs="off") for on in (False, True)}
    apart, together = (quantized(net, [data], chip, settings=s) for s in settings.values())
    (join,) = (n for n in together.graph.nodes if n.op == "Concat")
    assert not apart.plan.quantized(join.output)
    assert len({float(together.plan[v].scale) for v in (*join.inputs, join.output)}) == 1
