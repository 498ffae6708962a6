"""Products with a constant matrix become linear layers, whose weights chips store in integers."""

import numpy as np
import pytest
import torch
from torch import nn

from chipfit import quantize
from chipfit.passes.constant_products import constant_products
from tests.build import model_of, quantized, randn
from tests.steps import assert_same, captured

W, B, X = randn(6, 4), randn(4, seed=1), randn(16, 6, seed=2)


def rewritten(forward, *, x=X, **weights):
    """Return the rewritten graph and its notes; it computes what it did."""
    model = model_of(forward, **{k: nn.Parameter(v.clone()) for k, v in weights.items()})
    graph = captured(model, x)
    new, notes = constant_products(graph)
    assert_same(graph, new, x)
    return new, notes


@pytest.mark.parametrize("x", [X, randn(3, 5, 6), randn(2, 3, 5, 6)], ids=["rows", "tokens", "heads"])
def test_a_product_with_a_matrix_and_a_sum_with_a_vector_are_one_linear_layer(x):
    new, notes = rewritten(lambda m, x: m.b + x @ m.w, x=x, w=W, b=B)
    (node,) = new.nodes
    assert node.op == "Linear" and torch.equal(new.weights[node.weight], W.t())
    assert torch.equal(new.weights[node.bias], B) and set(node.inputs[1:]) <= new.trainable
    assert notes == ["'matmul', a product with a constant matrix, became a linear layer"]


def test_two_products_share_the_transposed_matrix():
    new, _ = rewritten(lambda m, x: (x @ m.w, torch.relu(x) @ m.w), w=W)
    assert len({n.weight for n in new.nodes if n.op == "Linear"}) == 1 and "w" not in new.weights


@pytest.mark.parametrize(
    "forward, weights",
    [
        (lambda m, x: m.w.t() @ x.t(), {"w": W}),  # the matrix stands in front
        (lambda m, x: x @ m.w, {"w": randn(1, 6, 4)}),  # one matrix for each sample
    ],
)
def test_other_products_stay(forward, weights):
    new, notes = rewritten(forward, **weights)
    assert "MatMul" in {n.op for n in new.nodes} and notes == []


def test_what_else_reads_the_matrix_keeps_it():
    new, notes = rewritten(lambda m, x: (x @ m.w, (x.sum() * m.w).relu()), w=W)
    (linear,) = [n for n in new.nodes if n.op == "Linear"]
    assert linear.weight != "w" and "w" in new.weights and "is read along its other axis too" in notes[1]


def test_a_sum_with_something_else_than_a_vector_stays():
    ops = [n.op for n in rewritten(lambda m, x: x @ m.w + m.b, w=W, b=randn(16, 4))[0].nodes]
    assert ops == ["Linear", "Add"]


@pytest.mark.parametrize("platform", ["tflite_int8", "ort_cpu", "ethos_u", "xnnpack"])
def test_a_layer_that_is_written_as_a_product_runs_in_integers(platform):
    """The chips' products of two operands read floats, or constants without a scale for each channel."""
    plain = nn.Linear(6, 4)
    written = model_of(lambda m, x: x @ m.w.t() + m.b, w=plain.weight, b=plain.bias)
    one, other = (quantized(m, X, platform) for m in (nn.Sequential(plain), written))
    assert [n.exec for n in other.plan.nodes.values() if n.op == "Linear"] == ["int"]
    assert other.plan.tensors["t_t"].grid == one.plan.tensors["0.weight"].grid
    torch.testing.assert_close(other.model(X), one.model(X), rtol=0, atol=0)
    assert other.verify([X]).exact


def test_a_layer_of_the_user_in_keras_has_integer_weights():
    keras = pytest.importorskip("keras")

    class Projection(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], 4), name="w")
            self.b = self.add_weight(shape=(4,), name="b")

        def call(self, x):
            return keras.ops.matmul(x, self.w) + self.b

    model = keras.Sequential([keras.Input((6,)), Projection()])
    model.set_weights([W.numpy(), B.numpy()])
    result = quantize(model, [X], "imx500", progress=False)
    (node,) = [n for n in result.graph.nodes if n.op == "Linear"]
    stored = result.plan.tensors[node.weight]
    assert stored.grid.bits == 8 and stored.axis is not None
    rounded = np.round(W.numpy().T / stored.scale.numpy()[:, None]) * stored.scale.numpy()[:, None]
    wanted = X.numpy() @ rounded.T + B.numpy()
    assert np.abs(np.asarray(result.model(X.numpy()).detach().cpu()) - wanted).max() < 0.1
