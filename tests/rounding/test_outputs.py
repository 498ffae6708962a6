"""The loss at the outputs: every part counts by its own power."""

import math

import pytest
import torch
import torch.nn.functional as F

from chipfit.engine.parts import Gain, part_gains
from chipfit.engine.run import run
from chipfit.graph.joins import Joins
from chipfit.rounding.outputs import OutputErrors, is_scores, parts_of
from tests.build import graph_of, node, randn


def test_a_small_output_beside_a_large_one_counts_as_much():
    pixels, score = torch.full((2, 1), 640.0), torch.full((2, 1), 0.5)
    errors = OutputErrors()
    errors.add({"boxes": pixels, "scores": score}, {"boxes": pixels, "scores": torch.zeros(2, 1)})
    assert errors.loss == 1.0  # the scores are lost
    assert errors.sqnr_db == pytest.approx(10 * math.log10(2))  # half of the parts


def test_class_scores_lose_nats_and_batches_add_up():
    errors, even = OutputErrors(), torch.zeros(1, 2)
    for _ in range(2):
        errors.add({"y": even}, {"y": torch.tensor([[math.log(3.0), 0.0]])}, {"y"})  # 1/2, 1/2 became 3/4, 1/4
    assert errors.loss == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


@pytest.mark.parametrize(
    ("y", "scores"),
    [
        (3 * randn(8, 10), True),
        (20 * randn(8, 2).sign() * torch.tensor([1.0, -1.0]), True),  # a classifier that is sure
        (100 + 60 * randn(8, 42), False),  # landmarks in pixels
        (0.03 * randn(8, 63), False),  # landmarks in metres
        (F.normalize(randn(8, 128)), False),  # embeddings
        ((6 * randn(8, 3)).softmax(1), False),  # probabilities
        (3 * randn(8, 1), False),
        (3 * randn(8, 10, 4), False),
    ],
)
def test_class_scores_are_those_whose_softmax_chooses(y, scores):
    assert is_scores(y) is scores


def test_equal_outputs_have_no_noise():
    errors = OutputErrors()
    errors.add({"y": torch.ones(2, 1)}, {"y": torch.ones(2, 1)})
    assert (errors.loss, errors.sqnr_db) == (0.0, math.inf)


def joined():
    """Return pixels and scores in one output, which is rearranged behind the concatenation: [N, 4, 3] of 2 and 1."""
    joins, rows = node("y = Concat(pixels, scores)", {"axis": 1}), node("z = Reshape(y)", {"shape": (0, 3, 4)})
    nodes = joins, rows, node("t = Transpose(z)", {"perm": (0, 2, 1)})
    shapes = {"pixels": (None, 2, 2, 2), "scores": (None, 1, 2, 2), "y": (None, 3, 2, 2), "z": (None, 3, 4)}
    shapes["t"] = (None, 4, 3)
    return graph_of(*nodes, inputs=["pixels", "scores"], shapes=shapes)


def test_each_value_that_an_output_joins_is_a_part():
    graph, pixels, scores = joined(), 640 * randn(5, 2, 2, 2), randn(5, 1, 2, 2)
    found = parts_of(graph, run(graph, [pixels, scores]))
    assert list(found) == ["pixels in t", "scores in t"]
    assert found["pixels in t"].shape == (5, 1, 8) and found["scores in t"].shape == (5, 1, 4)
    for name, x in (("pixels", pixels), ("scores", scores)):
        assert torch.equal(found[f"{name} in t"].sort(-1).values[:, 0], x.flatten(1).sort(-1).values)


def test_a_constant_behind_the_join_leaves_the_parts():
    """Computed by hand: channels 0 and 1 are multiplied by 2, channel 2 by -3, and 1 is added to all."""
    nodes = node("y = Concat(a, b)", {"axis": 1}), node("z = Mul(y, k)"), node("t = Add(one, z)")
    shapes = {"a": (None, 2, 4), "b": (None, 1, 4)} | dict.fromkeys("yzt", (None, 3, 4))
    weights = {"k": torch.tensor([2.0, 2.0, -3.0]).reshape(3, 1), "one": torch.ones(1)}
    graph = graph_of(*nodes, weights=weights, inputs=["a", "b"], shapes=shapes)
    a, b = randn(5, 2, 4), randn(5, 1, 4)
    found = parts_of(graph, run(graph, [a, b]))
    assert torch.equal(found["a in t"], (2 * a + 1).flatten(1)[:, None])
    assert torch.equal(found["b in t"], (-3 * b + 1).flatten(1)[:, None])
    assert part_gains(Joins(graph), "t") == {"a": Gain(2.0, 1.0), "b": Gain(3.0, 1.0)}


def test_a_part_that_is_lost_counts_whatever_its_neighbours_are():
    graph, pixels, scores = joined(), 640 * randn(5, 2, 2, 2), randn(5, 1, 2, 2)
    wanted, got = (parts_of(graph, run(graph, [pixels, s])) for s in (scores, 0 * scores))
    errors = OutputErrors()
    errors.add(wanted, got)
    assert errors.loss == pytest.approx(1.0)


def test_an_output_whose_parts_are_at_places_of_open_sizes_is_one_part():
    shapes = {"a": (None, None, 2), "b": (None, None, 2), "y": (None, None, 2)}
    graph = graph_of(node("y = Concat(a, b)", {"axis": 1}), shapes=shapes)
    assert list(parts_of(graph, run(graph, [randn(2, 3, 2), randn(2, 4, 2)]))) == ["y"]
    shapes = {"a": (None, None, 2), "b": (None, None, 1), "y": (None, None, 3)}
    graph = graph_of(node("y = Concat(a, b)", {"axis": 2}), shapes=shapes)
    found = parts_of(graph, run(graph, [randn(2, 3, 2), randn(2, 3, 1)]))
    assert {name: x.shape[2] for name, x in found.items()} == {"a in y": 6, "b in y": 3}
