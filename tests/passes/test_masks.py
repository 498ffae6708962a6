"""Masks of attention become selections of quantized values: no float operator, and what is hidden has no influence."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.graph.hidden_scores import hidden_scores, split_mask
from tests.build import model_of, quantized, randn, sqnr_db

N, T, D, HEADS = 4, 12, 16, 2
LEAST = torch.finfo(torch.float32).min
EARLIER = torch.ones(T, T, dtype=torch.bool).tril()
DISTANCE = (torch.arange(T)[:, None] - torch.arange(T)).abs()


def attending(attention, peak: float = 1.0) -> nn.Module:
    """Return a model of one layer of attention; `attention` is a function of q, k, v [N, heads, T, D] and a mask."""

    def forward(m, x, *mask):
        q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return m.out(attention(q, k, v, *mask).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    layers = nn.Linear(D, 3 * D), nn.Linear(D, 5)
    layers[0].weight.data *= peak
    return model_of(forward, qkv=layers[0], out=layers[1])


def scores(q, k):
    return q @ k.mT / math.sqrt(D // HEADS)


def earlier(x):
    return EARLIER.to(x.device)


def with_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


#: ways in which people write that positions see only earlier ones
CAUSAL = {
    "is_causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "a condition": lambda q, k, v: with_mask(q, k, v, earlier(q)),
    "-inf is added": lambda q, k, v: with_mask(
        q, k, v, torch.zeros_like(earlier(q), dtype=q.dtype).masked_fill(~earlier(q), -math.inf)
    ),
    "filled with -inf": lambda q, k, v: scores(q, k).masked_fill(~earlier(q), -math.inf).softmax(-1) @ v,
    "filled with -1e9": lambda q, k, v: scores(q, k).masked_fill(~earlier(q), -1e9).softmax(-1) @ v,
    "-1e4 is added": lambda q, k, v: (scores(q, k) + (1 - earlier(q).float()) * -1e4).softmax(-1) @ v,
    "1e9 is subtracted": lambda q, k, v: (scores(q, k) - (~earlier(q)).float() * 1e9).softmax(-1) @ v,
    "the least number": lambda q, k, v: torch.where(earlier(q), scores(q, k), LEAST).softmax(-1) @ v,
    "with a bias": lambda q, k, v: with_mask(
        q, k, v, (-0.2 * DISTANCE.to(q.device)).masked_fill(~earlier(q), -math.inf)
    ),
    "large scores": lambda q, k, v: scores(3 * q, k).masked_fill(~earlier(q), -math.inf).softmax(-1) @ v,
}


def in_integers(result) -> bool:
    """Return whether every operator with a float result in the plan's sense has quantized ones."""
    nodes = result.plan.nodes
    return not [n for n in result.graph.nodes if nodes[n.name].exec == "float" and result.graph.is_float(n.output)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("how", CAUSAL)
def test_later_tokens_change_no_integer_of_earlier_ones(how):
    model, batches = attending(CAUSAL[how]), [randn(N, T, D, seed=k) for k in range(4)]
    result = quantized(model, batches, "tflite_int8")
    found = result.verify(batches[0])
    assert in_integers(result) and found.exact and not found.float_operators
    x = randn(N, T, D, seed=9)
    other = torch.cat([x[:, :-1], randn(N, 1, D, seed=10)], 1)
    got = [result.device_model(b) for b in (x, other)]
    assert torch.equal(got[0][:, :-1], got[1][:, :-1]) and not torch.equal(got[0], got[1])
    assert sqnr_db(model(x).detach(), got[0]) > 25


def test_microcontrollers_compute_causal_attention_in_integers():
    model, batches = attending(CAUSAL["is_causal"]), [randn(N, T, D, seed=k) for k in range(4)]
    result = quantized(model, batches, "tflm_cmsis_nn")
    assert result.verify(batches[0]).exact
    assert sqnr_db(model(batches[1]).detach(), result.device_model(batches[1])) > 30


#: masks of padding: 1 keeps a token
PADDING = {
    "a condition": (torch.bool, lambda q, k, v, mask: with_mask(q, k, v, mask[:, None, None])),
    "a condition that hides": (torch.bool, lambda q, k, v, m: with_mask(q, k, v, ~(~m)[:, None, None])),
    "filled": (torch.int64, lambda q, k, v, m: scores(q, k).masked_fill(m[:, None, None] == 0, LEAST).softmax(-1) @ v),
    "affine": (torch.int32, lambda q, k, v, m: with_mask(q, k, v, (1.0 - m[:, None, None].float()) * LEAST)),
    "affine, of conditions": (torch.bool, lambda q, k, v, m: with_mask(q, k, v, (m[:, None, None].float() - 1) * 1e9)),
    "with a causal one": (torch.int64, lambda q, k, v, m: with_mask(q, k, v, both(m[:, None, None]))),
    "of each head": (torch.bool, lambda q, k, v, m: with_mask(q, k, v, by_head(m))),
}


def both(mask):
    filled = torch.zeros(len(mask), 1, 1, T, device=mask.device).masked_fill(mask == 0, LEAST)
    hidden = torch.full((T, T), LEAST, device=mask.device).triu(1)
    return torch.maximum(hidden + filled, torch.tensor(LEAST, device=mask.device))


def by_head(mask):
    """Return what `nn.MultiheadAttention` makes of masks of padding and of the future."""
    added = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -math.inf)
    added = added.view(-1, 1, 1, T).expand(-1, HEADS, -1, -1).reshape(-1, 1, T)
    hidden = torch.zeros(1, T, T, device=mask.device).masked_fill(~earlier(mask), -math.inf)
    return (hidden + added).view(-1, HEADS, T, T)


