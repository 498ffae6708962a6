"""Vectors divided by their length become one L2 normalisation, and what only looks like it stays in its parts."""

import pytest
import torch
import torch.nn.functional as F

import chipfit
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.check import check
from chipfit.passes.fold_constants import fold_constants
from chipfit.passes.unit_length import unit_length
from tests.build import model_of

X = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))


def fused(function, listed=lambda graph, node: True):
    graph = fold_constants(capture(model_of(lambda m, x: function(x)), (X,), {}))[0]
    new, notes = unit_length(graph, listed)
    check(new)
    return new, notes


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, d: F.normalize(x, dim=d),
        lambda x, d: x / x.norm(dim=d, keepdim=True),
        lambda x, d: x / torch.linalg.vector_norm(x, dim=d, keepdim=True).clamp(min=1e-6),
        lambda x, d: x / (x * x).sum(d, keepdim=True).sqrt(),
        lambda x, d: x * (x * x).sum(d, keepdim=True).rsqrt(),
        lambda x, d: (x * x).sum(d, keepdim=True).clamp(min=1e-12).rsqrt() * x,
        lambda x, d: x * torch.maximum((x * x).sum(d, keepdim=True), torch.tensor(1e-12)).rsqrt(),
    ],
)
def test_a_vector_over_its_length_becomes_one_operator_of_the_same_function(function, axis):
    graph, notes = fused(lambda x: function(x, axis))
    assert [n.op for n in graph.nodes] == ["L2Norm"] and len(notes) == 1
    [(_, y)] = run(graph, [X], keep=graph.outputs).items()
    torch.testing.assert_close(y, function(X, axis))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.norm(dim=(1, 2), keepdim=True),
        lambda x: x / x.norm(dim=1, p=1, keepdim=True),
        lambda x: x / (x * 2).norm(dim=1, keepdim=True),
        lambda x: F.normalize(x, dim=1, eps=0.5),
        lambda x: x * x.norm(dim=1, keepdim=True),
        lambda x: x / (x * x).sum(1, keepdim=True),
        lambda x: x.norm(dim=1, keepdim=True) / x,
    ],
)
def test_what_divides_otherwise_stays(function):
    graph, notes = fused(function)
    assert "L2Norm" not in {n.op for n in graph.nodes} and not notes


def test_a_platform_without_the_operator_keeps_the_parts():
    assert "Div" in {n.op for n in fused(lambda x: F.normalize(x, dim=1), lambda graph, node: False)[0].nodes}


def test_embeddings_of_unit_length_leave_a_chip_without_floats(tmp_path):
    torch.manual_seed(0)
    model = model_of(lambda m, x: F.normalize(m.head(x), dim=1), head=torch.nn.Linear(8, 16))
    data = [torch.randn(32, 8) for _ in range(3)]
    result = chipfit.quantize(model, data, platform="tflite_int8", progress=False)
    assert {p.exec for p in result.plan.nodes.values()} == {"int"}
    result.export(tmp_path / "m.tflite", io="int8")
    y = torch.randn(64, 8)
    assert result.verify(y).exact
    assert F.cosine_similarity(result.model(y), model(y)).min() > 0.99
