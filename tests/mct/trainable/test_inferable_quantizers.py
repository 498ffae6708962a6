"""Inferable quantizers under MCT's names: worked numbers, zero on the grid, look-up tables, errors."""

from __future__ import annotations

import inspect

import pytest
import torch

from chipfit.errors import ConfigError
from chipfit.trainable_infrastructure import pytorch_inferable_quantizers as iq


def numbers(x):
    return torch.tensor(x, dtype=torch.float32)


def test_halves_are_rounded_to_even():
    q = iq.ActivationSymmetricInferableQuantizer(3, [1.0], signed=True)
    x = [-3, -1.26, -0.5, -0.1, 0.124, 0.125, 0.126, 0.375, 0.625, 0.9, 2]
    assert q(numbers(x)).tolist() == [-1, -1, -0.5, 0, 0, 0, 0.25, 0.5, 0.5, 0.75, 0.75]


def test_uniform_weights_and_activations():
    x = torch.linspace(-12, 6, 97)
    y = iq.WeightsUniformInferableQuantizer(3, [-10.0], [4.0], per_channel=False)(x)
    assert torch.equal(y, torch.clip(torch.round(x / 2), -5, 2) * 2)
    low, high = [-10.0, -3.0, -8.0, 0.0], [4.0, 4.0, 20.0, 7.0]
    per_channel = iq.WeightsUniformInferableQuantizer(3, low, high, per_channel=True, channel_axis=1)
    y = per_channel(x.reshape(-1, 1) * torch.ones(4))
    for c in range(4):
        step = (high[c] - low[c]) / 7
        torch.testing.assert_close(y[:, c], torch.clip(torch.round(x / step), low[c] / step, high[c] / step) * step)
    y = iq.ActivationUniformInferableQuantizer(2, [-10.0], [5.0])(x)
    assert torch.equal(y, torch.clip(torch.round(x / 5), -2, 1) * 5)


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
    assert (*q.min_range, *q.max_range) == pytest.approx(want, abs=1e-6)
    assert q(numbers([0.0])).item() == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: iq.ActivationPOTInferableQuantizer(8, [3], True), r"Expected threshold to be power of 2 but is \[3\]"),
        (lambda: iq.ActivationSymmetricInferableQuantizer(8, 3.0, True), "to be a list"),
        (lambda: iq.WeightsUniformInferableQuantizer(8, [1.0, 1.0], [2.0, 2.0], False), "per tensor"),
    ],
)
def test_invalid_arguments_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


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


@pytest.mark.parametrize("name", iq.CLASSES)
def test_an_inferable_quantizer_is_restored_from_its_configuration(name):
    how = {"num_bits": 3, "threshold": [2.0], "signed": True, "per_channel": False, "lut_values": [-3.0, 0.0, 5.0]}
    how |= {"min_range": [-1.0], "max_range": [2.0]}
    cls = iq.CLASSES[name]
    q = cls(**{k: v for k, v in how.items() if k in inspect.signature(cls).parameters})
    x = torch.randn(100) * 3
    assert torch.equal(cls.from_config(q.get_config())(x), q(x)) and not torch.equal(q(x), x)
    again = iq.inferable_for(q.stored, "weight" if name.startswith("W") else "activation")
    assert type(again) is cls and torch.equal(again(x), q(x))
