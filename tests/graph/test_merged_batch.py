"""Axes that are merged with the batch."""

import torch

from chipfit.graph.merged_batch import sizes_in_front
from tests.build import graph_of, node


def test_an_operand_that_depends_on_no_input_does_not_hide_what_lies_in_front_of_the_samples():
    """[N, 3] is turned to [3, N] and becomes one axis, to a shape that the network computes."""
    shapes = {"x": (None, 3), "y": (3, None), "k": (1,), "z": (None,)}
    turned, joined = node("y = Transpose(x)", {"perm": (1, 0)}), node("z = Reshape(y, k)", {"shape": (None,)})
    graph = graph_of(turned, "k = Abs(w)", joined, weights={"w": torch.tensor([-1])}, shapes=shapes)
    assert sizes_in_front(graph) == {"k": 0, "z": 3}
