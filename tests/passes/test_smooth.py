"""Smoothing moves large channels from a layer norm into its readers' weights and changes nothing in float."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.graph.check import check
from chipfit.passes.smooth import smooth
from tests.steps import captured


class Net(nn.Module):
    """A norm that two linear layers read, and one that something else reads as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b = nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.last, self.c = nn.LayerNorm(5), nn.Linear(5, 4)
        with torch.no_grad():
            self.norm.weight.copy_(torch.tensor([5.0, 1.0]))
            self.norm.bias.copy_(torch.tensor([1.0, -1.0]))
            self.a.weight.copy_(torch.tensor([[0.5, 4.0], [-1.0, 2.0]]))
            self.b.weight.copy_(torch.tensor([[0.25, 1.0], [0.5, -3.0], [0.0, 0.0]]))

    def forward(self, x):
        y = self.norm(x)
        y = self.last(torch.cat([self.a(y), self.b(y)], -1))
        return self.c(y) + y[..., :4]


@pytest.mark.parametrize("given", [{"alpha": 0.5}, {}], ids=["given", "as the page says"])
def test_the_scales_of_equation_4_on_paper(given):
    new, notes = smooth(captured(Net(), torch.randn(3, 2)), **given)
    # reach 1 + 3 * 5 = 16 and 1 + 3 * 1 = 4, weights 1 and 4: s = sqrt(16 / 1) = 4 and sqrt(4 / 4) = 1
    assert new.weights["norm.weight"].tolist() == [1.25, 1.0] and new.weights["norm.bias"].tolist() == [0.25, -1.0]
    assert new.weights["a.weight"].tolist() == [[2.0, 4.0], [-4.0, 2.0]]
    assert new.weights["b.weight"].tolist() == [[1.0, 1.0], [2.0, -3.0], [0.0, 0.0]]
    assert notes == ["smoothed 'norm' for 'a', 'b'", "smoothed 'last' for 'c', by a multiplication: others read it too"]


@pytest.mark.parametrize("alpha, s", [(1.0, [16.0, 4.0]), (0.0, [1.0, 0.25])])
def test_the_strength_says_who_takes_the_range(alpha, s):
    new, _ = smooth(captured(Net(), torch.randn(3, 2)), alpha=alpha)
    torch.testing.assert_close(new.weights["norm.weight"], torch.tensor([5.0, 1.0]) / torch.tensor(s))


def test_the_network_stays_what_it_was_also_with_dead_channels_and_shared_weights():
    net = Net()
    with torch.no_grad():
        net.norm.weight[0] = net.norm.bias[0] = 0
    x = torch.randn(7, 3, 2)
    graph = captured(net, x)
    before = {k: w.clone() for k, w in graph.weights.items()}
    new, _ = smooth(graph)
    torch.testing.assert_close(list(run(new, [x]).values()), list(run(graph, [x]).values()), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(w, before[k]) for k, w in graph.weights.items())

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net.a(self.net.norm(x)) + self.net.a(x)

    assert smooth(captured(Twice(), x))[1] == [
        "'net.norm' is not smoothed: 'net.a.weight' is read by several operators"
    ]


def test_large_channels_cost_less_where_they_are_smoothed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16)).eval()
    with torch.no_grad():
        net[0].weight[:2] *= 50
        net[1].weight[:, :2] /= 50
    x = torch.randn(256, 32)
    errors = []
    for settings in (chipfit.Settings(), chipfit.Settings(smooth=0.5)):
        result = chipfit.quantize(net, [x], "mqbench_academic", settings=settings, progress=False)
        with torch.no_grad():
            errors.append(float((result.model(x) - net(x)).square().mean()))
    assert errors[1] < 0.1 * errors[0]


def test_a_convolution_behind_a_norm_has_its_channels_elsewhere():
    """[N, 3, 4] is normalised along the last axis, and mixed along the other one."""
    graph = captured(nn.Sequential(nn.LayerNorm(4), nn.Conv1d(3, 2, 1)), torch.randn(2, 3, 4))
    new, notes = smooth(graph)
    assert notes == ["'0' is not smoothed: no linear layer reads it"]
    assert all(new.weights[k] is w for k, w in graph.weights.items())


@pytest.mark.parametrize("computed", [("scale",), ("shift",), ("scale", "shift")])
def test_a_scale_or_shift_that_is_computed_cannot_be_divided(computed):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
            self.make, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            scale, shift = (self.make(x)[0] if k in computed else getattr(self, k) for k in ("scale", "shift"))
            return self.last(F.layer_norm(x, (4,), scale, shift))

    graph = captured(Net(), torch.randn(2, 4))
    norm = next(n for n in graph.nodes if n.op == "LayerNorm")
    new, notes = smooth(graph)
    assert notes == [f"'{norm.who}' is not smoothed: its scale or shift is computed"] and new.nodes == graph.nodes


