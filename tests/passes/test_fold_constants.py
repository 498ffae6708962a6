"""Values that depend on no input become weights: the network stays the same, runs in integers, and trains."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from chipfit import quantize
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Node
from chipfit.passes.fold_constants import fold_constants
from tests.build import graph_of, model_of, node, quantized


class Standardised(nn.Conv2d):
    def forward(self, x):
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(x, (self.weight - mean) * torch.rsqrt(var + 1e-5), self.bias)


def positions(m, x):
    """Add a table of positions read by arange, a table by constant buckets, and a class token."""
    steps = torch.arange(x.shape[1])
    x = x + m.table(steps) + m.buckets[(steps * 2).clamp(max=6)]
    return m.out(torch.cat([(m.cls * 2 + 1).expand(x.shape[0], -1, -1), x], 1))


FLAT = nn.Flatten(), nn.Unflatten(1, (8, 1, 1))
REWRITTEN = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Conv2d(3, 8, 5)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Conv2d(3, 8, 5)),
    "orthogonal": lambda: nn.Sequential(FLAT[0], parametrizations.orthogonal(nn.Linear(192, 8)), FLAT[1]),
    "standardised": lambda: Standardised(3, 8, 5),
}


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
@pytest.mark.parametrize("kind", REWRITTEN)
def test_a_layer_whose_weight_is_computed_from_others_runs_in_integers(kind, platform, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(REWRITTEN[kind](), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)).eval()
    x = torch.randn(4, 3, 8, 8)
    want = model(x).detach()
    result = quantized(model, x, platform)
    linear = [n for n in result.graph.nodes if n.op in ("Conv2D", "Linear")]
    assert [result.plan.nodes[n.name].exec for n in linear] == ["int", "int"]
    assert all(result.plan.quantized(n.weight) for n in linear)
    assert linear[0].weight.startswith(linear[0].layer + ".weight")
    assert F.cosine_similarity(result.model(x).flatten(), want.flatten(), dim=0) > 0.99
    assert result.verify([torch.randn(4, 3, 8, 8)]).exact


def test_tensors_with_history_that_weight_norm_of_old_keeps_are_no_obstacle():
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(8 * 16, 5)))
    result = quantize(model.eval(), [torch.randn(4, 8, 16)], progress=False)  # no copy: torch cannot copy such a model
    assert result.plan.nodes["linear"].exec == "int" and result.plan.quantized("1.weight")


def test_tables_tokens_and_buckets_are_constants_and_only_the_batch_is_left_to_expand():
    parts = {"table": nn.Embedding(32, 8), "cls": torch.randn(1, 1, 8), "out": nn.Linear(8, 3)}
    model, x = model_of(positions, **parts, buckets=torch.randn(7, 8)), torch.randn(4, 10, 8)
    graph = capture(model, (x,), {})
    folded, notes = fold_constants(graph)
    left = [n.op for n in folded.nodes]
    assert not {"Embedding", "Gather", "Min", "Mul"} & set(left) and "Concat" in left
    assert any("depends on no input: computed once" in note for note in notes)
    for batch in (x, torch.randn(7, 10, 8)):
        (want,), (got,) = run(graph, [batch]).values(), run(folded, [batch]).values()
        assert torch.equal(want, got) and torch.allclose(want, model(batch), atol=1e-6)


def test_what_was_computed_trains_in_the_place_of_what_it_was_computed_from():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4))).eval()
    result = quantized(model, torch.randn(8, 6))
    trained = {n: p.requires_grad for n, p in result.model.named_parameters() if not n.startswith("quant")}
    assert trained.pop("0.weight") and trained.pop("0.bias")
    assert trained and not any(trained.values())  # original0 and original1 stay, frozen
    result.model(torch.randn(8, 6)).sum().backward()
    assert result.model.get_parameter("0.weight").grad.abs().sum() > 0


def test_random_numbers_and_outputs_of_the_model_stay():
    net = model_of(lambda m, x: (x + torch.rand(3), torch.ones(2) * 3))
    graph, _ = fold_constants(capture(net, (torch.randn(2, 3),), {}))
    assert next(n.attrs["target"] for n in graph.nodes if n.op == "Opaque").startswith("aten.rand")
    assert set(graph.outputs) <= set(graph.values)


@pytest.mark.parametrize("op, attrs, stays", [("Dropout", {"p": 0.5}, True), ("Relu", {}, False)])
def test_dropout_of_a_weight_may_drop_in_training_and_stays(op, attrs, stays):
    graph = graph_of(node("d = " + op + "(w)", attrs), "y = Add(x, d)", shape=(3,), weights={"w": torch.ones(3)})
    new, notes = fold_constants(graph)
    assert [n.op for n in new.nodes] == [op, "Add"][0 if stays else 1 :]
    assert notes == ([] if stays else ["'d' of 'y' depends on no input: computed once"])


def behind(weights: dict[str, torch.Tensor], *nodes: Node, reader: Node, trainable: tuple[str, ...] = ()) -> Graph:
    """x, of any size, meets what nodes make of weights."""
    return graph_of(*nodes, reader, inputs=["x"], shape=(None, 1), weights=weights, trainable=set(trainable))


@pytest.mark.parametrize("trainable, trained", [(("v",), True), (("v", "w"), True), (("w",), False), ((), False)])
def test_what_comes_from_a_parameter_is_trained_and_what_comes_from_others_is_not(trainable, trained):
    made = Node("n", "Neg", ("v",), ("n",)), Node("m", "Neg", ("n",), ("m",))
    weights = {"v": torch.tensor([3.0]), "w": torch.ones(1, 1)}
    reader = Node("l", "Linear", ("x", "w", "m"), ("y",), layer="head")
    graph, notes = fold_constants(behind(weights, *made, reader=reader, trainable=trainable))
    assert graph.nodes == [reader.with_(inputs=("x", "w", "head.bias"))]
    assert graph.weights["head.bias"].tolist() == [3.0]
    assert graph.trainable == set(trainable) | ({"head.bias"} if trained else set())
    assert notes == ["'head.bias' of 'head' depends on no input: computed once"]
    assert set(graph.values) == {"x", "y"} and set(graph.weights) == {"v", "w", "head.bias"}


def test_integers_that_come_from_a_parameter_are_not_trained():
    best = Node("a", "ArgMax", ("v",), ("a",), {"axis": 0, "keepdims": True})
    graph = behind({"v": torch.tensor([1.0, 5.0, 2.0])}, best, reader=Node("s", "Add", ("x", "a"), ("y",)))
    graph.trainable = {"v"}
    new, _ = fold_constants(graph)
    assert new.weights["a"].tolist() == [1] and new.trainable == {"v"}


@pytest.mark.parametrize(
    "layer, taken, name", [("head", "", "head.weight"), ("head", "head.weight", "head.weight_1"), ("", "", "n")]
)
def test_a_computed_weight_is_named_as_if_its_layer_had_it(layer, taken, name):
    weights = {"v": torch.full((1, 1), 3.0)} | ({taken: torch.zeros(1)} if taken else {})
    reader = Node("l", "Linear", ("x", "n"), ("y",), layer=layer)
    new, _ = fold_constants(behind(weights, Node("n", "Neg", ("v",), ("n",)), reader=reader))
    assert new.nodes[0].weight == name and new.weights[name].item() == -3.0


@pytest.mark.parametrize(
    "others, times, stays",
    [
        (0, 1 << 16, False),
        (0, (1 << 16) + 1, True),
        (8 * 70_000 - 1, 70_000, False),  # an eighth of the model's, with the one that is repeated
        (8 * 70_000 - 1, 70_001, True),
        (8 * 70_000 - 2, 70_000, True),
    ],
)
def test_what_grows_beyond_65536_numbers_and_an_eighth_of_the_model_is_computed_all_the_same(others, times, stays):
    tile = Node("t", "Tile", ("v",), ("t",), {"repeats": (times,)})
    weights = {"v": torch.ones(1), "o": torch.zeros(1).expand(others)}
    graph, notes = fold_constants(behind(weights, tile, reader=Node("a", "Add", ("x", "t"), ("y",))))
    said = f"'t' depends on no input, but is computed in every run: {times} elements are too many to store"
    assert notes == ([said] if stays else ["'t' of 'a' depends on no input: computed once"])
    assert len(graph.nodes) == 1 + stays and ("t" in graph.values) is stays


@pytest.mark.parametrize("columns, stays", [(400, True), (1, False)])
def test_what_is_no_larger_than_its_operands_may_have_any_size(columns, stays):
    """[400, 1] + [1, 400] has 160 000 numbers; [90 000, 1] + [1, 1] as many as its operands, or one less."""
    rows = 400 if stays else 90_000
    weights = {"v": torch.ones(rows, 1), "u": torch.ones(1, columns)}
    add = Node("s", "Add", ("v", "u"), ("s",))
    graph, _ = fold_constants(behind(weights, add, reader=Node("a", "Add", ("x", "s"), ("y",))))
    assert len(graph.nodes) == 1 + stays


def test_a_constant_that_two_operators_read_is_one_weight():
    first = Node("a", "Add", ("x", "n"), ("b",))
    nodes = Node("n", "Neg", ("v",), ("n",)), first
    graph = behind({"v": torch.ones(1)}, *nodes, reader=Node("s", "Mul", ("b", "n"), ("y",)))
    new, notes = fold_constants(graph)
    assert [n.inputs for n in new.nodes] == [("x", "n"), ("b", "n")] and set(new.weights) == {"v", "n"}
    assert notes == ["'n' of 'a' depends on no input: computed once"]


@pytest.mark.parametrize(
    "forward, ops",
    [
        (lambda m, x: x + m.rows.expand(x.shape[0], -1, -1), ["Add"]),
        (lambda m, x: (x * m.rows.expand_as(x)).relu() - m.rows, ["Mul", "Relu", "Sub"]),
        (lambda m, x: torch.where(x > 0, x, m.rows.expand_as(x)), ["Greater", "Where"]),
        (lambda m, x: m.rows.expand(x.shape[0], -1, -1) + m.rows, ["Size", "Expand", "Add"]),  # the batch would be lost
        (
            lambda m, x: torch.cat([m.rows.expand(x.shape[0], -1, -1), x.relu()], 1),
            ["Size", "Relu", "Expand", "Concat"],
        ),
    ],
)
def test_a_constant_is_repeated_for_each_sample_only_where_a_reader_does_not_broadcast(forward, ops):
    model = model_of(forward, rows=nn.Parameter(torch.randn(1, 4, 8)))
    graph = fold_constants(capture(model, (torch.randn(2, 4, 8),))).graph
    assert [n.op for n in graph] == ops
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], model(x).detach(), rtol=0, atol=0)
