"""The importance of weights and values is what autograd says of the model itself, and ranges by it keep its outputs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.calibration.collect import Need, TensorStats, collect
from chipfit.graph.ir import Node
from chipfit.ranges import choose
from chipfit.rounding import fisher
from chipfit.rounding.compare import Reference
from tests.build import NEAREST, graph_of, quantized, randn

FOUR = {"*": {"bits": 4, "activation_bits": 8}}


class Net(nn.Module):
    """Every form of a linear operator, with class scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.depth = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.pairs, self.up = nn.Conv2d(8, 12, (1, 3), groups=4, dilation=(1, 2)), nn.ConvTranspose2d(12, 8, 3, 2, 1)
        self.rows, self.head = nn.Linear(8, 6), nn.Linear(6, 5)
        nn.init.normal_(self.head.weight, std=2.0)

    def forward(self, x):
        x = torch.relu(self.depth(torch.relu(self.stem(x))))
        x = torch.relu(self.up(torch.relu(self.pairs(x))))
        x = torch.relu(self.rows(x.flatten(2).transpose(1, 2)))  # positions of a sequence
        return self.head(x.mean(1))


def images(count, seed):
    return randn(count, 3, 12, 12, seed=seed) * torch.tensor([3.0, 1.0, 0.1]).view(3, 1, 1)


DATA, NEW = list(images(64, 1).split(32)), images(256, 2)


def importance(*given, seed=0):
    return fisher.importance(*given, seed)


def captured(model, batches):
    graph = chipfit.capture(model, (batches[0],))
    names = [*graph.inputs, *(o for n in graph.nodes for o in n.outputs)]
    return graph, collect(graph, [[b] for b in batches], tensors=dict.fromkeys(names, Need()))


def drawn(model, batches, seed=0):
    """Samples, each with its label, drawn from the model's scores as they come."""
    random = torch.Generator().manual_seed(seed)
    for batch in batches:
        labels = torch.multinomial(model(batch).softmax(1), 1, generator=random)[:, 0]
        yield from zip(batch.split(1), labels.split(1), strict=True)


def test_importance_of_weights_is_the_squared_gradient_of_every_sample():
    """By the module itself, one sample after another."""
    model = Net().eval()
    wanted = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
    squares, sums = ({name: torch.zeros_like(p) for name, p in wanted.items()} for _ in range(2))
    for x, label in drawn(model, DATA):
        model.zero_grad()
        F.cross_entropy(model(x), label).backward()
        for name, p in wanted.items():
            squares[name] += p.grad.square()
            sums[name] += p.grad
    graph, stats = captured(model, DATA)
    found = importance(graph, (), wanted, stats, [[b] for b in DATA])
    assert found.keys() == wanted.keys()
    for name, want in squares.items():
        torch.testing.assert_close(found[name], want / want.mean(), rtol=1e-3, atol=1e-4)
        together = sums[name].square()  # squares of sums are something else
        assert not torch.allclose(found[name], together / together.mean(), rtol=0.3, atol=0.1)


def test_importance_of_an_input_is_the_squared_gradient_where_its_values_are():
    model = Net().eval()
    graph, stats = captured(model, DATA)
    (name,) = graph.inputs
    found = importance(graph, (), [name], stats, [[b] for b in DATA])[name]
    xs, gs = [], []
    for x, label in drawn(model, DATA):
        x = x.clone().requires_grad_()
        F.cross_entropy(model(x), label).backward()
        xs.append(x.detach())
        gs.append(x.grad.square())
    want = torch.cat([g + 0.3 * torch.cat(gs[k : k + 32]).mean() for k in (0, 32) for g in gs[k : k + 32]]).flatten()
    at = torch.bucketize(torch.cat(xs).flatten(), found.edges[0][1:-1])
    counts = torch.zeros(len(found.values[0])).index_add_(0, at, want)
    coarse = [c.view(32, -1).sum(1) for c in (found.weights[0], counts)]  # values on a border may fall to either side
    torch.testing.assert_close(*coarse, rtol=2e-2, atol=1e-2 * float(coarse[1].max()))


@pytest.mark.parametrize("bits", [3, 4])
def test_the_outputs_of_a_layer_lose_less_on_new_data(bits):
    """Its inputs differ in size, and weights are large where inputs are small."""
    torch.manual_seed(0)
    model, size = nn.Linear(48, 6, bias=False), torch.logspace(-1.5, 1, 48)
    exact = model.weight.detach().div_(size)

    def error(stored):
        return float((randn(256, 48, seed=2) * size @ (stored.round(exact) - exact).t()).square().mean())

    wide, data = {"*": {"bits": bits, "activation_bits": 16}}, list((randn(256, 48, seed=1) * size).split(32))
    by_h, plain = (fitted(rule, overrides=wide, model=model, data=data) for rule in ("hmse", "mse"))
    assert [r.plan.tensors["weight"].origin for r in (by_h, plain)] == ["hmse over the weights", "mse over the weights"]
    assert error(by_h.plan["weight"]) < 0.8 * error(plain.plan["weight"])
    stored, weights = by_h.plan["weight"], by_h.stats["weight"].extras["importance"]
    turned = choose(exact, stored.grid, rule="hmse", axis=0, extras={"importance": 1 / weights})
    assert error(replace(stored, scale=turned.scale)) > error(plain.plan["weight"])  # the wrong way round it is worse


