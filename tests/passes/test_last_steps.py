"""The state after the last step, read from the recurrent layer."""

import pytest
import torch
from torch import nn

from chipfit.frameworks.torch.capture import capture
from chipfit.passes.last_steps import last_steps
from tests.build import model_of, quantized, randn

X = randn(2, 5, 4)


def read(model):
    return last_steps(capture(model, (X,))).graph


@pytest.mark.parametrize("index, taken", [(-1, True), (4, True), (0, False), (3, False)])
def test_the_last_of_all_steps_is_the_last_state(index, taken):
    graph = read(model_of(lambda m, x: m.layer(x)[0][:, index], layer=nn.GRU(4, 3, batch_first=True)))
    assert ("Select" not in {n.op for n in graph.nodes}) is taken
    if taken:
        (layer,) = graph.nodes
        assert graph.outputs == [layer.outputs[1]]


def test_a_network_that_draws_random_numbers_is_read():
    model = model_of(lambda m, x: m.layer(x) + torch.randn([3], device=x.device) * 0, layer=nn.Linear(4, 3))
    assert quantized(model, [X]).report.integer_share == 1
