"""Values that a grid would spoil stay float: indices, masks, guards. Compared with torch and with the runtimes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.float_only import float_only_values
from chipfit.passes.fold_constants import fold_constants
from tests.build import model_of, quantized

PLATFORMS = ("ort_cpu", "tflite_int8")


def cosine(a, b):
    return float(F.cosine_similarity(a.detach().flatten(), b.detach().flatten(), dim=0))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_are_chosen_by_the_ids_themselves(platform):
    torch.manual_seed(0)
    rows = {"rows": nn.Embedding(1000, 16), "out": nn.Linear(16, 4)}
    model = model_of(lambda m, ids: m.out(m.rows((ids * 2 / 2).long())), **rows)
    ids = torch.randint(0, 1000, (8, 40)).float()
    result = quantized(model, ids, platform)
    assert not any(result.plan.quantized(v) for v in ("ids", "mul", "div"))
    got = result.model(ids)
    assert (got - model(ids)).abs().max() < 0.05  # a wrong row is off by about 1
    assert result.verify([torch.randint(0, 1000, (4, 40)).float()]).exact


def table(forward, *inputs, others=()):
    """Return the values of a function that stay float, and its graph."""

    model = model_of(lambda m, *xs: forward(m.linear, *xs), linear=nn.Linear(4, 4))
    graph, _ = fold_constants(capture(model, inputs, {}, others))
    return set(float_only_values(graph)), graph


X = torch.randn(3, 4)


def test_what_is_only_cast_to_integers_stays_float_even_if_the_network_computes_it():
    found, _ = table(lambda f, x: (f(x), f(x).abs().long()), X)
    assert found == {"linear_1", "abs_1"}


def test_what_the_network_computes_may_be_rounded_before_it_is_compared_and_what_is_given_may_not():
    found, _ = table(lambda f, x: f(x) > 0.5, X)
    assert found == set()
    found, _ = table(lambda f, x, m: f(x) * (m * 2 > 0.5).float(), X, X)
    assert len(found) == 2 and "mul" in found  # the mask and twice the mask


def test_a_given_value_stays_float_where_it_is_a_number_and_an_index_too():
    found, graph = table(lambda f, x: (f(x), (x * 2).long()), X)
    assert len(found) == 2 and graph.inputs[0] in found
    found, _ = table(lambda f, x: (f(x), f(f(x)).long()), X)
    assert len(found) == 1  # what the network computes for both may be rounded; the second result is cast only
    found, _ = table(lambda f, x: (f(x), f(x) * (x > 0)), X)  # compared as the chip has it
    assert found == set()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_ids_that_are_features_too_still_choose_their_own_rows(platform):
    torch.manual_seed(0)
    layers = {"rows": nn.Embedding(1000, 4), "out": nn.Linear(4, 4)}
    model = model_of(lambda m, ids: m.rows(ids.long())[:, 0] + m.out(ids), **layers)
    ids = torch.randint(0, 1000, (8, 4)).float()
    nn.init.zeros_(model.out.weight)
    result = quantized(model, ids, platform)
    assert (result.model(ids) - model(ids)).abs().max() < 0.05  # a wrong row is off by about 1
    assert not result.plan.quantized("ids")


def test_a_value_whose_shape_alone_is_read_stays_float():
    longer = [((X, torch.randn(3, 7)), {})]  # than y, whose number of columns is no size of x
    found, graph = table(lambda f, x, y: f(x) + torch.zeros(y.shape[1], 1).sum() + y.shape[1], X, X, others=longer)
    assert found == {graph.inputs[1]} and "Size" in {n.op for n in graph.nodes}


class Attention(nn.Module):
    """Eager attention of one head with a mask in one of the usual ways."""

    def __init__(self, way, value):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.way, self.value = way, value
        for p in (self.q, self.k):
            nn.init.normal_(p.weight, std=0.4)

    def forward(self, x, keep):
        n = x.shape[1]
        s = self.q(x) @ self.k(x).transpose(-1, -2) / math.sqrt(32)
        if self.way == "causal":
            s = s + torch.full((n, n), self.value).triu(1)
        elif self.way == "computed":
            s = s + (1.0 - keep[:, None, :]) * self.value
        elif self.way == "additive":
            s = s + keep[:, None, :]
        elif self.way == "filled":
            s = s.masked_fill(keep[:, None, :] == 0, self.value)
        elif self.way == "where":
            s = torch.where(keep[:, None, :] > 0.5, s, torch.tensor(self.value))
        elif self.way == "sub":
            s = (s - (keep[:, None, :] == 0).float() * -self.value) * 0.5
        return self.o(s.softmax(-1) @ self.v(x))


LEAST = torch.finfo(torch.float32).min
MASKS = [("causal", v) for v in (LEAST, -math.inf, -1e9, -1e4, -100.0)]
MASKS += [(way, LEAST) for way in ("computed", "filled", "where", "sub")] + [("additive", -1e9), ("computed", -1e4)]


def batch(way, value, seed):
    torch.manual_seed(seed)
    keep = torch.ones(4, 12)
    keep[:, 7 + seed % 4 :] = 0
    return torch.randn(4, 12, 32), (1 - keep) * value if way == "additive" else keep


@pytest.mark.thinned(3)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("way", "value"), MASKS)
def test_a_mask_does_not_set_the_grid_of_the_scores(way, value, platform):
    torch.manual_seed(1)
    model, data = Attention(way, value).eval(), [batch(way, value, s) for s in range(3)]
    result = quantized(model, data, platform, settings=chipfit.Settings(results="codes"))
    fresh = batch(way, value, 9)
    assert cosine(result.model(*fresh), model(*fresh)) > 0.99
    scores = next(n for n in result.graph.nodes if n.op == "MatMul")
    assert result.plan.nodes[scores.name].exec == "int" and float(result.plan[scores.output].scale) < 1
    check = result.verify([fresh])
    assert check.sound, check.summary()


def test_a_position_bias_of_ordinary_range_is_stored_in_codes():
    class Biased(Attention):
        def forward(self, x, keep):
            s = self.q(x) @ self.k(x).transpose(-1, -2) + torch.linspace(-3, 3, 144).view(12, 12)
            return self.o(s.softmax(-1) @ self.v(x))

    result = quantized(Biased("", 0), [batch("", 0, 0)])
    add = next(n for n in result.graph.nodes if n.op == "Add")
    assert result.plan.nodes[add.name].exec == "int"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_norm_of_zeros_does_not_divide_by_the_zero_of_a_grid(platform):
    def normed(m, x):
        y = F.normalize(m.a(x), dim=-1)
        return m.b(y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt())

    model, x = model_of(normed, a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 4)), torch.randn(6, 5, 8)
    x[0] = 0
    result = quantized(model, x, platform)
    got = result.model(x)
    assert torch.isfinite(got).all() and cosine(got, model(x)) > 0.98
    assert result.verify([x]).sound


def test_a_part_of_a_split_that_nobody_reads_does_not_keep_the_others_in_float():
    result = quantized(model_of(lambda m, x: torch.split(x, 2, 1)[0] + 1), torch.randn(2, 4, 8, 8))
    assert result.plan.quantized(result.graph.nodes[0].outputs[0])


@pytest.mark.parametrize(("least", "stays"), [(1.0, True), (1e3, False)])
def test_a_divisor_whose_least_number_a_grid_would_round_to_0_stays_float(least, stays):
    divisor = torch.logspace(math.log10(least), 4, 8)
    model = model_of(lambda m, x: m.b((m.a(x) / m.by).sin()), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    model.register_buffer("by", divisor)
    result = quantized(model, x := torch.randn(6, 8) * 1e3, "openvino_cpu")
    name = next(n.inputs[1] for n in result.graph if n.op == "Div")
    assert (not result.plan.quantized(name)) == stays
    assert torch.isfinite(result.model(x)).all()


@pytest.mark.parametrize("exponent", [2.0, 3.0, torch.tensor([2.0, 1.0, 3.0])], ids=["2", "3", "of each channel"])
def test_powers_of_negative_numbers_are_numbers(exponent):
    torch.manual_seed(0)
    model = model_of(lambda m, x: m.out(m.first(x) ** exponent), first=nn.Linear(6, 3), out=nn.Linear(3, 2))
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    result = quantized(model, x, "openvino_cpu")
    assert not any(t.role == "weight" and t.quantized and "scalar" in t.name for t in result.plan.tensors.values())
    assert cosine(result.model(x), model(x)) > 0.999
