"""Comparing plans: what rounds, what does not, and losses by hand."""

import math

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError
from chipfit.rounding.compare import HELD_OUT, Reference, apart, better, count, rounded_run

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
        (got,) = rounded_run(result.graph, result.plan, [X]).values()
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
    as_good, words = better(whole, [[x]], (part, chipfit.Plan()), (part, chipfit.Plan()))
    assert as_good and words == "on 3 held-out images the loss to the float model is 0.2222, 0.2222 without"
    assert better(whole, [[x]], (part, chipfit.Plan()), (whole, chipfit.Plan()))[0]
    assert not better(whole, [[x]], (whole, chipfit.Plan()), (part, chipfit.Plan()))[0]


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
    assert count([[X], [X[:3], X], [torch.tensor(1.0)]]) == 16 + 3 + 1 and count([]) == 0


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
    kept, guard = apart(given)
    assert [len(b[0]) for b in kept] == first and [len(b[0]) for b in guard] == held
    assert all(torch.equal(2 * a, b) for a, b in [*kept, *guard]) and [len(b[0]) for b in given] == sizes
    assert sorted(float(v) for b in [*kept, *guard] for v in b[0]) == x.tolist()
    assert all(float(b[0].min()) > float(kept[-1][0].max()) for b in guard)


def test_images_that_cannot_be_told_apart_stay_together():
    odd = [torch.zeros(16, 3), torch.zeros(5, 2)]
    assert apart([odd]) == ([odd], []) and apart([[torch.zeros(16), torch.tensor(1.0)]])[1] == []
    kept, guard = apart([[torch.zeros(20)], odd, [torch.zeros(2)]])  # of 38 images 4 are wanted, and 2 are to be had
    assert [len(b[0]) for b in kept] == [20, 16] and [len(b[0]) for b in guard] == [2]
    with pytest.raises(DataError, match="empty"):
        apart([])
