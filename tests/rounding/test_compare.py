"""Comparing plans: what is rounded, what is not, and losses by hand."""

import math
import weakref

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError
from chipfit.plan.record import Plan
from chipfit.rounding.compare import (
    QuantizedRun,
    Reference,
    compare_plans,
    run_quantized,
    split_holdout,
    without_weight_rounding,
)
from tests.build import graph_of, model_of, plan_of, quantized, randn, stored

X = randn(16, 3, 8, 8, seed=1)


def skip():
    """The sum reads the second convolution's input from before it is rounded, on input-placed platforms."""
    torch.manual_seed(0)
    layers = {"a": nn.Conv2d(3, 3, 3, padding=1), "b": nn.Conv2d(3, 3, 3, padding=1)}
    return model_of(lambda m, x: (y := m.a(x)) + m.b(y), **layers)


def captured(model, x, *more):
    return chipfit.capture(model.eval(), (x, *more))


def matrix(*rows):
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    return layer


def loss(graph, other, *batches):
    return Reference(graph, [[x] for x in batches]).loss(other, Plan())


@pytest.mark.parametrize("platform", ["mqbench_academic", "ort_cpu", "tensorrt", "imx500"])
def test_a_rounded_run_is_what_the_model_computes(platform):
    result = quantized(skip(), X, platform)
    with torch.inference_mode():
        (got,) = run_quantized(result.graph, result.plan, [X]).values()
        want = result.model.eval()(X)
    step = max((float(t.scale.max()) for t in result.plan.tensors.values() if t.quantized), default=0.0)
    assert float((got != want).float().mean()) < 0.01 and float((got - want).abs().max()) <= 1.01 * step


def test_class_scores_lose_divergence_and_other_outputs_energy():
    identity, half = matrix([1.0, 0.0], [0.0, 1.0]), matrix([0.5, 0.0], [0.0, 0.5])
    x = torch.tensor([[math.log(3.0), 0.0]])  # probabilities 3/4 and 1/4; halved: sqrt 3 to 1
    q = math.sqrt(3) / (1 + math.sqrt(3))
    want = 0.75 * math.log(0.75 / q) + 0.25 * math.log(0.25 / (1 - q))
    assert loss(captured(identity, x), captured(half, x), x) == pytest.approx(want, rel=1e-5)
    x3 = torch.tensor([[[2.0, 4.0]]])
    whole, part = captured(identity, x3), captured(half, x3)
    assert loss(whole, part, x3) == pytest.approx(0.25) and loss(whole, whole, x3) == 0
    single = torch.tensor([[2.0], [-4.0]])  # one score is no class
    assert loss(*(captured(matrix([w]), single) for w in (1.0, 0.5)), single) == pytest.approx(0.25)
    pixels = 100 * x  # whose softmax has one class
    assert loss(captured(identity, pixels), captured(half, pixels), pixels, pixels) == pytest.approx(0.25)


def test_losses_of_batches_are_one_mean_and_those_of_outputs_a_sum():
    """Energies 4 + 16 + 36 = 56; a third of each number is lost: 1 / 9 of them, in whatever batches, in each output."""
    x = torch.tensor([[[2.0]], [[4.0]], [[6.0]]])
    whole, part = (
        captured(model_of(lambda m, x: (x * m.f, x * m.f * 2, (x > 0).long()), f=torch.tensor(f)), x)
        for f in (3.0, 2.0)
    )
    assert loss(whole, part, x) == pytest.approx(2 / 9) and loss(whole, part, x[:1], x[1:]) == pytest.approx(2 / 9)
    assert loss(whole, part, torch.zeros(3, 1, 1)) == 0  # where there is nothing to be a share of
    better, text = compare_plans(whole, [[x]], (part, Plan()), (part, Plan()))
    assert better and text == "on 3 held-out images the loss to the float model is 0.2222, 0.2222 without"
    assert compare_plans(whole, [[x]], (part, Plan()), (whole, Plan()))[0]
    assert not compare_plans(whole, [[x]], (whole, Plan()), (part, Plan()))[0]


def test_class_scores_are_compared_by_the_mean_over_samples():
    x, eye = randn(5, 3), torch.eye(3)
    nets = [matrix(*m.tolist()) for m in (eye, eye + torch.tensor([[0.0, 1, 0], [0, 0, 2], [1, 0, 0]]))]
    p, q = (n(x).detach() for n in nets)
    want = torch.nn.functional.kl_div(q.log_softmax(1), p.softmax(1), reduction="batchmean")
    assert loss(*(captured(n, x) for n in nets), x[:2], x[2:]) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "first", "held"),
    [([8], [7], [1]), ([21, 3], [21], [3]), ([22, 2], [21], [1, 2]), ([2] * 16, [2] * 14, [2, 2])],
)
def test_the_last_eighth_of_the_images_is_for_the_guard(sizes, first, held):
    x = torch.arange(float(sum(sizes)))
    given = [[part, 2 * part] for part in x.split(sizes)]
    kept, guard = split_holdout(given)
    assert [len(b[0]) for b in kept] == first and [len(b[0]) for b in guard] == held
    assert all(torch.equal(2 * a, b) for a, b in [*kept, *guard]) and [len(b[0]) for b in given] == sizes
    assert [float(v) for b in [*kept, *guard] for v in b[0]] == x.tolist()


