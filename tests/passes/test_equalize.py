"""Cross-layer equalization: equal ranges on both sides of every channel."""

import pytest
import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.equalize import equalize
from tests.build import model_of, set_layer
from tests.steps import assert_same, captured


def test_a_chain_with_a_depthwise_convolution_and_a_dead_channel():
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), depthwise, nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        net[0].weight.mul_(torch.logspace(-2, 1, 8).view(-1, 1, 1, 1))
        net[2].weight[3] = 0
    x = torch.randn(2, 3, 6, 6)
    graph = captured(net, x)
    new, _ = equalize(graph)
    assert_same(graph, new, x)
    ranges = [new.weights[f"{k}.weight"].abs() for k in (0, 2, 5)]
    r = [ranges[0].amax((1, 2, 3)), ranges[1].amax((1, 2, 3)), ranges[2].amax((0, 2, 3))]
    live = torch.arange(8) != 3
    torch.testing.assert_close(r[0][live], r[1][live], rtol=0.01, atol=0)
    torch.testing.assert_close(r[1][live], r[2][live], rtol=0.01, atol=0)


def test_what_cannot_be_scaled_back_says_why():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1))
    graph = captured(net, torch.randn(2, 3, 4, 4))
    new, notes = equalize(graph)
    assert notes == [
        "'0' is not equalized: Relu6 '1' reads it",
        "'2' is not equalized: Swish '3' reads it",
        f"'4' is not equalized: '{graph.outputs[0]}' is an output of the model",
        "warning: equalize changed nothing: every pair of layers is refused; "
        "Settings(equalize_groups='always') scales channels through clipped activations",
    ]
    assert all(torch.equal(w, new.weights[k]) for k, w in graph.weights.items())


def test_the_scales_of_equation_11_on_paper():
    """r1 = (4, 9) along rows, r2 = (1, 4) along columns: s = sqrt(r1 r2) / r2 = (2 / 1, 6 / 4)."""
    first = set_layer(nn.Linear(2, 2), [1.0, -4.0, 9.0, 3.0], [1.0, 3.0])
    last = set_layer(nn.Linear(2, 2, bias=False), [1.0, 4.0, -0.25, 1.0])
    x = torch.tensor([[1.0, -1.0]])
    new, notes = equalize(captured(nn.Sequential(first, nn.ReLU(), last), x))
    assert notes[-1] == "equalized '0' with '2'"
    assert new.weights["0.weight"].tolist() == [[0.5, -2.0], [6.0, 2.0]]
    assert new.weights["0.bias"].tolist() == [0.5, 2.0]
    assert new.weights["2.weight"].tolist() == [[2.0, 6.0], [-0.5, 1.5]]
    (y,) = run(new, [x]).values()
    assert y.tolist() == [[42.0, 7.5]]  # of 6 and 9 before, and of 3 and 6 now


KINDS = {
    "dense": (nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)),
    "depthwise": (nn.Conv2d(2, 2, 1, groups=2), nn.Conv2d(2, 2, 1, groups=2)),
    "transposed": (nn.ConvTranspose2d(1, 2, 1), nn.ConvTranspose2d(2, 1, 1)),
    "transposed, grouped": (nn.ConvTranspose2d(2, 2, 1, groups=2), nn.Conv2d(2, 1, 1)),
}


@pytest.mark.parametrize("first, second", KINDS.values(), ids=KINDS)
def test_channels_are_found_on_every_kind_of_weight(first, second):
    """r1 = (8, 0.5) and r2 = (2, 8): s = (2, 0.25)."""
    net = nn.Sequential(set_layer(first, [8.0, 0.5], [4.0, 1.0]), nn.ReLU(), set_layer(second, [2.0, 8.0]))
    weights = equalize(captured(net, torch.randn(2, first.in_channels, 3, 3)))[0].weights
    found = [weights[k].flatten().tolist() for k in ("0.weight", "0.bias", "2.weight")]
    assert found == [[4.0, 2.0], [2.0, 4.0], [4.0, 2.0]]


def test_the_widest_of_several_readers_counts():
    numbers = {"first": 8.0, "a": 0.5, "b": 2.0}
    layers = {k: set_layer(nn.Linear(1, 1, bias=False), w) for k, w in numbers.items()}
    net = model_of(lambda m, x: m.a(y := torch.relu(m.first(x))) + m.b(y), **layers)
    new, _ = equalize(captured(net, torch.randn(2, 1)))  # s = sqrt(8 / 2) = 2
    assert [float(new.weights[f"{k}.weight"]) for k in ("first", "a", "b")] == [4.0, 1.0, 4.0]


