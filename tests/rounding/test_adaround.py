"""Weights between two quantized values, on paper; (n) is the number of an assertion that users of MCT know."""

import math

import pytest
import torch

from chipfit.rounding.adaround import (
    SoftWeight,
    inverse_sigmoid,
    output_error,
    rectified_sigmoid,
    regularizer,
    regularizer_exponent,
)
from tests.build import grid, stored


def test_the_rectified_sigmoid_ends_at_the_logarithm_of_eleven():
    v = torch.tensor([-9, -math.log(11), -math.log(2), 0, math.log(2), math.log(11), 9])
    h = torch.tensor([0, 0, 0.3, 0.5, 0.7, 1, 1])  # 1.2 / 3 - 0.1 = 0.3 at -ln 2
    torch.testing.assert_close(rectified_sigmoid(v), h, atol=1e-6, rtol=0)
    torch.testing.assert_close(inverse_sigmoid(h[1:-1]), v[1:-1], atol=1e-6, rtol=0)


def test_37_the_exponent_is_held_for_a_fifth_of_the_steps_and_then_falls_linearly():
    found = [regularizer_exponent(s, 100) for s in (0, 19, 20, 21, 40, 60, 80, 100)]
    assert found == pytest.approx([20, 20, 20, 20 - 18 / 80, 15.5, 11, 6.5, 2])


def test_37_the_regularizer_is_0_at_the_ends_and_greatest_midway():
    assert float(regularizer(torch.tensor([0.0, 1.0]), 7)) == 0
    assert [float(regularizer(torch.tensor([h]), 2)) for h in (0.25, 0.5, 0.9)] == pytest.approx([0.75, 1, 0.36])


def test_38_the_error_is_summed_over_channels_and_averaged_over_all_other_axes():
    got, want = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert float(output_error(got, want)) == (1 + 4 + 9 + 16) / 2
    assert float(output_error(got, want, torch.tensor([[1.0, 0.0], [2.0, 0.5]]))) == (1 + 18 + 8) / 2
    assert float(output_error(got[:, 1], want[:, 1])) == (4 + 16) / 2
    assert float(output_error(got[1, 1], want[1, 1])) == 16
    image = torch.zeros(2, 3, 4)
    image[0, 1, 2] = 4.0
    assert float(output_error(image, torch.zeros(2, 3, 4))) == 16 / 4 / 2
    assert float(output_error(image, torch.zeros(2, 3, 4), torch.tensor([[1.0, 3, 5], [7, 9, 11]]))) == 3 * 16 / 4 / 2


@torch.no_grad()
@pytest.mark.parametrize("scale, most", [(0.25, 5e-7), (0.01, 2e-8)])
def test_36_soft_weights_start_as_the_float_ones_and_hard_ones_as_the_nearest(scale, most):
    w = scale * torch.linspace(-3.96, 2.96, 1001)  # inside the range, codes of -4 to 3
    soft = SoftWeight(stored(scale, bits=3), w, w)
    assert float((soft.soft() - w).abs().max()) <= most
    ties = (w / scale % 1 - 0.5).abs() < 1e-5
    assert torch.equal(soft.hard()[~ties], stored(scale, bits=3).round(w)[~ties]) and int(ties.sum()) < 10


def test_a_weight_lies_between_its_quantized_value_and_the_one_on_its_other_side():
    wanted = torch.tensor([1.25, 1.75, 2.0, -0.25, 9.0, -11.0, 6.75, -7.75, 7.0, -8.0])
    soft = SoftWeight(stored(1.0, bits=4), wanted, wanted)
    assert soft.low.tolist() == [1, 1, 2, -1, 7, -8, 6, -8, 7, -8]
    assert soft.high.tolist() == [2, 2, 3, 0, 7, -8, 7, -7, 7, -7]
    assert soft.hard().tolist() == [1, 2, 2, 0, 7, -8, 7, -8, 7, -8]
    torch.testing.assert_close(soft.share().detach()[[0, 1, 3, 6, 7]], torch.tensor([0.25, 0.75, 0.75, 0.75, 0.25]))
    torch.testing.assert_close(soft.soft().detach(), wanted.clamp(-8, 7), atol=2e-6, rtol=0)
    assert soft.v.requires_grad and soft.v.is_leaf and bool(soft.v.isfinite().all())


def test_other_values_to_start_from_stay_until_something_is_learned():
    w = torch.tensor([0.1, 0.1, 0.1, -0.3, 9.0])
    start = torch.tensor([0.0, 0.25, 0.5, -0.5, 0.75])  # the third is more than a step away, the last at the end
    soft = SoftWeight(stored(0.25, bits=3), w, start)
    assert torch.equal(soft.hard(), start)
    assert soft.low.tolist() == [0, 0, 0.25, -0.5, 0.75] and soft.high.tolist() == [0.25, 0.25, 0.5, -0.25, 0.75]


def test_the_value_to_start_from_has_the_larger_share_however_little():
    """Both 2 and 3 for 2.5, and 2 for 2.9 where it starts from there."""
    soft = SoftWeight(stored(1.0, bits=4), torch.tensor([2.5, 2.5, 2.9, 2.1]), torch.tensor([2.0, 3.0, 2.0, 3.0]))
    share = soft.share().detach() - 0.5
    assert bool(((share.abs() > 1e-7) & (share.abs() < 1e-5)).all()) and soft.hard().tolist() == [2, 3, 2, 3]
    with torch.no_grad():
        soft.v.zero_()
    assert soft.hard().tolist() == [3, 3, 3, 3]  # the upper one from a half on


def test_tables_have_as_many_values_as_entries():
    table = stored(0.5, on=grid(8, kind="lut", table=(-3.0, -1.0, 0.0, 2.0)))
    wanted = torch.tensor([-9.0, -0.9, 0.8, 7.0])
    soft = SoftWeight(table, wanted, wanted)
    assert soft.low.tolist() == [-1.5, -1.5, 0, 1] and soft.high.tolist() == [-1.5, -0.5, 1, 1]
    assert soft.hard().tolist() == [-1.5, -0.5, 1, 1]


def test_zero_points_move_the_range():
    w, s = torch.tensor([-0.35, 0.05, 0.2, 9.0]), stored(0.5, bits=3, zero=2)
    soft = SoftWeight(s, w, w)
    assert soft.low.tolist() == [-0.5, 0, 0, 0.5] and soft.high.tolist() == [0, 0.5, 0.5, 0.5]
    assert torch.equal(soft.hard(), s.round(w))
