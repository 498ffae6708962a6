"""Moves that change nothing."""

import pytest
import torch

from chipfit.engine.run import run
from chipfit.passes.undone_moves import undone_moves
from tests.build import graph_of, node


@pytest.mark.parametrize(
    "parts, left", [(("e", "x", "x"), ["Concat", "Relu"]), (("x", "e"), ["Relu"]), (("e", "e"), ["Concat", "Relu"])]
)
def test_parts_without_elements_are_left_out_of_a_concatenation(parts, left):
    """As register tokens of which there are none."""
    joined = node(f"y = Concat({', '.join(parts)})", {"axis": 1})
    length = 3 * parts.count("x")
    shapes = {"x": (None, 3, 4), "y": (None, length, 4), "z": (None, length, 4)}
    graph = graph_of(joined, "z = Relu(y)", weights={"e": torch.zeros(2, 0, 4)}, inputs=["x"], shapes=shapes)
    less = undone_moves(graph).graph
    assert [n.op for n in less.nodes] == left
    assert ("e" in less.nodes[0].inputs) == ("x" not in parts)
    x = torch.randn(2, 3, 4)
    assert torch.equal(run(less, [x])["z"], torch.cat([{"x": x}.get(p, graph.weights["e"]) for p in parts], 1).relu())
