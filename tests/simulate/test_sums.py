"""Sums of products in 8-bit integers, beside numpy's in 64 bits; and a simulation that takes over what stays."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.simulate import sums
from chipfit.simulate.integer import simulate
from tests.build import model_of, quantized, sequential

RANDOM = np.random.default_rng(0)
ZERO = torch.zeros((), dtype=torch.int32)


def codes(kind, *shape, ends=False):
    """Codes of an 8-bit type; at `ends`, its least and greatest alone, which make the largest sums."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    x = RANDOM.choice([low, high], shape) if ends else RANDOM.integers(low, high + 1, shape)
    return torch.from_numpy(x.astype(kind))


@pytest.mark.parametrize("kind, zero", [("uint8", 0), ("uint8", 128), ("uint8", 255), ("int8", -128), ("int8", 5)])
@pytest.mark.parametrize("ends", [False, True])
def test_products_of_rows_are_exact(kind, zero, ends):
    for shape, rows in itertools.product([(1,), (3, 7), (2, 5, 1024)], [1, 6]):
        x, w = codes(kind, *shape, ends=ends), codes("int8", rows, shape[-1], ends=ends)
        want = (x.numpy().astype(np.int64) - zero) @ w.numpy().astype(np.int64).T
        got = sums.multiplied(x, torch.tensor(zero), w)
        assert got.dtype == torch.int32 and np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_rows_may_have_zero_points_of_their_own(kind):
    x, w, zero = codes(kind, 2, 5, 64, ends=True), codes("int8", 6, 64, ends=True), codes(kind, 2, 5, 1)
    want = (x.numpy().astype(np.int64) - zero.numpy()) @ w.numpy().astype(np.int64).T
    assert sums.fits(x, zero, w, ZERO) and not sums.fits(x, zero[..., 0], w, ZERO)
    for given in (zero, zero.float()):
        assert np.array_equal(sums.multiplied(x, given, w).numpy(), want)


@pytest.mark.parametrize(
    "size, kernel, how",
    [
        ((7,), (3,), {"stride": (2,), "padding": ((1, 0),), "dilation": (1,)}),
        ((9, 6), (3, 2), {"stride": (2, 1), "padding": ((2, 1), (0, 3)), "dilation": (1, 2)}),
        ((5, 4), (1, 1), {"stride": (1, 3), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}),
        ((4, 5, 6), (2, 3, 1), {"stride": (1, 2, 1), "padding": ((1, 1), (0, 2), (0, 0)), "dilation": (2, 1, 1)}),
    ],
)
@pytest.mark.parametrize("kind, zero", [("uint8", 37), ("int8", -11)])
def test_convolutions_are_exact_with_the_zero_point_around_them(kind, zero, size, kernel, how):
    x, w = codes(kind, 2, 3, *size), codes("int8", 4, 3, *kernel)
    around = F.pad(x.double() - zero, [p for pair in reversed(how["padding"]) for p in pair])
    want = getattr(F, f"conv{len(size)}d")(around, w.double(), stride=how["stride"], dilation=how["dilation"])
    assert torch.equal(sums.convolved(x, torch.tensor(zero), w, groups=1, **how).double(), want)
    w = codes("int8", 3, 1, *kernel)  # a kernel for each channel
    want = getattr(F, f"conv{len(size)}d")(around, w.double(), stride=how["stride"], dilation=how["dilation"], groups=3)
    assert torch.equal(sums.convolved(x, torch.tensor(zero), w, groups=3, **how).double(), want)


def test_sums_in_float_hold_512_products():
    x, plain = codes("uint8", 1, 2, 600, ends=True), {"stride": (1,), "padding": ((0, 0),), "dilation": (1,)}
    x[0, 0], w = 255, torch.full((2, 1, 512), -128, dtype=torch.int8)
    found = sums.convolved(x, ZERO, w, groups=2, **plain)
    assert torch.equal(found.double(), F.conv1d(x.double(), w.double(), groups=2))
    assert float(found.min()) == -512 * 255 * 128
    assert sums.convolved(x, ZERO, codes("int8", 2, 1, 513), groups=2, **plain) is None
    assert sums.convolved(x, ZERO, codes("int8", 4, 1, 3), groups=2, **plain) is None  # two kernels for each channel
    assert sums.convolved(codes("uint8", 1, 4, 9), ZERO, codes("int8", 2, 2, 3), groups=2, **plain) is None


def test_what_does_not_fit_is_left_to_float64(monkeypatch):
    x, w = codes("uint8", 2, 8), codes("int8", 3, 8)
    assert sums.fits(x, ZERO, w, ZERO)
    assert not sums.fits(x.to(torch.int32), ZERO, w, ZERO) and not sums.fits(x, ZERO, w.to(torch.int32), ZERO)
    assert not sums.fits(x, ZERO, w, ZERO + 1) and not sums.fits(x, ZERO.expand(8), w, ZERO)
    assert not sums.fits(x[:0], ZERO, w, ZERO) and not sums.fits(x.to("meta"), ZERO, w, ZERO)
    least = torch.zeros(1, 1, dtype=torch.int8)
    assert sums.fits(x, ZERO, least.expand(1, (1 << 16) - 1), ZERO)
    assert not sums.fits(x, ZERO, least.expand(1, 1 << 16), ZERO)
    monkeypatch.delattr(torch, "_int_mm")
    assert not sums.fits(x, ZERO, w, ZERO)