def fitted(weights, platform="mqbench_academic", overrides=FOUR, model=None, data=DATA, **options):
    options = {"weight_rule": weights, "settings": NEAREST, **options}
    return quantized(model or Net(), data, platform, overrides=overrides, **options)


def loss(result):
    return Reference(result.graph, [[NEW]]).loss(result.graph, result.plan)


@pytest.mark.parametrize("options", [{}, {"rule": "hmse"}, {"settings": Settings(correct_bias=True)}])
def test_a_network_loses_less_on_new_images(options):
    assert loss(fitted("hmse", **options)) < 0.9 * loss(fitted("mse", **options))


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "vitis_dpu", "snpe", "imx500", "nnie"])
def test_every_chip_takes_it(platform):
    """Grids per channel and per tensor, with a zero point, of powers of two, of logarithms; tied and dictated ones."""
    result, plain = (fitted(rule, platform, None, rule=rule) for rule in ("hmse", "mse"))
    assert not any("without importance" in t.origin for t in result.plan.tensors.values())
    assert {n: t.grid for n, t in result.plan.tensors.items()} == {n: t.grid for n, t in plain.plan.tensors.items()}
    if platform in ("ort_cpu", "tflite_int8"):
        assert result.verify(DATA[:1]).exact


def test_a_layer_may_ask_for_it_alone_and_an_edit_does_the_same():
    asked = {"stem": {"weight_rule": "hmse", "bits": 4}}
    plain, alone = fitted("mse", overrides=None), fitted("mse", overrides=asked)
    edited = plain.edit(asked)
    weighed = fitted("hmse", overrides={"stem": {"bits": 4}})
    for result in (alone, edited):
        assert torch.equal(result.plan["stem.weight"].scale, weighed.plan["stem.weight"].scale)
        assert torch.equal(result.plan["head.weight"].scale, plain.plan["head.weight"].scale)


def test_what_no_gradient_reaches_is_named_and_placed_by_its_errors_alone(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4)).eval()
    data = [torch.arange(9).view(3, 3)]
    result = fitted("hmse", "ort_dynamic", None, model, data)
    said = "no importance is known of '0.weight': their range rules ran without it"
    assert said in result.plan.rewrites
    assert result.plan.tensors["1.weight"].origin == "hmse over the weights"
    assert not any("no importance" in n for n in fitted("mse", "ort_dynamic", None, model, data).plan.rewrites)
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    edited = loaded.edit({"1": {"weight_rule": "HMSE"}})
    assert any("'0.weight', '1.weight'" in note for note in edited.plan.rewrites)  # there are no data any more


def test_searched_widths_and_sensitivity_know_the_rule():
    half = fitted("hmse", overrides=None, limits=chipfit.Limits(weights="50%"), rule="hmse")
    assert loss(half) < loss(fitted("mse", overrides=None, limits=chipfit.Limits(weights="50%")))
    assert sum(v for _, v in half.sensitivity(DATA).ranked()) > 0


# ---------------------------------------------------------------- by hand, of slopes that are given


def two_layers():
    """y = x w', z = y v'; three positions of two numbers."""
    weights = dict.fromkeys("wvc", torch.ones(2, 2))
    return graph_of("y = Linear(x, w, -)", "z = Linear(y, v, -)", weights=weights, shape=(None, 3, 2))


def given(monkeypatch, values, slopes):
    """Let gradients be these, of as many samples as there are in turn; returns what was asked for."""
    asked, at = [], [0]

    def gradients(graph, batch, wanted, besides, random, there, consumers):
        part = slice(at[0], at[0] + len(batch[0]))
        at[0] = part.stop
        asked.append(({*wanted, *consumers}, set(besides)))
        for name in slopes.keys() & consumers:
            consumers[name](values[name][part], slopes[name][part])
        return {n: v[part] for n, v in values.items()}, {n: g[part] for n, g in slopes.items()}

    monkeypatch.setattr(fisher, "gradients", gradients)
    return asked


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_squares_of_weights_are_of_the_sums_over_positions_of_each_sample(at_once, monkeypatch):
    monkeypatch.setattr(fisher, "NUMBERS_AT_ONCE", at_once)
    x, y, of_y = randn(40, 3, 2), randn(40, 3, 2, seed=1), randn(40, 3, 2, seed=2)
    asked = given(monkeypatch, {"x": x, "y": y}, {"y": of_y, "z": torch.zeros(40, 3, 2)})
    found = importance(two_layers(), (), ["w", "v", "b", "x"], {}, [[x]])
    want = torch.einsum("npo,npk->nok", of_y, x).square().sum(0)
    assert set(found) == {"w"}  # nothing depends on the other
    torch.testing.assert_close(found["w"], want / want.mean())
    assert asked == [({"y", "z"}, {"x", "y"})] * 2  # 32 samples and 8
    given(monkeypatch, {"x": x, "y": y}, {"y": of_y})
    assert set(importance(two_layers(), (), ["w", "v"], {}, [[x]])) == {"w"}