@pytest.mark.parametrize("how", PADDING)
def test_padding_changes_no_integer_of_what_is_kept(how):
    dtype, attention = PADDING[how]
    model = attending(attention)
    masks = [(torch.arange(T) < 4 + torch.randint(T - 3, (N, 1))).to(dtype) for _ in range(4)]
    batches = [(randn(N, T, D, seed=k), mask) for k, mask in enumerate(masks)]
    result = quantized(model, batches, "tflite_int8")
    assert in_integers(result) and result.verify([batches[0]]).exact
    x, mask = batches[1]
    noisy = torch.where(mask.bool()[..., None], x, randn(N, T, D, seed=9))
    got, kept = [result.device_model(b, mask) for b in (x, noisy)], mask.bool()
    assert torch.equal(got[0][kept], got[1][kept]) and not torch.equal(got[0], got[1])
    assert sqnr_db(model(x, mask).detach()[kept], got[0][kept]) > 25


ODD = torch.arange(8)[:, None, None] % 2 > 0
#: functions of images [N, 8, H, W] with infinite constants, and whether every operator of LiteRT computes integers
INFINITE = {
    "minimum": (lambda x: torch.minimum(x, x.new_tensor(math.inf)), True),
    "bounds by channel": (lambda x: x.clamp(torch.where(ODD, -math.inf, -0.2), torch.where(ODD, 0.3, math.inf)), True),
    "padding of a pool": (lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-math.inf), 2, 2), True),
    "padding of two sides": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-1e9), 3, 2), True),
    "padding": (lambda x: F.pad(x, (1, 1, 1, 1), value=-math.inf).relu(), False),
    "a choice": (lambda x: x.masked_fill(ODD, -math.inf).sigmoid(), False),
    "an addend": (lambda x: (0.5 * x + torch.zeros(8, 1, 1).masked_fill(ODD, -math.inf)).exp(), False),
}


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
@pytest.mark.parametrize("how", INFINITE)
def test_infinite_constants_set_no_grid(how, platform):
    f, whole = INFINITE[how]
    model = model_of(lambda m, x: m.out(f(m.a(x))), a=nn.Conv2d(3, 8, 3), out=nn.Conv2d(8, 4, 3))
    batches = [randn(2, 3, 17, 17, seed=k) for k in range(4)]
    result = quantized(model, batches, platform)
    assert result.verify(batches[0]).require({"Exp", "Sigmoid"}).exact
    assert in_integers(result) or not (whole and platform == "tflite_int8")
    assert sqnr_db(model(batches[1]).detach(), result.device_model(batches[1])) > 28


def test_an_output_shows_its_mask_although_a_softmax_reads_it_too():
    model = model_of(lambda m, x: (y := m.a(x).masked_fill(EARLIER[3], -math.inf), y.softmax(-1)), a=nn.Linear(D, T))
    result = quantized(model, [randn(N, D, seed=k) for k in range(4)], "tflite_int8")
    assert torch.equal(result.device_model(randn(N, D))[0].isinf(), EARLIER[3].expand(N, T))


def test_a_maximum_of_valid_tokens_is_one_of_quantized_values():
    model = model_of(
        lambda m, x, kept: m.out(m.a(x).masked_fill(~kept[..., None], -1e9).amax(1)),
        a=nn.Linear(D, D),
        out=nn.Linear(D, 5),
    )
    batches = [(randn(N, T, D, seed=k), torch.rand(N, T) > 0.5) for k in range(4)]
    result = quantized(model, batches, "tflite_int8")
    assert in_integers(result) and result.verify([batches[0]]).exact
    assert sqnr_db(model(*batches[1]).detach(), result.device_model(*batches[1])) > 30


def test_a_grid_reaches_no_further_than_half_a_step_of_the_softmax_needs():
    """Scores 0 and 1, hidden ones: e^-d < 2^-9 from d = 9 log 2 = 6.24 below 0 on; rows that nobody saw get 2 more."""
    model = model_of(lambda m, x: x.masked_fill(~EARLIER[:4, :4], -math.inf).softmax(-1))
    x = torch.tensor([0.0, 1.0, 0.0, 1.0]).expand(2, 4, 4)
    result = quantized(model, x, "tflite_int8", rule="no_clipping")
    [found] = hidden_scores(result.graph)
    stored = result.plan[found.values[0]]
    assert float(stored.scale) * 255 == pytest.approx(1 + 9 * math.log(2) + 2, rel=0.01)
    assert result.verify(x).exact


def test_a_mask_is_split_into_what_it_keeps_and_a_bias():
    kept, bias = split_mask(torch.tensor([0.0, -0.5, -40.0, -1e9, -math.inf]))
    assert kept.tolist() == [True, True, True, False, False]
    assert bias.tolist() == [0, -0.5, -40, 0, 0]  # beside biases, only what no network computes hides
    assert split_mask(torch.tensor([0.0, -40.0]))[0].tolist() == [True, False]
    assert split_mask(torch.tensor([0.0, -0.5])) is None