@pytest.mark.parametrize(
    "layers, shape, why",
    [
        ([nn.Linear(3, 3), nn.ReLU(), nn.Conv1d(3, 2, 1)], (2, 3, 3), "their channels lie on different axes"),
        ([nn.Conv1d(3, 3, 1), nn.ReLU(), nn.Linear(3, 2)], (2, 3, 3), "their channels lie on different axes"),
        ([nn.Linear(4, 4), nn.MaxPool1d(2), nn.Linear(2, 2)], (2, 3, 4), "MaxPool '1' reads it"),  # along that axis
    ],
)
def test_channels_on_different_axes_are_not_scaled(layers, shape, why):
    graph = captured(nn.Sequential(*layers), torch.randn(*shape))
    new, notes = equalize(graph)
    assert notes[0] == f"'0' is not equalized: {why}" and len(notes) == 2
    assert all(new.weights[k] is w for k, w in graph.weights.items())


@pytest.mark.parametrize("act", [nn.ReLU(), nn.LeakyReLU(0.1)])
def test_activations_between_linear_layers_of_any_rank_are_crossed(act):
    x = torch.randn(2, 3, 4)
    graph = captured(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 2)), x)
    new, notes = equalize(graph)
    assert "equalized '0' with '2'" in notes
    assert_same(graph, new, x)


@pytest.mark.parametrize("shared", ["first", "last"])
def test_weights_of_several_operators_stay_and_pairs_behind_them_do_not(shared):
    def forward(m, x):
        x = torch.relu(m.a(x))
        x = torch.relu(m.a(x)) if shared == "first" else x
        x = m.c(torch.relu(m.b(x)))
        return x if shared == "first" else m.c(torch.relu(x))

    net = model_of(forward, a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 2))
    with torch.no_grad():
        net.b.weight.mul_(8.0)
    graph = captured(net, torch.randn(2, 2))
    new, notes = equalize(graph)
    tied = "a.weight" if shared == "first" else "c.weight"
    assert any(n.endswith(f"is not equalized: '{tied}' is read by several operators") for n in notes)
    assert new.weights[tied] is graph.weights[tied]
    done = "equalized 'b' with 'c'" if shared == "first" else "equalized 'a' with 'b'"
    assert [n for n in notes if n.startswith("equalized")] == [done]


def test_ranges_that_are_equal_within_a_thousandth_stay():
    """s = sqrt(r1 / r2): 1.0009 stays, 1.0011 does not."""
    for ratio, stays in ((1.0009**2, True), (1.0011**2, False), (1 / 1.0011**2, False)):
        net = nn.Sequential(set_layer(nn.Linear(1, 1), ratio), nn.ReLU(), set_layer(nn.Linear(1, 1), 1.0))
        graph = captured(net, torch.randn(2, 1))
        new, notes = equalize(graph)
        assert (new.weights["0.weight"] is graph.weights["0.weight"]) is stays
        assert ("equalized '0' with '2'" in notes) is not stays


def test_so_many_sweeps_are_made_at_most():
    """1, 1, 16: s of the second pair is 1/4; a second sweep then moves the first one."""
    net = nn.Sequential(*(set_layer(nn.Linear(1, 1, bias=False), w) for w in (1.0, 1.0, 16.0)))
    graph = captured(net, torch.randn(2, 1))
    weights = [[float(equalize(graph, sweeps=n)[0].weights[f"{k}.weight"]) for k in range(3)] for n in (0, 1, 2)]
    assert weights[:2] == [[1.0, 1.0, 16.0], [1.0, 4.0, 4.0]] and weights[2][0] == 2.0


def test_the_columns_of_an_embedding_take_the_scales_of_what_reads_it():
    """s = sqrt(16 / 1), sqrt(1 / 4): both columns and both inputs of the linear layer reach 4 and 2 then."""
    layers = {"e": nn.Embedding(2, 2), "f": set_layer(nn.Linear(2, 1), [1.0, 4.0])}
    layers["e"].weight.data.copy_(torch.tensor([[16.0, -1.0], [-8.0, 0.5]]))
    ids = torch.tensor([[0, 1, 1], [1, 0, 0]])
    before = captured(model_of(lambda m, x: m.f(m.e(x)), **layers), ids)
    after, notes = equalize(before)
    assert after.weights["e.weight"].tolist() == [[4.0, -2.0], [-2.0, 1.0]]
    assert after.weights["f.weight"].tolist() == [[4.0, 2.0]]
    assert_same(before, after, ids)
    assert "equalized 'e' with 'f'" in notes


def test_an_embedding_that_is_the_last_layer_too_stays():
    embedding = nn.Embedding(5, 4)
    net = model_of(lambda m, x: nn.functional.linear(m.e(x), m.e.weight), e=embedding)
    before = captured(net, torch.tensor([[0, 1, 4]]))
    after, notes = equalize(before)
    assert torch.equal(after.weights["e.weight"], embedding.weight) and "is read by several operators" in notes[0]
