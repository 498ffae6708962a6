"""Comparing plans: what rounds, what does not, and losses by hand."""

import math
import weakref

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.rounding.compare import (
    HELD_OUT,
    Reference,
    compare_plans,
    count_samples,
    run_quantized,
    split_holdout,
    unrounded_outputs,
    without_weight_rounding,
)

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Skip(nn.Module):
    """The sum reads what the second convolution's input was before it was rounded, on input-placed platforms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        return y + self.b(y)


@pytest.mark.parametrize("platform", ["mqbench_academic", "ort_cpu", "tensorrt", "imx500"])
def test_a_rounded_run_is_what_the_model_computes(platform):
    result = chipfit.quantize(Skip().eval(), [X], platform, progress=False)
    with torch.inference_mode():
        (got,) = run_quantized(result.graph, result.plan, [X]).values()
        want = result.model.eval()(X)
    step = max((float(t.scale.max()) for t in result.plan.tensors.values() if t.quantized), default=0.0)
    assert float((got != want).float().mean()) < 0.01 and float((got - want).abs().max()) <= 1.01 * step


def test_losses_by_hand():
    identity, half = (nn.Linear(2, 2, bias=False) for _ in range(2))
    with torch.no_grad():
        identity.weight.copy_(torch.eye(2))
        half.weight.copy_(0.5 * torch.eye(2))
    x = torch.tensor([[math.log(3.0), 0.0]])  # probabilities 3/4 and 1/4; halved: sqrt 3 to 1
    graphs = [chipfit.capture(m.eval(), (x,)) for m in (identity, half)]
    q = math.sqrt(3) / (1 + math.sqrt(3))
    want = 0.75 * math.log(0.75 / q) + 0.25 * math.log(0.25 / (1 - q))
    assert Reference(graphs[0], [[x]]).loss(graphs[1], chipfit.Plan()) == pytest.approx(want, rel=1e-5)
    x3 = torch.tensor([[[2.0, 4.0]]])
    other = [chipfit.capture(m.eval(), (x3,)) for m in (identity, half)]
    assert Reference(other[0], [[x3]]).loss(other[1], chipfit.Plan()) == pytest.approx(0.25)
    assert Reference(other[0], [[x3]]).loss(other[0], chipfit.Plan()) == 0


def test_losses_of_batches_are_one_mean_and_those_of_outputs_a_sum():
    """Energies 4 + 16 + 36 = 56; a third of each number is lost: 1 / 9 of them, in whatever batches, in each output."""

    class Twice(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, x):
            return x * self.factor, x * self.factor * 2, (x > 0).long()

    x = torch.tensor([[[2.0]], [[4.0]], [[6.0]]])
    whole, part = (chipfit.capture(Twice(f).eval(), (x,)) for f in (3.0, 2.0))
    for batches in ([[x]], [[x[:1]], [x[1:]]]):
        assert Reference(whole, batches).loss(part, chipfit.Plan()) == pytest.approx(2 / 9)
    nothing = Reference(whole, [[torch.zeros(3, 1, 1)]])  # what differs itself, where there is nothing to be a share of
    assert nothing.loss(part, chipfit.Plan()) == 0
    as_good, words = compare_plans(whole, [[x]], (part, chipfit.Plan()), (part, chipfit.Plan()))
    assert as_good and words == "on 3 held-out images the loss to the float model is 0.2222, 0.2222 without"
    assert compare_plans(whole, [[x]], (part, chipfit.Plan()), (whole, chipfit.Plan()))[0]
    assert not compare_plans(whole, [[x]], (whole, chipfit.Plan()), (part, chipfit.Plan()))[0]


def test_a_single_score_is_compared_by_its_energy():
    x = torch.tensor([[2.0], [-4.0]])
    graphs = []
    for w in (1.0, 0.5):
        one = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            one.weight.fill_(w)
        graphs.append(chipfit.capture(one.eval(), (x,)))
    assert Reference(graphs[0], [[x]]).loss(graphs[1], chipfit.Plan()) == pytest.approx(0.25)


def test_class_scores_are_compared_by_the_mean_over_samples():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    graphs = []
    for k in range(2):
        net = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            net.weight.copy_(torch.eye(3) + k * torch.tensor([[0.0, 1, 0], [0, 0, 2], [1, 0, 0]]))
        graphs.append((chipfit.capture(net.eval(), (x,)), net(x).detach()))
    (a, p), (b, q) = graphs
    want = torch.nn.functional.kl_div(q.log_softmax(1), p.softmax(1), reduction="batchmean")
    assert Reference(a, [[x[:2]], [x[2:]]]).loss(b, chipfit.Plan()) == pytest.approx(float(want), rel=1e-5)


def test_images_are_counted_and_single_numbers_are_one():
    assert count_samples([[X], [X[:3], X], [torch.tensor(1.0)]]) == 16 + 3 + 1 and count_samples([]) == 0


@pytest.mark.parametrize(
    ("sizes", "first", "held"),
    [
        ([16], [14], [2]),
        ([7], [7], []),
        ([8], [7], [1]),
        ([20, 4], [20, 1], [3]),
        ([21, 3], [21], [3]),
        ([22, 2], [21], [2, 1]),
        ([2] * 16, [2] * 14, [2, 2]),
    ],
)
def test_the_last_eighth_of_the_images_is_for_the_guard(sizes, first, held):
    assert HELD_OUT == 1 / 8
    x = torch.arange(float(sum(sizes)))
    given = [[part, 2 * part] for part in x.split(sizes)]
    kept, guard = split_holdout(given)
    assert [len(b[0]) for b in kept] == first and [len(b[0]) for b in guard] == held
    assert all(torch.equal(2 * a, b) for a, b in [*kept, *guard]) and [len(b[0]) for b in given] == sizes
    assert sorted(float(v) for b in [*kept, *guard] for v in b[0]) == x.tolist()
    assert all(float(b[0].min()) > float(kept[-1][0].max()) for b in guard)


def test_images_that_cannot_be_told_apart_stay_together():
    odd = [torch.zeros(16, 3), torch.zeros(5, 2)]
    assert split_holdout([odd]) == ([odd], []) and split_holdout([[torch.zeros(16), torch.tensor(1.0)]])[1] == []
    kept, guard = split_holdout(
        [[torch.zeros(20)], odd, [torch.zeros(2)]]
    )  # of 38 images 4 are wanted, and 2 are to be had
    assert [len(b[0]) for b in kept] == [20, 16] and [len(b[0]) for b in guard] == [2]
    with pytest.raises(DataError, match="empty"):
        split_holdout([])


# ---------------------------------------------------------------- what is rounded, by hand


def in_codes(name, role="activation"):
    """Integers from -8 to 7."""
    scale, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    stored = Stored(format="f", grid=Grid(bits=4, qmin=-8, qmax=7), scale=scale, zero_point=zero)
    return TensorPlan(name=name, role=role, stored=stored)


def chain():
    """y = x w' + 0.3, z = y + c, v = relu(z)."""
    nodes = [
        Node("fc", "Linear", ("x", "w", "b"), ("y",)),
        Node("sum", "Add", ("y", "c"), ("z",)),
        Node("relu", "Relu", ("z",), ("v",)),
    ]
    weights = {"w": torch.tensor([[1.4]]), "b": torch.tensor([0.3]), "c": torch.tensor([2.6])}
    return Graph(nodes, ["x"], ["v"], {n: Value(n, (None, 1)) for n in "xyzv"}, weights)