@pytest.mark.parametrize("most, positions, held", [(12, 1, 3), (5, 3, 1), (18, 3, 3), (17, 3, 2)])
def test_as_many_samples_are_held_at_once_as_fit(most, positions, held, monkeypatch):
    """Of each sample 2 x positions numbers are read, and 2 x 2 squares are made."""
    sizes, old, x = [], fisher.patches, randn(6, positions, 2)
    monkeypatch.setattr(fisher, "patches", lambda node, x, *rest: sizes.append(len(x)) or old(node, x, *rest))
    monkeypatch.setattr(fisher, "NUMBERS_AT_ONCE", most)
    given(monkeypatch, {"x": x}, {"y": x})
    importance(two_layers(), (), ["w"], {}, [[x]])
    assert sizes == [held] * (6 // held)


def test_operators_that_read_in_float_or_no_data_at_all_do_not_count(monkeypatch):
    x = randn(4, 3, 2)
    asked = given(monkeypatch, {"x": x, "y": x}, {"y": x, "z": x})
    assert set(importance(two_layers(), [("w", "y")], ["w", "v"], {}, [[x]])) == {"v"}
    assert asked == [({"z"}, {"y"})]
    asked = given(monkeypatch, {"x": x, "y": x}, {"y": x, "z": x})
    constant = two_layers()
    constant.nodes[0] = Node("y", "Linear", ("c", "w", None), ("y",))
    assert set(importance(constant, (), ["w", "v"], {}, [[x]])) == {"v"} and asked == [({"z"}, {"y"})]


def test_without_anything_to_weigh_no_image_is_read():
    def batches():
        raise AssertionError
        yield

    still = {"x": TensorStats("x", 1.0, 1.0)}  # one number alone has no range
    assert importance(two_layers(), (), ["x", "y", "unknown"], still, batches()) == {}


@pytest.mark.parametrize("edges, name", [((), "x"), ([("x", "y")], "x in codes")])
def test_squares_of_slopes_are_counted_where_their_values_lie(edges, name, monkeypatch):
    """Bins of 1 / 128 from -4 to 12; a floor of 0.3 of the mean square, in each chunk; exact zeros left out."""
    x, g = 3 * randn(40, 3, 2) + 4, randn(40, 3, 2, seed=1)
    x[:, 0, 0], x[0, 1, 0], x[1, 1, 0], x[2, 1, 0], x[3, 1, 0] = 0.0, -4.0, 12.0, -99.0, 99.0
    asked = given(monkeypatch, {name: x}, {name: g})
    stats = {"x": TensorStats("x", -4.0, 12.0), "y": TensorStats("y", 0.0, 1.0)}
    found = importance(two_layers(), edges, ["x", "y"], stats, [[x]])
    assert set(found) == {"x"} and asked[0] == ({name, "y"}, set())
    counts = np.zeros(2048)
    for a, b in ((0, 32), (32, 40)):
        square = g[a:b].double().numpy() ** 2
        weight = (square + 0.3 * square.mean()) * (x[a:b].numpy() != 0)
        counts += np.histogram(x[a:b].clamp(-4, 12).numpy(), 2048, (-4, 12), weights=weight)[0]
    sample = found["x"]
    np.testing.assert_allclose(sample.weights[0], counts, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sample.edges[0], np.linspace(-4, 12, 2049), atol=1e-5)
    np.testing.assert_allclose(sample.values[0], np.linspace(-4, 12, 2049)[:-1] + 1 / 256, atol=1e-5)
    assert sample.low.tolist() == [-4] and sample.high.tolist() == [12] and sample.low.dtype is torch.float64
    given(monkeypatch, {name: x}, {name: torch.zeros_like(g)})
    assert importance(two_layers(), edges, ["x"], stats, [[x]]) == {}


def test_labels_are_drawn_with_the_seed(monkeypatch):
    seen = []
    monkeypatch.setattr(fisher, "gradients", lambda *a: seen.append(a[4].initial_seed()) or ({}, {}))
    importance(two_layers(), (), ["w"], {}, [[torch.zeros(3, 3, 2)]], seed=7)
    assert seen == [7]