def saturating(a, b):
    """Pairs of products in 16 bits, of codes without a sign, as processors without VNNI have them."""
    pairs = ((a.int() + 128).unsqueeze(-1) * b.int()).reshape(len(a), -1, 2, b.shape[1]).sum(2)
    return (pairs.clamp(-(1 << 15), (1 << 15) - 1).sum(1) - 128 * b.int().sum(0)).int()


def pair_sums(x, w):
    """Sums over K of rows of codes without a sign, [rows, O], each pair of products saturated to 16 bits."""
    x, w = (np.pad(v.astype(int), ((0, 0), (0, v.shape[1] % 2))) for v in (x, w))
    wide = x[:, None] * w
    return wide.reshape(*wide.shape[:2], -1, 2).sum(-1).clip(-(1 << 15), (1 << 15) - 1).sum(-1)


@pytest.mark.parametrize("k", [1, 2, 7, 64])
def test_pairs_of_products_saturate_as_in_16_bits(k):
    x, w = codes("uint8", 5, k, ends=True), codes("int8", 6, k, ends=True)
    exact, want = x.numpy().astype(int) @ w.numpy().astype(int).T, pair_sums(x.numpy(), w.numpy())
    lost = sums.lost_in_pairs(x, w)
    assert (want == exact).all() if lost is None else np.array_equal(exact + lost.numpy(), want)
    assert (lost is None) == (k < 2)
    assert sums.lost_in_pairs(x.to(torch.int8), w) is None and sums.lost_in_pairs(x, w // 2) is None


@pytest.mark.parametrize("groups", [1, 2])
def test_neighbours_of_a_convolution_lie_by_position_then_by_channel(groups):
    x, w = codes("uint8", 2, 6, 5, 4, ends=True), codes("int8", 4, 6 // groups, 3, 2, ends=True)
    how = {"stride": (2, 1), "padding": ((1, 0), (0, 1)), "dilation": (1, 2), "groups": groups}
    lies = np.pad(x.numpy(), ((0, 0), (0, 0), (1, 0), (0, 1)), constant_values=3)
    want = torch.zeros(2, 4, 2, 3, dtype=torch.int32)
    for n, o, i, j in np.ndindex(*want.shape):
        g = o // (4 // groups) * (6 // groups)
        seen = lies[n, g : g + 6 // groups, 2 * i : 2 * i + 3, j : j + 3 : 2].transpose(1, 2, 0).reshape(1, -1)
        rows = w[o].numpy().transpose(1, 2, 0).reshape(1, -1)
        want[n, o, i, j] = int((pair_sums(seen, rows) - seen.astype(int) @ rows.astype(int).T)[0, 0])
    assert want.any() and torch.equal(sums.lost_in_windows(x, ZERO + 3, w, **how), want)
    alone, several = w[:, :1].repeat(2, 1, 1, 1)[:6], w[:, :1].repeat(3, 1, 1, 1)
    assert sums.lost_in_windows(x, ZERO, alone, **how | {"groups": 6}) is None
    assert sums.lost_in_windows(x[:, :1], ZERO, alone[:1], **how | {"groups": 1}) is None
    assert sums.lost_in_windows(x, ZERO, several, **how | {"groups": 6}) is not None


def elsewhere(a, b):
    """One number of many is another one."""
    acc = torch.tensor(a.numpy().astype(np.int32) @ b.numpy().astype(np.int32))
    acc[0, -1] += 1
    return acc


@pytest.mark.parametrize("wrong", [saturating, elsewhere])
def test_wrong_sums_are_noticed_and_taken_in_float64(wrong, monkeypatch):
    x, w = codes("uint8", 3, 64, ends=True), codes("int8", 6, 64, ends=True)
    want = x.double() @ w.double().t()
    assert not torch.equal(wrong((x.int() - 128).to(torch.int8), w.t()).double() + 128 * w.double().sum(1), want)
    monkeypatch.setattr(torch, "_int_mm", wrong)
    assert torch.equal(sums.multiplied(x, ZERO, w).double(), want)


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
def test_results_are_those_of_float64(platform, monkeypatch):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(72, 5)
    result, x = quantized(sequential(*layers), torch.randn(4, 3, 9, 9), platform), torch.randn(6, 3, 9, 9)
    fast = result.device_model(x)
    called = []
    monkeypatch.setattr(sums, "fits", lambda *a: bool(called.append(a)))
    assert torch.equal(result.device_model(x), fast) and len(called) == 3


def test_of_the_reals_behind_codes_that_the_device_gives_nothing_is_known():
    """A residual stream that one operator reads in codes and the next in float, and a device whose codes of it stay."""

    def residual(m, x):
        x = m.norm(m.a(x))
        return x + m.b(x)

    torch.manual_seed(0)
    net = model_of(residual, a=nn.Linear(8, 8), b=nn.Linear(8, 8), norm=nn.LayerNorm(8))
    result = quantized(net, torch.randn(16, 8))
    graph, plan, x = result.graph, result.plan, torch.randn(5, 8)
    read, total = graph.nodes[1].output, graph.nodes[-1]
    assert total.op == "Add" and (read, total.name) in plan.float_edges
    args = graph, plan, [x], result.platform
    reals: dict = {}
    first = simulate(*args, floats=reals)
    device = {v: q.clone() for v, q in first.items() if plan.quantized(v)}
    device[graph.inputs[0]][0, 0] ^= 1
    some = simulate(*args, force=device, like=first, floats=reals)
    whole = simulate(*args, force=device)
    assert torch.equal(device[read], first[read]) and torch.equal(some[total.output], whole[total.output])
    assert not torch.equal(whole[total.output], first[total.output])