@pytest.mark.parametrize("norm", [nn.LayerNorm(4, elementwise_affine=False), nn.LayerNorm((3, 4))])
def test_a_norm_without_one_scale_for_each_channel_is_left_and_the_next_one_is_not(norm):
    net = nn.Sequential(norm, nn.Linear(4, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 2))
    graph, x = captured(net, torch.randn(2, 3, 4)), torch.randn(2, 3, 4)
    with torch.no_grad():
        net[2].weight.copy_(torch.tensor([4.0, 1.0, 0.25, 2.0]))
        net[3].weight[:, 1] = 0
    new, notes = smooth(graph)
    assert notes == ["'0' is not smoothed: it has no scale for each channel", "smoothed '2' for '3'"]
    assert new.weights["1.weight"] is graph.weights["1.weight"]
    r = net[3].weight.detach().abs().amax(0)  # s = sqrt(3 gamma / r), and 1 for the channel that nothing reads
    s = torch.where(r > 0, (3 * net[2].weight.detach() / r).sqrt(), 1.0)
    torch.testing.assert_close(new.weights["2.weight"], net[2].weight.detach() / s)
    torch.testing.assert_close(new.weights["3.weight"], net[3].weight.detach() * s)
    torch.testing.assert_close(list(run(new, [x]).values()), list(run(graph, [x]).values()), rtol=1e-5, atol=1e-5)


def test_a_norm_that_comes_last_is_left():
    graph = captured(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4))
    new, notes = smooth(graph)
    assert notes == ["'1' is not smoothed: no linear layer reads it"] and new.nodes == graph.nodes
    assert all(new.weights[k] is w for k, w in graph.weights.items())


class Residual(nn.Module):
    """A norm that is read by two linear layers behind a dropout, and by what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.norm, self.drop = how, nn.LayerNorm(4), nn.Dropout()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            self.norm.weight.copy_(torch.tensor([40.0, 1.0, 0.25, 2.0]))
            self.a.weight[:, 0] /= 20
            self.b.weight[:, 0] /= 20

    def forward(self, x):
        y = self.drop(self.norm(x))
        z = self.a(y) * self.b(y)
        return (y, z) if self.how == "returned" else y + z


@pytest.mark.parametrize("how", ["returned", "added"])
def test_a_norm_that_others_read_too_stays_and_its_linear_readers_get_a_multiplication(how):
    net, x = Residual(how).eval(), torch.randn(5, 3, 4)
    graph = captured(net, x)
    new, notes = smooth(graph, alpha=1.0)
    assert notes == ["smoothed 'norm' for 'a', 'b', by a multiplication: others read it too"]
    check(new)
    for name in ("norm.weight", "norm.bias", "a.bias"):
        assert new.weights[name] is graph.weights[name]
    s = 3 * net.norm.weight.detach()
    torch.testing.assert_close(new.weights["a.weight"], net.a.weight.detach() * s)
    torch.testing.assert_close(new.weights["b.weight"], net.b.weight.detach() * s)
    (mul,) = (n for n in new.nodes if n.layer == "norm" and n.op == "Mul")
    torch.testing.assert_close(new.weights[mul.inputs[1]], 1 / s)
    readers = {n.layer: n.data for n in new.nodes if n.op == "Linear"}
    assert readers == {"a": mul.output, "b": mul.output} and mul.data != mul.output
    torch.testing.assert_close(list(run(new, [x]).values()), list(run(graph, [x]).values()), rtol=1e-5, atol=1e-5)


def test_a_large_channel_that_others_read_too_costs_less_where_it_is_smoothed():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 16)
            with torch.no_grad():
                self.norm.weight[:2] *= 50
                self.linear.weight[:, :2] /= 50

        def forward(self, x):
            y = self.norm(x)
            return y, self.linear(y)

    net, x, errors = Both().eval(), torch.randn(256, 32), []
    for settings in (chipfit.Settings(), chipfit.Settings(smooth=0.5)):
        result = chipfit.quantize(net, [x], "ort_cpu", settings=settings, progress=False)
        with torch.no_grad():
            errors.append(float((result.model(x)[1] - net(x)[1]).square().mean()))
        assert result.verify([torch.randn(32, 32)]).sound
    assert errors[1] < 0.1 * errors[0]
