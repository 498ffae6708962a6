"""Sixteen-bit functions against the functions themselves: their lines and tables are within two codes of them."""

from __future__ import annotations

import pytest
import torch

from chipfit.simulate.tables16 import _thirds, sigmoid, tanh

CODES = torch.cat([torch.arange(-300, 301), torch.arange(-32768, 32768, 97), torch.tensor([32767])])


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**-13, 2.0**-11, 2.0**-10, 1 / 12288, 3e-4, 7.7e-5, 2.6e-3])
@pytest.mark.parametrize("name, function", [("sigmoid", torch.sigmoid), ("tanh", torch.tanh)])
def test_a_code_is_the_functions_own_within_the_error_of_the_table(name, function, scale):
    """A line between entries 1/24 apart misses a sigmoid by (1/24)^2 / 8 max|f''| = 2.1e-5, two thirds of a code."""
    got = {"sigmoid": sigmoid, "tanh": tanh}[name](CODES, torch.tensor(scale))
    off = got.double() - 32768 * function(CODES.double() * scale)
    assert float(off.abs().max()) <= 3


@pytest.mark.parametrize("scale", [1 / 12288, 2.0**-12, 7.7e-5])
def test_next_to_zero_a_sigmoid_rounds_to_the_nearest_code(scale):
    """32768 sigmoid(x) is 16384 + 8192 x there: 16383.33 and 16384.67 one step of 1 / 12288 away from zero."""
    q = torch.tensor([-2, -1, 0, 1, 2])
    want = torch.round(32768 * torch.sigmoid(q.double() * scale))
    assert sigmoid(q, torch.tensor(scale)).tolist() == want.tolist()


def test_a_multiplier_has_as_many_bits_as_fit():
    """By the rule of TensorFlow Lite: doubled while it is at most 32767 / 2, so 16383.25 becomes 32766.5."""
    q = torch.tensor([12288, -5, 40000])
    assert _thirds(q, torch.tensor(16383.25 / 12288, dtype=torch.float64), ()).tolist() == [
        (v * 32766 + 1) >> 1 for v in q.tolist()
    ]


@pytest.mark.parametrize("scale", [1 / 12288, 2.0**-12, 3e-4])
def test_a_tanh_is_odd_within_a_code(scale):
    q = torch.arange(1, 2000, 7)
    a, b = (tanh(s * q, torch.tensor(scale)) for s in (1, -1))
    assert int((a + b).abs().max()) <= 1
