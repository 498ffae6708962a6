"""Inferable quantizers under MCT's names: worked numbers; their grids: tests/quantizers/test_inferable.py."""

import numpy as np
import pytest
import torch

from chipfit.trainable_infrastructure import pytorch_inferable_quantizers as iq


def numbers(x):
    return torch.tensor(x, dtype=torch.float32)


def test_halves_are_rounded_to_even():
    q = iq.ActivationSymmetricInferableQuantizer(3, [1.0], signed=True)
    x = [-3, -1.26, -0.5, -0.1, 0.124, 0.125, 0.126, 0.375, 0.625, 0.9, 2]
    assert q(numbers(x)).tolist() == [-1, -1, -0.5, 0, 0, 0, 0.25, 0.5, 0.5, 0.75, 0.75]


@pytest.mark.parametrize(
    ("low", "high", "bits", "want"),
    [
        (-1, 1, 2, (-4 / 3, 2 / 3)),
        (-1, 2, 3, (-0.857143, 2.142857)),
        (0.5, 2, 4, (0, 2)),
        (-2, -0.5, 4, (-2, 0)),
        (-0.1, 1, 4, (-0.073333, 1.026667)),
        (-1.3, 2.6, 8, (-1.3, 2.6)),
    ],
)
def test_ranges_move_so_that_zero_is_on_the_grid(low, high, bits, want):
    q = iq.ActivationUniformInferableQuantizer(bits, [low], [high])
    assert (q.min_range, q.max_range) == pytest.approx(want, abs=1e-6)  # numbers, as in mct_quantizers for PyTorch
    assert np.allclose([*q.get_config()["min_range"], *q.adjusted_max_range_np], want, atol=1e-6)
    assert q(numbers([0.0])).item() == 0


def test_look_up_tables():
    x = torch.randn(20, 3) * 4
    y = iq.WeightsLUTPOTInferableQuantizer(4, [-25.0, 25.0], [4.0], per_channel=False)(x)
    assert set(y.unique().tolist()) == {-25 / 128 * 4, 25 / 128 * 4}
    q = iq.ActivationLutPOTInferableQuantizer(3, [-8.0, 0.0, 4.0], [16.0], signed=True)
    assert q(numbers([-9, -5, -1, 0, 2, 9])).tolist() == [-1, -1, -1, 0, 0.5, 0.5]
    q = iq.ActivationLutPOTInferableQuantizer(1, [0.0, 256.0], [8.0], signed=False)
    assert q(numbers([-1, 0, 3.9, 4, 4.1, 30])).tolist() == [0, 0, 0, 0, 8, 8]
    q = iq.ActivationLutPOTInferableQuantizer(2, [-128.0, -32.0, 32.0, 127.0], [4.0], signed=True)
    assert q(numbers([-4, -1, 1, 3.99])).tolist() == [-4, -1, 1, 127 / 32]
