"""A saved graph whose operators do not run on the shapes that it states is refused before it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from chipfit.errors import PlanError
from chipfit.plan.validate import check_runs
from tests.build import images, quantized, randn, sequential


@pytest.fixture
def graph():
    return quantized(sequential(nn.Conv2d(3, 4, 3)), images(2, 6)).graph.copy()


def test_a_graph_as_it_was_captured_runs(graph):
    check_runs(graph)


def test_a_saved_bias_of_another_length_is_refused(graph):
    graph.weights = {name: w[:1] if w.dim() == 1 else w for name, w in graph.weights.items()}
    with pytest.raises(PlanError, match=r"has the shape \[1\], not \[4\]"):
        check_runs(graph)


def test_a_saved_input_of_another_rank_is_refused(graph):
    name = graph.inputs[0]
    graph.values[name] = replace(graph.values[name], shape=(None, 3, 6, 6, None, 3))
    with pytest.raises(PlanError, match="a weight of 4 axes for 6"):
        check_runs(graph)


def test_a_saved_axis_that_no_value_has_is_refused():
    graph = quantized(nn.Softmax(-1), randn(2, 4), "imx500").graph.copy()
    check_runs(graph)
    graph.nodes = [n.with_(attrs={**n.attrs, "axis": 64}) for n in graph.nodes]
    with pytest.raises(PlanError, match="is 64, and it works on 2 axes"):  # torch's kernel without numbers takes it
        check_runs(graph)
