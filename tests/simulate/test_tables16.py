"""Sixteen-bit functions against the functions themselves: their lines and tables are within two codes of them."""

import pytest
import torch

from chipfit.simulate.tables16 import apply, in_12288ths, softmax


def test_a_multiplier_has_as_many_bits_as_fit():
    """By the rule of TensorFlow Lite: doubled while it is at most 32767 / 2, so 16383.25 becomes 32766.5."""
    q = torch.tensor([12288, -5, 40000])
    assert in_12288ths(q, torch.tensor(16383.25 / 12288, dtype=torch.float64), ()).tolist() == [
        (v * 32766 + 1) >> 1 for v in q.tolist()
    ]


def test_a_multiplier_is_doubled_31_times_at_most():
    """1.6 * 2^-31 becomes 1.6, and of that the whole part is taken; once more would be 3.2."""
    real = torch.tensor(1.6 * 2.0**-31 / 12288, dtype=torch.float64)
    assert in_12288ths(torch.tensor([1 << 40]), real, ()).tolist() == [1 << 9]


@pytest.mark.parametrize("scale", [2.0**-12, 1e-4, 3e-4, 1e-3])
@pytest.mark.parametrize("shape", [(2, 3, 7), (5, 1), (1, 300)])
def test_a_softmax_is_the_function_within_the_error_of_its_tables(scale, shape):
    q = torch.randint(-32768, 32768, shape, generator=torch.Generator().manual_seed(0))
    want = (32768 * (q.double() * scale).softmax(-1)).clamp_max(32767)
    assert float((softmax(q, torch.tensor(scale)) - want).abs().max()) <= 22  # exponentials end at exp(-10)


def test_a_softmax_of_equal_numbers_is_their_share():
    for count in (1, 2, 4, 256):
        got = softmax(torch.full((2, count), 77), torch.tensor(1e-3)).unique().tolist()
        assert len(got) == 1 and abs(got[0] - min(32768 // count, 32767)) <= 1


@pytest.mark.parametrize(
    "f, scale, result, most", [(torch.exp, 1e-4, 26.5 / 32768, 4.0), (torch.tanh, 1e-4, 1 / 32768, 3.0)]
)
def test_a_function_by_a_table_of_512_lines(f, scale, result, most):
    q = torch.arange(-32768, 32768, 13)
    got = apply(f, q, torch.tensor(scale), torch.tensor(result))
    want = (f(q.double() * scale) / result).clamp(-32768, 32767)
    assert float((got - want).abs().max()) <= most
    straight = apply(lambda x: x, q, torch.tensor(scale), torch.tensor(scale))
    assert float((straight - q).abs().max()) <= 1
