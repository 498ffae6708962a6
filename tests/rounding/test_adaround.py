"""Defaults of learned rounding, and its formulas where they bend."""

from __future__ import annotations

import pytest
import torch

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.rounding.adaround import SoftWeight, inverse_sigmoid, output_error, regularizer_exponent


@pytest.mark.parametrize(
    "step, want", [(0, 20), (19, 20), (20, 20), (21, 20 - 18 / 80), (40, 15.5), (80, 6.5), (100, 2)]
)
def test_the_exponent_falls_by_18_in_four_fifths_of_the_steps(step, want):
    assert regularizer_exponent(step, 100) == pytest.approx(want)


def test_errors_of_scores_and_of_single_numbers():
    got, want = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert float(output_error(got, want)) == (1 + 4 + 9 + 16) / 2
    assert float(output_error(got, want, torch.tensor([[1.0, 0.0], [2.0, 0.5]]))) == (1 + 18 + 8) / 2
    assert float(output_error(got[:, 1], want[:, 1])) == (4 + 16) / 2
    assert float(output_error(got[1, 1], want[1, 1])) == 16
    long = torch.zeros(2, 3, 4)
    long[0, 1, 2] = 4.0
    assert float(output_error(long, torch.zeros(2, 3, 4))) == 16 / 4 / 2
    assert float(output_error(long, torch.zeros(2, 3, 4), torch.tensor([[1.0, 3, 5], [7, 9, 11]]))) == 3 * 16 / 4 / 2


def int4(scale=1.0):
    grid = Grid(bits=4, qmin=-8, qmax=7)
    return Stored(format="w4", grid=grid, scale=torch.tensor(scale), zero_point=torch.tensor(0, dtype=torch.int32))


def test_a_weight_lies_between_its_code_and_the_one_on_its_other_side():
    wanted = torch.tensor([1.25, 1.75, 2.0, -0.25, 9.0, -11.0, 6.75, -7.75])
    soft = SoftWeight(int4(), wanted, wanted)
    assert soft.low.tolist() == [1, 1, 2, -1, 7, -8, 6, -8] and soft.high.tolist() == [2, 2, 3, 0, 7, -8, 7, -7]
    assert soft.hard().tolist() == [1, 2, 2, 0, 7, -8, 7, -8]
    torch.testing.assert_close(soft.share().detach()[[0, 1, 3, 6, 7]], torch.tensor([0.25, 0.75, 0.75, 0.75, 0.25]))
    torch.testing.assert_close(soft.soft().detach(), wanted.clamp(-8, 7), atol=2e-6, rtol=0)
    assert soft.v.requires_grad and soft.v.is_leaf


def test_the_code_to_start_from_has_the_larger_share_however_little():
    """Both 2 and 3 for 2.5, and 2 for 2.9 where it starts from there."""
    soft = SoftWeight(int4(), torch.tensor([2.5, 2.5, 2.9, 2.1]), torch.tensor([2.0, 3.0, 2.0, 3.0]))
    share = soft.share().detach() - 0.5
    assert bool(((share.abs() > 1e-7) & (share.abs() < 1e-5)).all()) and soft.hard().tolist() == [2, 3, 2, 3]
    with torch.no_grad():
        soft.v.zero_()
    assert soft.hard().tolist() == [3, 3, 3, 3]  # the upper one from a half on


def test_the_least_magnitude_that_gives_an_end_is_the_logarithm_of_eleven():
    torch.testing.assert_close(
        inverse_sigmoid(torch.tensor([0.0, 0.5, 1.0])), torch.tensor([-1.0, 0.0, 1.0]) * torch.log(torch.tensor(11.0))
    )


def test_a_table_has_as_many_codes_as_entries():
    table = (-3.0, -1.0, 0.0, 2.0)
    stored = int4(0.5).with_(grid=Grid(bits=8, qmin=-128, qmax=127, kind="lut", table=table))
    wanted = torch.tensor([-9.0, -0.9, 0.8, 7.0])
    soft = SoftWeight(stored, wanted, wanted)
    assert soft.low.tolist() == [-1.5, -1.5, 0, 1] and soft.high.tolist() == [-1.5, -0.5, 1, 1]
    assert soft.hard().tolist() == [-1.5, -0.5, 1, 1]


def test_a_weight_on_an_end_of_its_grid_can_be_learned():
    wanted = torch.tensor([7.0, -8.0])
    soft = SoftWeight(int4(), wanted, wanted)
    assert soft.hard().tolist() == soft.soft().tolist() == [7, -8] and bool(soft.v.isfinite().all())
