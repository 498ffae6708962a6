"""Gradients at labels that a network draws itself, against derivatives on paper."""

import weakref
from functools import partial

import pytest
import torch

import chipfit
from chipfit.rounding.fisher import finite, first_samples, gradients, split_float_readers
from chipfit.rounding.outputs import sampled_loss
from tests.build import graph_of, model_of


def seeded(k=0):
    return torch.Generator().manual_seed(k)


@pytest.mark.parametrize("scores", [[0.0, 1.0, -1.0], [0.0, 0.5]])
def test_class_scores_are_drawn_one_for_each_sample(scores):
    """The slope of -log p(label) is p - onehot(label): one label a sample, as often as its probability says."""
    y = torch.tensor([scores]).repeat(3000, 1).requires_grad_()
    sampled_loss(y, seeded()).backward()
    p = y.detach().softmax(1)
    drawn, one = p - y.grad, torch.ones(3000)
    assert torch.allclose(drawn.sum(1), one, atol=1e-5) and torch.allclose(drawn.amax(1), one, atol=1e-5)
    assert torch.allclose(drawn.mean(0), p[0], atol=0.03)
    # its second moment is diag(p) - p p'
    second = y.grad.T @ y.grad / 3000
    assert torch.allclose(second, torch.diag(p[0]) - p[0].outer(p[0]), atol=0.02)


@pytest.mark.parametrize("shape", [(5, 1), (5,), (5, 2, 3)])
def test_other_outputs_are_means_of_normal_numbers(shape):
    """Half the second moment of the slope is N over the energy: what an error costs as a share of the outputs."""
    y = torch.linspace(1, 3, 5).view(5, *[1] * (len(shape) - 1)).expand(shape).clone().requires_grad_()
    total = torch.zeros(shape)
    for k in range(400):
        (g,) = torch.autograd.grad(sampled_loss(y, seeded(k)), y)
        total += g.square() / 400
    per_sample = float(y.detach().square().sum()) / 5
    assert float(total.mean()) / 2 == pytest.approx(1 / per_sample, rel=0.1)


def test_an_output_without_axes_or_energy_has_finite_slopes():
    one = torch.tensor(2.0, requires_grad=True)
    slopes = [float(torch.autograd.grad(sampled_loss(one, seeded(k)), one)[0]) for k in range(400)]
    assert sum(s * s for s in slopes) / 400 == pytest.approx(2 / 4, rel=0.2)
    zero = torch.zeros(2, 1, requires_grad=True)
    (g,) = torch.autograd.grad(sampled_loss(zero, seeded()), zero)
    assert bool(g.isfinite().all()) and bool((g != 0).all())


def test_gradients_are_of_what_is_wanted_and_finite_before_a_root_at_zero():
    x, k = torch.tensor([[4.0], [0.0], [9.0]]), torch.tensor([[1], [2], [3]])
    root_of = model_of(lambda m, x, k: (torch.sqrt(torch.relu(x)) * 2, k + 1))
    graph = chipfit.capture(root_of, (x, k))
    relu, root, out = (n.output for n in graph.nodes[:3])
    values, found = gradients(graph, [x, k], {graph.inputs[0], relu, root, *graph.inputs}, {out}, seeded())
    assert set(found) == {graph.inputs[0], relu, root}  # integers have no slope
    assert all(bool(g.isfinite().all()) and not g.requires_grad for g in found.values())
    assert torch.equal(values[relu], x) and torch.equal(values[out], 2 * x.sqrt())
    # d(2 sqrt y) / dy = 1 / sqrt y, times that of the root by 2
    slope = found[root] / 2
    assert torch.allclose(found[relu][[0, 2]], (slope * torch.tensor([[0.5], [0.0], [1 / 3]]))[[0, 2]], rtol=1e-5)
    assert float(found[relu][1]) == 0 and not any(v.requires_grad for v in values.values())


def test_consumers_get_each_gradient_as_it_is_known_and_none_outlives_them():
    graph = chipfit.capture(model_of(lambda m, x: (x.exp().sin() * 3).tanh()), (torch.rand(4, 2),))
    names, batch = [n.output for n in graph.nodes], [torch.rand(4, 2)]
    values, found = gradients(graph, batch, set(names), (), seeded())
    seen, alive = {}, []

    def take(name, x, g):
        assert all(r() is None for r in alive)
        seen[name] = x.clone(), g.clone()
        alive[:] = weakref.ref(g), weakref.ref(x)

    takers = {n: partial(take, n) for n in names}
    left, slopes = gradients(graph, batch, names[:1], (), seeded(), consumers=takers)
    assert list(seen) == names[::-1] and list(slopes) == names[:1] and set(left) == {names[0], names[-1]}
    assert all(torch.equal(x, values[n]) and torch.equal(g, found[n]) for n, (x, g) in seen.items())