X1 = torch.tensor([[1.6], [-3.2]])


def plan_of(*names, edges=()):
    tensors = {n: in_codes(n, "weight" if n in "wbc" else "activation") for n in names}
    return Plan(tensors=tensors, float_edges=frozenset(edges))


@pytest.mark.parametrize(
    ("plan", "more", "want"),
    [
        (plan_of(), {}, [1.4 * 1.6 + 2.9, 0]),
        (plan_of("x", "w"), {}, [2 * 1 + 2.9, 0]),
        (plan_of("x", "w", "b", "y", "c", "z"), {}, [2 + 0 + 3, 0]),
        (plan_of("x", "w", "v"), {}, [4.9, 0]),  # the outputs are not rounded themselves
        (plan_of("x", "w", edges=[("x", "fc")]), {}, [1.6 + 2.9, 0]),
        (plan_of("x", "w", edges=[("x", "sum")]), {}, [4.9, 0]),
        (plan_of("x", "w"), {"done": {"x"}}, [1.6 + 2.9, 0]),
        (plan_of("x", "w"), {"done": {"w"}}, [2 * 1.4 + 2.9, 0]),
        (plan_of("x"), {"weights": {"w": torch.tensor([[-2.0]]), "b": torch.zeros(1), "c": torch.ones(1)}}, [0, 7]),
        (plan_of("x", "w"), {"rounding": lambda n, x: x + 10 * (n == "x")}, [11.6 * 1.4 + 2.9, 6.8 * 1.4 + 2.9]),
    ],
)
def test_each_operator_reads_what_is_stored_of_what_it_reads(plan, more, want):
    (found,) = unrounded_outputs(chain(), plan, [X1], **more).values()
    assert found[:, 0].tolist() == pytest.approx(want)


