"""Smoothing moves large channels from a layer norm into its readers' weights and changes nothing in float."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.calibration.collect import Channels, TensorStats
from chipfit.decide.assignment import Assignment
from chipfit.engine.run import run
from chipfit.graph.check import check
from chipfit.passes import smooth as module
from chipfit.passes.rewriting import Readers
from chipfit.passes.smooth import with_channels
from tests.build import model_of, quantized, randn, set_layer
from tests.steps import assert_same, captured


def smooth(graph, alpha=0.5):
    """With channels as large as a norm's shift and three times its scale."""
    stats = {}
    for value in with_channels(graph, {}):
        norm = next(n for n in graph.nodes if n.op == "LayerNorm" and value == Readers(graph).after_identities(n)[0])
        scale, *shift = (graph.weights[i].detach().double().abs() for i in norm.inputs[1:] if i is not None)
        peak = 3 * scale + sum(shift)
        stats[value] = TensorStats(value, count=len(peak), batches=1, channels=Channels(peak, -peak, peak))
    new, _, notes = module.smooth(graph, Assignment(), stats, alpha=alpha)
    for value, was in stats.items():
        assert was.channels.peak.equal(stats[value].channels.peak) and was.histogram is None
    return new, notes


def two_norms() -> nn.Module:
    """Return a norm that two linear layers read, and one that something else reads as well."""

    def forward(m, x):
        y = m.norm(x)
        y = m.last(torch.cat([m.a(y), m.b(y)], -1))
        return m.c(y) + y[..., :4]

    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(2), "a": nn.Linear(2, 2), "b": nn.Linear(2, 3)}
    net = model_of(forward, **layers, last=nn.LayerNorm(5), c=nn.Linear(5, 4))
    set_layer(net.norm, [5.0, 1.0], [1.0, -1.0])
    set_layer(net.a, [0.5, 4.0, -1.0, 2.0])
    set_layer(net.b, [0.25, 1.0, 0.5, -3.0, 0.0, 0.0])
    return net


def test_the_scales_of_equation_4_on_paper():
    new, notes = smooth(captured(two_norms(), torch.randn(3, 2)))
    # magnitudes 1 + 3 * 5 = 16 and 1 + 3 * 1 = 4, weights 1 and 4: s = sqrt(16 / 1) = 4 and sqrt(4 / 4) = 1
    assert new.weights["norm.weight"].tolist() == [1.25, 1.0] and new.weights["norm.bias"].tolist() == [0.25, -1.0]
    assert new.weights["a.weight"].tolist() == [[2.0, 4.0], [-4.0, 2.0]]
    assert new.weights["b.weight"].tolist() == [[1.0, 1.0], [2.0, -3.0], [0.0, 0.0]]
    assert notes == ["smoothed 'norm' for 'a', 'b'", "smoothed 'last' for 'c', by a multiplication: others read it too"]


@pytest.mark.parametrize("alpha, s", [(1.0, [16.0, 4.0]), (0.0, [1.0, 0.25])])
def test_the_strength_says_who_takes_the_range(alpha, s):
    new, _ = smooth(captured(two_norms(), torch.randn(3, 2)), alpha=alpha)
    torch.testing.assert_close(new.weights["norm.weight"], torch.tensor([5.0, 1.0]) / torch.tensor(s))


def test_the_network_stays_what_it_was_also_with_dead_channels_and_shared_weights():
    net = two_norms()
    set_layer(net.norm, [0.0, 1.0], [0.0, -1.0])
    x = torch.randn(7, 3, 2)
    graph = captured(net, x)
    before = {k: w.clone() for k, w in graph.weights.items()}
    new, _ = smooth(graph)
    assert_same(graph, new, x)
    assert all(torch.equal(w, before[k]) for k, w in graph.weights.items())

    twice = model_of(lambda m, x: m.net.a(m.net.norm(x)) + m.net.a(x), net=net)
    assert smooth(captured(twice, x))[1] == ["'net.norm' is not smoothed: 'net.a.weight' is read by several operators"]