def test_a_slope_without_end_counts_as_none_in_the_slopes_before_it():
    """y = (0, 4), of which a root follows: only the second has a slope, which alone reaches x."""
    w = torch.tensor([[1.0, 1.0], [1.0, 5.0]])
    graph = graph_of("y = Linear(x, w, -)", "z = Sqrt(y)", weights={"w": w}, shape=(None, 2))
    _, found = gradients(graph, [torch.tensor([[-1.0, 1.0]])], {"x", "y"}, (), seeded())
    assert float(found["y"][0, 0]) == 0 != float(found["y"][0, 1])
    torch.testing.assert_close(found["x"], found["y"] @ w)
    assert finite(torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0])).tolist() == [0, 0, 0, 2]


def test_without_a_float_output_that_depends_on_them_there_are_no_gradients():
    x = torch.ones(2, 3)
    graph = chipfit.capture(model_of(lambda m, x: (x > 0).long()), (x,))
    assert gradients(graph, [x], set(graph.inputs), (), seeded())[1] == {}


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [([100, 100], [32, 32, 32, 4, 28]), ([127, 9], [32, 32, 32, 31, 1]), ([200], [32] * 4), ([40], [32, 8])],
)
def test_the_first_samples_come_in_chunks(sizes, parts):
    x = torch.arange(float(sum(sizes)))
    found = list(first_samples([b, 2 * b] for b in x.split(sizes)))
    assert [len(a) for a, _ in found] == parts
    assert torch.equal(torch.cat([a for a, _ in found]), x[: sum(parts)])
    assert all(torch.equal(b, 2 * a) for a, b in found)


@pytest.mark.parametrize("odd", [[torch.zeros(2), torch.zeros(3)], [torch.tensor(1.0)], [torch.zeros(0)]])
def test_a_batch_that_cannot_be_cut_counts_as_one(odd):
    found = list(first_samples([odd] * 130))
    assert len(found) == 128 and all(len(b) == len(odd) for b in found)
    found = list(first_samples([odd, [torch.zeros(127)], [torch.zeros(5)]]))
    assert [len(b[0]) for b in found[1:]] == [32, 32, 32, 31]


def test_readers_of_quantized_values_find_them_by_a_name_of_their_own():
    graph = graph_of("r = Relu(x)", "s = Sigmoid(r)", "t = Tanh(r)", "a = Add(s, t)", "y = Add(a, x)")
    split, names = split_float_readers(graph, {("r", "t"), ("x", "r")}, ["x", "r", "s"])
    assert names == {"x": "x in codes", "r": "r in codes", "s": "s"}
    assert [(n.name, n.inputs) for n in split.nodes] == [
        ("x in codes", ("x",)),
        ("r", ("x",)),
        ("r in codes", ("r",)),
        ("s", ("r in codes",)),
        ("t", ("r",)),
        ("a", ("s", "t")),
        ("y", ("a", "x in codes")),
    ]
    assert split.nodes[0].op == "Identity" and split.values["x in codes"].name == "x in codes"
    assert split.outputs == ["y"]
    split, _ = split_float_readers(graph, {("y", "nobody")}, ["y"])
    assert split.outputs == ["y in codes"] and graph.outputs == ["y"]


def test_what_outputs_do_not_depend_on_has_no_gradient_and_an_output_counts_once():
    graph = graph_of("a = Relu(x)", "y = Relu(x)", shape=(None, 2, 2))
    x = torch.linspace(1, 8, 8).view(2, 2, 2)
    values, found = gradients(graph, [x], {"x", "a", "y"}, (), seeded())
    assert set(found) == {"x", "y"} and torch.equal(values["a"], x)
    # normal numbers times sqrt(2 N / energy), here of 1 + 4 + ... + 64 = 204 in two samples
    torch.testing.assert_close(found["y"], torch.randn(2, 2, 2, generator=seeded()) * (2 * 2 / 204) ** 0.5)
    assert torch.equal(found["x"], found["y"]) and not x.requires_grad
    graph.outputs.append("y")
    assert torch.equal(gradients(graph, [x], {"y"}, (), seeded())[1]["y"], found["y"])