def test_an_operand_that_is_left_out_is_read_as_none():
    graph = chain()
    graph.nodes[0] = graph.nodes[0].with_(inputs=("x", "w", None))
    (found,) = unrounded_outputs(graph, plan_of("x", "w"), [X1]).values()
    assert found[:, 0].tolist() == pytest.approx([2 * 1 + 2.6, 0])


def test_outputs_are_rounded_at_last_and_may_be_weights_or_inputs():
    graph = chain()
    graph.outputs[:] = ["v", "w", "x"]
    plan = plan_of("x", "w", "v")
    raw, found = unrounded_outputs(graph, plan, [X1]), run_quantized(graph, plan, [X1])
    assert list(raw) == list(found) == ["v", "w", "x"]
    assert raw["w"] is graph.weights["w"] and raw["x"] is X1 and raw["v"].tolist() == [[pytest.approx(4.9)], [0]]
    assert found["w"].tolist() == [[1]] and found["x"].tolist() == [[2], [-3]] and found["v"].tolist() == [[5], [0]]


def test_a_tensor_is_rounded_once_and_let_go_when_nothing_reads_it_any_more():
    nodes = [Node(o, "Relu", (i,), (o,)) for i, o in ("xa", "ab", "bc", "cd")] + [Node("e", "Add", ("d", "d"), ("e",))]
    graph = Graph(nodes, ["x"], ["e"], {n: Value(n, (None, 1)) for n in "xabcde"}, {})
    seen, alive = {}, []

    def rounding(name, x):
        y = x.clone()
        assert name not in seen
        seen[name] = weakref.ref(x), weakref.ref(y)
        alive.append({n for n, (a, b) in seen.items() if n != "x" and (a() is not None or b() is not None)})
        return y

    unrounded_outputs(graph, plan_of(*"xabcd"), [X1], rounding=rounding)
    assert list(seen) == ["x", "a", "b", "c", "d"] and alive == [set(), {"a"}, {"b"}, {"c"}, {"d"}]


def test_weights_and_biases_alone_can_be_left_in_float():
    plan = plan_of("x", "w", "b")
    found = without_weight_rounding(plan)
    assert {n: t.quantized for n, t in found.tensors.items()} == {"x": True, "w": False, "b": False}
    assert plan.quantized("w") and found.tensors["x"] is plan.tensors["x"]


class Padded(nn.Module):
    """Places that a mask hides are multiplied by another number than those that it shows."""

    def __init__(self, hidden: float, shown: float = 1.0) -> None:
        super().__init__()
        self.hidden, self.shown = nn.Parameter(torch.tensor(hidden)), nn.Parameter(torch.tensor(shown))

    def forward(self, x, attention_mask):
        return torch.where(attention_mask[..., None] != 0, x * self.shown, x * self.hidden)


class Unnamed(Padded):
    """The same, where no name says what the integers are."""

    def forward(self, x, kept):
        return super().forward(x, kept)


@pytest.mark.parametrize("kind, parts", [(Padded, 0), (Unnamed, 1)])
def test_what_a_mask_hides_is_no_loss(kind, parts):
    x, mask = torch.randn(4, 3, 5), torch.ones(4, 3, dtype=torch.long)
    mask[:, 2] = 0
    float_, hidden, shown = (chipfit.capture(kind(*w).eval(), (x, mask)) for w in [(1.0,), (5.0,), (1.0, 1.5)])
    reference = Reference(float_, [[x, mask]])
    beyond = 16 * float(x[:, 2].square().sum() / x.square().sum())
    assert reference.loss(hidden, Plan()) == pytest.approx(parts * beyond)
    rest = 1 if kind is Padded else float(x[:, :2].square().sum() / x.square().sum())
    assert reference.loss(shown, Plan()) == pytest.approx(0.25 * rest)
    nothing = torch.zeros_like(mask)  # as if nothing were said
    assert Reference(float_, [[x, nothing]]).loss(hidden, Plan()) == pytest.approx(16)
