"""Observers compute what those of MQBench computed, by its numbered list."""

from __future__ import annotations

import pytest
import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.platform.schema import Format
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.ranges import choose
from chipfit.ranges.qparams import from_min_max

Z = torch.tensor(0)
S4, S8 = Grid(bits=4, qmin=-8, qmax=7), Grid(bits=8, qmin=-127, qmax=127)
A4, A8 = Grid(bits=4, qmin=0, qmax=15, zero="any"), Grid(bits=8, qmin=0, qmax=255, zero="any")


def seen(*batches):
    stats = TensorStats("x")
    for b in batches:
        stats.update(torch.as_tensor(b), Need())
    return stats


@pytest.mark.parametrize(
    "words, codes",
    [
        ({"bits": 4}, (-8, 7)),
        ({"bits": 4, "signed": False}, (0, 15)),
        ({"bits": 8, "range": "narrow"}, (-127, 127)),
        ({"bits": 16, "signed": False, "zero": "any"}, (0, 65535)),
    ],
)
def test_1_codes_of_a_format(words, codes):
    g = Format(**words).grid()
    assert (g.qmin, g.qmax) == codes


def test_2_a_symmetric_scale_is_the_least_that_holds_the_data():
    """[-3, 1.5] in 4 bits: 3/8; the codes -127..127 need 3/127."""
    assert float(from_min_max(-3.0, 1.5, S4).scale) == 3 / 8
    assert float(from_min_max(-3.0, 1.5, S8).scale) == pytest.approx(3 / 127)


@pytest.mark.parametrize("low, high, scale, zero", [(-1.0, 3.0, 4 / 255, 64), (1.0, 3.0, 3 / 255, 0)])
def test_3_an_affine_range_is_widened_to_hold_zero(low, high, scale, zero):
    q = from_min_max(low, high, A8)
    assert float(q.scale) == pytest.approx(scale) and int(q.zero_point) == zero


@pytest.mark.parametrize("grid", [S4, S8, A4, A8], ids=lambda g: f"{g.bits}{g.zero}")
@pytest.mark.parametrize("seed", range(4))
def test_4_5_rounding_keeps_zero_repeats_itself_ascends_and_errs_half_a_step(grid, seed):
    x = torch.randn(500, generator=torch.Generator().manual_seed(seed)).sort().values * 3 + seed
    q = choose(x, grid, rule="no_clipping")
    y = fake_quantize(x, q.scale, q.zero_point, grid)
    assert torch.equal(fake_quantize(y, q.scale, q.zero_point, grid), y)
    assert bool((y.diff() >= 0).all()) and len(y.unique()) <= grid.levels
    assert float((x - y).abs().max()) <= float(q.scale) * 0.5001
    assert float(fake_quantize(torch.tensor(0.0), q.scale, q.zero_point, grid)) == 0


@pytest.mark.parametrize("rule", ["no_clipping", "mse", "std", "smooth_min_max"])
def test_6_equal_channels_get_the_scale_of_the_tensor_and_permuted_ones_permuted_scales(rule):
    row = torch.randn(50, generator=torch.Generator().manual_seed(3))
    assert (
        choose(row.expand(4, 50), S8, rule=rule, axis=0).scale.tolist() == [float(choose(row, S8, rule=rule).scale)] * 4
    )
    w, order = torch.randn(6, 40) * torch.arange(1, 7).view(-1, 1), torch.randperm(6)
    q = choose(w, S8, rule=rule, axis=0)
    assert torch.equal(choose(w[order], S8, rule=rule, axis=0).scale, q.scale[order])
    assert torch.allclose(choose(w.T.contiguous(), S8, rule=rule, axis=1).scale, q.scale)


def test_7_codes_without_sign_reach_twice_as_far():
    auto = Format(bits=4, signed="auto")
    assert float(from_min_max(0.0, 3.0, auto.grid(signed=False)).scale) == pytest.approx(3 / 15)
    assert auto.grid(signed=True).qmin == -8


@pytest.mark.parametrize("scale", [0.3, 0.7, 1.4142, 2.0])
def test_8_powers_of_two_stay_what_they_are_and_never_clip(scale):
    grid = Grid(bits=8, qmin=0, qmax=255, pot=True)
    q = from_min_max(0.0, scale * 255, grid)
    assert (
        float(torch.log2(q.scale)) == round(float(torch.log2(q.scale))) and scale <= float(q.scale) < 2 * scale * 1.0001
    )
    assert float(from_min_max(0.0, float(q.scale) * 255, grid).scale) == float(q.scale)


def test_9_moving_averages_of_the_extremes():
    """0.9 (-1, 1) + 0.1 (-2, 3) = (-1.1, 1.2)."""
    q = choose(seen([-1.0, 1.0], [-2.0, 3.0]), A8, rule="smooth_min_max")
    assert q.bounds(A8) == pytest.approx((-1.1, 1.2), abs=2.3 / 255)


def test_10_a_percentile_drops_the_one_outlier():
    stats = seen(torch.cat([torch.linspace(0, 1, 99), torch.tensor([10.0])]))
    low, high = choose(stats, A8, rule="percentile", share=0.9).bounds(A8)
    assert low == 0 and 0.85 <= high <= 1.0


def test_11_standard_deviations_clip_inside_the_data():
    """[0, 0, 0, 10]: mean 2.5, deviation 5, so 2.6 of them reach past both extremes; of 100 values one at 10 is cut."""
    assert choose(seen([0.0, 0.0, 0.0, 10.0]), A8, rule="std").bounds(A8) == pytest.approx((0, 10), rel=1e-3)
    many = torch.zeros(100)
    many[0] = 10.0
    assert choose(many, A8, rule="std").bounds(A8)[1] == pytest.approx(0.1 + 2.6 * float(many.std()), rel=1e-3)


def test_12_squared_error_clips_a_normal_tensor_in_four_bits():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    full, best = choose(x, S4, rule="no_clipping"), choose(x, S4, rule="mse")
    errors = [float((x - fake_quantize(x, q.scale, q.zero_point, S4)).square().mean()) for q in (full, best)]
    assert errors[1] < errors[0] and 2.3 < float(best.scale) * 7.5 < 2.9