def test_images_that_cannot_be_told_apart_stay_together():
    odd = [torch.zeros(16, 3), torch.zeros(5, 2)]
    assert split_holdout([odd]) == ([odd], []) and split_holdout([[torch.zeros(16), torch.tensor(1.0)]])[1] == []
    # of 38 images 4 are wanted, and 2 are to be had
    kept, guard = split_holdout([[torch.zeros(20)], odd, [torch.zeros(2)]])
    assert [len(b[0]) for b in kept] == [20, 16] and [len(b[0]) for b in guard] == [2]
    assert split_holdout([[torch.zeros(16)]], guard=False)[1] == []
    with pytest.raises(DataError, match="empty"):
        split_holdout([])


# ---------------------------------------------------------------- what is rounded, by hand


def chain():
    """y = x w' + 0.3, z = y + c, v = relu(z)."""
    weights = {"w": torch.tensor([[1.4]]), "b": torch.tensor([0.3]), "c": torch.tensor([2.6])}
    return graph_of("y = Linear(x, w, b)", "z = Add(y, c)", "v = Relu(z)", weights=weights, shape=(None, 1))


def rounded(names="", edges=()):
    """A plan in which these tensors are integers from -8 to 7."""
    return plan_of({"c": "weight"}, float_edges=edges, **dict.fromkeys(names, stored(1.0, bits=4)))


X1 = torch.tensor([[1.6], [-3.2]])


@pytest.mark.parametrize(
    ("plan", "more", "want"),
    [
        (rounded(), {}, [1.4 * 1.6 + 2.9, 0]),
        (rounded("xw"), {}, [2 * 1 + 2.9, 0]),
        (rounded("xwbycz"), {}, [2 + 0 + 3, 0]),
        (rounded("xwv"), {}, [4.9, 0]),  # the outputs are not rounded themselves
        (rounded("xw", [("x", "y")]), {}, [1.6 + 2.9, 0]),
        (rounded("xw", [("x", "z")]), {}, [4.9, 0]),
        (rounded("xw"), {"done": {"x"}}, [1.6 + 2.9, 0]),
        (rounded("x"), {"weights": {"w": torch.tensor([[-2.0]]), "b": torch.zeros(1), "c": torch.ones(1)}}, [0, 7]),
        (rounded("xw"), {"rounding": lambda n, x: x + 10 * (n == "x")}, [11.6 * 1.4 + 2.9, 6.8 * 1.4 + 2.9]),
    ],
)
def test_each_operator_reads_what_is_stored_of_what_it_reads(plan, more, want):
    (found,) = QuantizedRun(chain(), plan, [X1], **more).finish().values()
    assert found[:, 0].tolist() == pytest.approx(want)


def test_outputs_are_rounded_at_last_and_may_be_weights_or_inputs():
    graph = chain()
    graph.outputs[:] = ["v", "w", "x"]
    plan = rounded("xwv")
    raw, found = QuantizedRun(graph, plan, [X1]).finish(), run_quantized(graph, plan, [X1])
    assert list(raw) == list(found) == ["v", "w", "x"]
    assert raw["w"] is graph.weights["w"] and raw["x"] is X1 and raw["v"].tolist() == [[pytest.approx(4.9)], [0]]
    assert found["w"].tolist() == [[1]] and found["x"].tolist() == [[2], [-3]] and found["v"].tolist() == [[5], [0]]


def test_a_tensor_is_rounded_once_and_let_go_when_nothing_reads_it_any_more():
    graph = graph_of(*(f"{o} = Relu({i})" for i, o in ("xa", "ab", "bc", "cd")), "e = Add(d, d)")
    seen, alive = {}, []

    def rounding(name, x):
        y = x.clone()
        assert name not in seen
        seen[name] = weakref.ref(x), weakref.ref(y)
        alive.append({n for n, (a, b) in seen.items() if n != "x" and (a() is not None or b() is not None)})
        return y

    QuantizedRun(graph, rounded("xabcd"), [X1], rounding=rounding).finish()
    assert list(seen) == ["x", "a", "b", "c", "d"] and alive == [set(), {"a"}, {"b"}, {"c"}, {"d"}]


def test_weights_and_biases_alone_can_be_left_in_float():
    plan = rounded("xwb")
    found = without_weight_rounding(plan)
    assert {n: t.quantized for n, t in found.tensors.items()} == {"x": True, "w": False, "b": False}
    assert plan.quantized("w") and found.tensors["x"] is plan.tensors["x"]


def masked(m, x, mask):
    return torch.where(mask[..., None] != 0, x * m.shown, x * m.hidden)


HIDDEN = {
    "named": (lambda m, x, attention_mask: masked(m, x, attention_mask), 0),
    "unnamed": (lambda m, x, kept: masked(m, x, kept), 1),  # no name says what the integers are
}


@pytest.mark.parametrize("forward, parts", HIDDEN.values(), ids=HIDDEN)
def test_positions_that_a_mask_hides_are_no_loss(forward, parts):
    x, mask = torch.randn(4, 3, 5), torch.ones(4, 3, dtype=torch.long)
    mask[:, 2] = 0

    def graph(hidden, shown=1.0):
        return captured(model_of(forward, hidden=torch.tensor(hidden), shown=torch.tensor(shown)), x, mask)

    reference, energy = Reference(graph(1.0), [[x, mask]]), float(x.square().sum())
    assert reference.loss(graph(5.0), Plan()) == pytest.approx(parts * 16 * float(x[:, 2].square().sum()) / energy)
    rest = float(x[:, :2].square().sum()) / energy if parts else 1
    assert reference.loss(graph(1.0, 1.5), Plan()) == pytest.approx(0.25 * rest)
    nothing = torch.zeros_like(mask)  # as if nothing were said
    assert Reference(graph(1.0), [[x, nothing]]).loss(graph(5.0), Plan()) == pytest.approx(16)