@pytest.mark.parametrize("computed", [("scale",), ("shift",), ("scale", "shift")])
def test_a_scale_or_shift_that_is_computed_cannot_be_divided(computed):
    def forward(m, x):
        scale, shift = (m.make(x)[0] if k in computed else getattr(m, k) for k in ("scale", "shift"))
        return m.last(F.layer_norm(x, (4,), scale, shift))

    parts = {"scale": torch.ones(4), "shift": torch.zeros(4), "make": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    graph = captured(model_of(forward, **parts), torch.randn(2, 4))
    norm = next(n for n in graph.nodes if n.op == "LayerNorm")
    new, notes = smooth(graph)
    assert notes == [f"'{norm.display_name}' is not smoothed: its scale or shift is computed"]
    assert new.nodes == graph.nodes


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
    assert_same(graph, new, x)


@pytest.mark.parametrize(
    "name, net, shape",
    [
        ("1", nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (2, 4)),  # it comes last
        ("0", nn.Sequential(nn.LayerNorm(4), nn.Conv1d(3, 2, 1)), (2, 3, 4)),  # mixed along another axis
    ],
)
def test_a_norm_whose_channels_no_linear_layer_reads_is_left(name, net, shape):
    graph = captured(net, torch.randn(shape))
    new, notes = smooth(graph)
    assert notes == [f"'{name}' is not smoothed: no linear layer reads it"] and new.nodes == graph.nodes
    assert all(new.weights[k] is w for k, w in graph.weights.items())


def residual(how: str) -> nn.Module:
    """Return a norm that is read by two linear layers behind a dropout, and as `how` says."""

    def forward(m, x):
        y = m.drop(m.norm(x))
        z = m.a(y) * m.b(y)
        return (y, z) if how == "returned" else y + z

    torch.manual_seed(0)
    net = model_of(forward, norm=nn.LayerNorm(4), drop=nn.Dropout(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with torch.no_grad():
        net.norm.weight.copy_(torch.tensor([40.0, 1.0, 0.25, 2.0]))
        net.a.weight[:, 0] /= 20
        net.b.weight[:, 0] /= 20
    return net


@pytest.mark.parametrize("how", ["returned", "added"])
def test_a_norm_that_others_read_too_stays_and_its_linear_readers_get_a_multiplication(how):
    net, x = residual(how), torch.randn(5, 3, 4)
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
    assert_same(graph, new, x)


def test_a_large_channel_that_others_read_too_costs_less_where_it_is_smoothed():
    net, x = large(50.0, "returned"), torch.randn(256, 32)
    (off, _), (half, _), (auto, result) = (error(net, x, **how) for how in ({"smooth": "off"}, {"smooth": 0.5}, {}))
    assert result.verify([torch.randn(32, 32)]).sound
    assert half < 0.1 * off and auto < 3 * half  # without being asked
    assert any(n.startswith("smooth taken: on 32 held-out images ") for n in result.plan.rewrites)


def large(times: float, how: str = "") -> nn.Module:
    """Return a linear layer behind a norm whose first channels are as much larger; `how` names another reader of it."""

    def forward(m, x):
        y = m.norm(x)
        z = m.last(F.gelu(m.linear(y)))
        return (y, z) if how == "returned" else y + z if how else z

    torch.manual_seed(0)
    net = model_of(forward, norm=nn.LayerNorm(32), linear=nn.Linear(32, 16), last=nn.Linear(16, 32))
    with torch.no_grad():
        net.norm.weight[:2] *= times
        net.linear.weight[:, :2] /= times
    return net


def error(net, x, platform="ort_cpu", **settings):
    """Return the mean squared error of the (last) output on x, and the result."""
    result = quantized(net, randn(256, x.shape[1], seed=3), platform, settings=chipfit.Settings(**settings))
    with torch.no_grad():
        got, want = (y[-1] if isinstance(y := m(x), tuple) else y for m in (result.model, net))
    return float((got - want).square().mean()), result


def said(result):
    return [n for n in result.plan.rewrites if "smooth" in n]


@pytest.mark.parametrize("how", ["", "added"])
def test_norms_without_large_channels_are_left_as_they_are(how):
    x = torch.randn(256, 32)
    settings = chipfit.Settings(), chipfit.Settings(smooth="off"), chipfit.Settings(smooth="auto")
    new, off, asked = (quantized(large(1.0, how), x, settings=s) for s in settings)
    assert not said(new) and new.plan.tensors.keys() == off.plan.tensors.keys()
    assert all(torch.equal(w, off.graph.weights[k]) for k, w in new.graph.weights.items())
    assert "'norm' is not smoothed: it would take " in said(asked)[0]


def test_what_loses_more_on_held_out_samples_is_left(monkeypatch):
    monkeypatch.setattr("chipfit.adaptation.compare_plans", lambda *a: (False, "the loss is 2, 1 without"))
    result = quantized(large(50.0), torch.randn(256, 32))
    assert said(result) == ["smooth not taken: the loss is 2, 1 without"]
    assert torch.equal(result.graph.weights["norm.weight"], large(50.0).norm.weight.detach())


def test_norms_before_kernels_that_find_ranges_of_the_moment_are_left_and_that_is_said():
    net, asked = large(50.0).eval(), chipfit.Settings(smooth=0.7)
    result = quantized(net, torch.randn(256, 32), "ort_dynamic", settings=asked)
    assert said(result) == ["'norm' is not smoothed: its readers find a range each time they run"]


def test_norms_that_run_in_integers_are_smoothed_where_a_share_is_asked_for():
    net, x = large(50.0).eval(), [torch.randn(256, 32)]

    def notes(**asked):
        settings = chipfit.Settings(**asked)
        result = chipfit.quantize(net, x, "hailo", settings=settings, progress=False)
        assert result.plan.nodes[next(n.name for n in result.graph.nodes if n.op == "LayerNorm")].exec != "float"
        return said(result)

    assert not notes() and notes(smooth=0.7) == ["smoothed 'norm' for 'linear'"]
    assert notes(smooth="auto") == ["'norm' is not smoothed: no grid holds all of its channels"]


@pytest.mark.parametrize("times, symmetric", [(1.0, False), (8.0, False), (8.0, True)])
def test_the_predicted_error_is_what_rounding_makes(times, symmetric):
    """Against torch's own rounding, of what a norm makes and of weights with a scale for each channel."""
    torch.manual_seed(0)
    net = large(times).eval()
    seen, w = net.norm(torch.randn(20000, 32)).detach(), net.linear.weight.detach()
    low, high = seen.amin(0).double(), seen.amax(0).double()
    channels = Channels(seen.double().sum(0), low, high, seen.double().square().sum(0))
    grid = SimpleNamespace(bits=8, zero=0 if symmetric else "any")
    slots = {"y": SimpleNamespace(format=grid), "w": SimpleNamespace(format=SimpleNamespace(bits=8), axis=0)}
    layers, assignment = [SimpleNamespace(weight="w")], SimpleNamespace(tensors=slots)
    error = module.PredictedError(assignment, "y", layers, [w.double()], seen.numel(), channels)
    for s in (torch.ones(32), torch.where(torch.arange(32) < 2, times**0.7, 1.0)):
        x, v = seen / s, w * s
        a, b = (-x.abs().max(), x.abs().max()) if symmetric else (x.min(), x.max())
        step, steps = (b - a) / 255, 2 * v.abs().amax(1) / 255
        zero = int((-a / step).round())
        rounded = torch.fake_quantize_per_tensor_affine(x, float(step), zero, 0, 255)
        of_w = torch.fake_quantize_per_channel_affine(v, steps, torch.zeros(16, dtype=torch.int32), 0, -128, 127)
        measured = (rounded @ of_w.T - x @ v.T).square().sum(1).mean()
        assert float(measured) == pytest.approx(error(s.double()), rel=0.15)


def test_root_mean_square_norms_take_the_factors_too():
    net, x = nn.Sequential(set_layer(nn.RMSNorm(4), [40.0, 1.0, 0.25, 2.0]), nn.Linear(4, 3)), torch.randn(6, 4)
    graph = captured(net, x)
    peak = net[0](x).detach().abs().amax(0).double()
    (value,) = with_channels(graph, {})
    stats = {value: TensorStats(value, count=24, batches=1, channels=Channels(peak, -peak, peak, peak))}
    new, _, notes = module.smooth(graph, Assignment(), stats, alpha=1.0)
    assert notes == ["smoothed '0' for '1'"] and len(new.nodes) == len(graph.nodes)
    torch.testing.assert_close(new.weights["0.weight"], (net[0].weight.detach() / peak).float())
    torch.testing.assert_close(new.weights["1.weight"], (net[1].weight.detach() * peak).float())
    assert_same(graph, new, x)


def outlying(times: float, act: nn.Module, forward=lambda m, x: m.down(m.act(m.up(x))), **more) -> nn.Module:
    """Return a GELU, or another operator in float whose first channels are as much larger, between linear layers."""
    torch.manual_seed(0)
    net = model_of(forward, up=nn.Linear(16, 64), act=act, down=nn.Linear(64, 16), **more)
    with torch.no_grad():
        net.up.weight[:2] *= times
        net.down.weight[:, :2] /= times
    return net


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU()])
def test_large_channels_of_other_operators_in_float_cost_less_where_they_are_multiplied(act):
    net, x = outlying(30.0, act), torch.randn(256, 16)
    (off, _), (share, _), (auto, result) = (error(net, x, **how) for how in ({"smooth": "off"}, {"smooth": 0.7}, {}))
    assert share == off and auto < 0.2 * off  # a share is of norms alone
    assert result.verify([x]).sound
    assert said(result)[0].startswith("smoothed 'act' for 'down', by a multiplication: predicted error ")


def gated(m, x):
    y = m.norm(x)
    return x + m.down(m.act(m.gate(y)) * m.up(y))


def test_large_channels_of_gates_cost_less_where_they_are_multiplied():
    torch.manual_seed(4)
    net, x = outlying(30.0, nn.SiLU(), gated, gate=nn.Linear(16, 64), norm=nn.RMSNorm(16)), torch.randn(256, 16)
    (off, _), (auto, result) = (error(net, x, **how) for how in ({"smooth": "off"}, {}))
    assert auto < 0.5 * off and result.verify([x]).sound  # the losses of norm and gate stay
    assert any(" for 'down', by a multiplication: predicted error " in n for n in said(result))


@pytest.mark.parametrize("op", [nn.ReLU(), nn.LeakyReLU()])
def test_what_a_factor_passes_is_not_multiplied_for_it(op):
    """Equalization moves it into the layer in front; and a trial costs time."""
    graph = captured(nn.Sequential(nn.Linear(16, 64), op, nn.Linear(64, 4)), torch.randn(2, 16))
    assert not with_channels(graph, {})


def test_a_multiplication_that_is_worth_little_beside_the_result_is_left_out():
    """Of channels alike some error goes, as of those that differ; but there is little to begin with."""
    settings = chipfit.Settings(smooth="auto")
    asked = quantized(outlying(1.0, nn.GELU()), torch.randn(256, 16), settings=settings)
    assert said(asked)[0].startswith("'act' is not smoothed: it would take ")
    assert all("smooth" not in n.name for n in asked.graph.nodes)


def test_the_range_of_a_smoothed_norm_counts_errors_by_the_weights_that_read_them():
    """A channel that hardly any weight reads may be clipped, one that large weights read not."""
    torch.manual_seed(0)
    x, net = torch.randn(128, 32), large(20.0).eval()
    result = quantized(net, x, settings=chipfit.Settings(smooth="auto"))
    norm = next(n for n in result.graph.nodes if n.op == "LayerNorm")
    linear = next(n for n in result.graph.nodes if n.op == "Linear" and n.data == norm.output)
    with torch.no_grad():
        values = run(result.graph, [x], keep=[norm.output])[norm.output]
        counted = result.graph.weights[linear.weight].square().sum(0).expand(values.shape)
    h = result.stats[norm.output].histogram
    want = torch.histogram(values.flatten(), len(h.counts), range=(-h.reach, h.reach), weight=counted.flatten()).hist
    assert float((h.counts - want).abs().max()) < 1e-3 * float(want.sum())
    assert float(h.counts.sum()) == pytest.approx(float(counted.sum()), rel=1e-4)
