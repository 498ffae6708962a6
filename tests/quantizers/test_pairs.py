"""Weights bounded in pairs of neighbours, in the layouts of PyTorch and Keras."""

import itertools

import numpy as np
import pytest
import torch

from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.pairs import bounded, bounded_codes, output_axes, scale_for_pairs, sums_of_pairs
from tests.build import grid, stored


def by_loops(rows, limit):
    """Half of the excess from each of a pair of one sign, the odd unit from the larger."""
    out = rows.copy()
    for row, j in itertools.product(out, range(0, rows.shape[1] // 2 * 2, 2)):
        a, b = row[j], row[j + 1]
        over = abs(a) + abs(b) - limit
        if a * b > 0 and over > 0:
            of_a = -(-over // 2) if abs(a) >= abs(b) else over // 2
            row[j], row[j + 1] = np.sign(a) * (abs(a) - of_a), np.sign(b) * (abs(b) - (over - of_a))
    return out


def codes(*shape):
    return np.random.default_rng(0).integers(-127, 128, shape)


@pytest.mark.parametrize("shape", [(6, 9), (6, 4), (5, 1), (4, 3, 5), (4, 6, 3, 3), (2, 3, 2, 2, 2)])
def test_weights_of_pytorch_and_of_keras_have_the_same_neighbours(shape):
    """Neighbours in [O, I, *kernel] and in [*kernel, I, O] follow by position in the kernel, then by input channel."""
    q = codes(*shape)
    rows = by_loops(np.moveaxis(q, 1, -1).reshape(len(q), -1), 128)
    want = np.moveaxis(rows.reshape(len(q), *shape[2:], shape[1]), -1, 1)
    assert np.array_equal(bounded(TorchOps, torch.tensor(q).double(), 128, 0).numpy(), want)
    keras = np.moveaxis(np.moveaxis(q, 1, -1), 0, -1)
    got = bounded(TorchOps, torch.tensor(keras).double(), 128, output_axes([*[1] * (len(shape) - 1), shape[0]]))
    assert np.array_equal(got.numpy(), np.moveaxis(np.moveaxis(want, 1, -1), 0, -1))


def test_neighbours_of_a_right_operand_are_rows_of_each_matrix():
    q = codes(2, 5, 4)
    want = np.stack([by_loops(m.T, 100).T for m in q])
    assert np.array_equal(bounded(TorchOps, torch.tensor(q).double(), 100, None).numpy(), want)


def test_a_depthwise_kernel_of_keras_has_several_axes_of_outputs():
    q = codes(3, 3, 4, 2)
    rows = by_loops(np.transpose(q, (2, 3, 0, 1)).reshape(8, 9), 128)
    assert output_axes((1, 1, 4, 2)) == (2, 3) and output_axes((1, 1, 1, 1)) == 3 and output_axes(()) is None
    got = bounded(TorchOps, torch.tensor(q).double(), 128, (2, 3))
    assert np.array_equal(got.numpy(), rows.reshape(4, 2, 3, 3).transpose(2, 3, 0, 1))


def test_a_second_bound_changes_nothing_and_no_pair_is_beyond_it():
    every = torch.tensor(list(itertools.product(range(-127, 128), repeat=2))).double()
    once = bounded(TorchOps, every, 128, 0)
    assert torch.equal(bounded(TorchOps, once, 128, 0), once) and float(sums_of_pairs(once).max()) == 128
    assert float((once - every).abs().max()) == 63 and bool((once * every >= 0).all())


@pytest.mark.parametrize(
    ("shape", "outputs"), [((6, 9), 0), ((4, 5, 3, 3), 0), ((2, 5, 4), None), ((3, 3, 4, 2), (2, 3))]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_integers_move_as_their_floats_do(shape, outputs, dtype):
    q = torch.tensor(codes(*shape))
    got = bounded_codes(q.to(dtype), 100, outputs)
    assert got.dtype == dtype and torch.equal(got.double(), bounded(TorchOps, q.double(), 100, outputs))
    assert not torch.equal(got, q) and torch.equal(q, torch.tensor(codes(*shape)))
    few = (q // 3).to(dtype)
    assert torch.equal(bounded_codes(few, 100, outputs), few)


def limited(per="channel"):
    return grid(8, low=-127, zero=0, per=per, pair_limit=128)


@pytest.mark.parametrize(("per_channel", "count"), [(True, 300), (False, 300), (True, 5003), (False, 5003)])
def test_the_scale_is_the_one_with_the_least_error(per_channel, count):
    w = torch.randn(6, count, generator=torch.Generator().manual_seed(0))
    w = w if per_channel else w.t().contiguous()
    axis = 0 if per_channel else None
    start = w.abs().amax(1) / 127 if per_channel else w.abs().max() / 127
    on = limited("channel" if per_channel else "tensor")
    scale = scale_for_pairs(w, start, on, axis)

    def error(s):
        q = stored(s, axis=axis, on=on).round(w)
        return (q - w).square().sum(1) if per_channel else (q - w).square().sum()

    tried = torch.stack([error(start * f) for f in np.linspace(1, 1.6, 61)])
    assert bool((scale >= start).all()) and bool((error(scale) < 1.1 * tried.amin(0)).all())
    assert bool((error(scale) < 0.6 * error(start * 2)).all())  # 7 bits


@pytest.mark.parametrize(("count", "share"), [(8, 1.1), (27, 1.1), (64, 1.05), (256, 1.05)])
def test_the_scale_of_a_short_row_is_the_one_with_the_least_error_of_its_own_weights(count, share):
    """In a row of few weights, chance decides more than the step: of scales nearby, one rounds them far better."""
    w = torch.rand(200, count, generator=torch.Generator().manual_seed(0)) * 2 - 1
    start = w.abs().amax(1) / 127
    error = lambda s: (stored(s, axis=0, on=limited()).round(w) - w).square().sum(1)
    found = scale_for_pairs(w, start, limited(), 0)
    tried = torch.stack([error(start * f) for f in np.linspace(1, 2, 101)])
    assert bool((found >= start).all()) and float(error(found).sum()) < share * float(tried.amin(0).sum())


def test_a_scale_is_left_alone_where_all_pairs_fit():
    w = torch.tensor([[1.0, -1.0, 0.5, 0.25], [1.0, 0.0, 0.0, 1.0]])
    start = w.abs().amax(1) / 127
    assert torch.equal(scale_for_pairs(w, start, limited(), 0), start)
    assert torch.equal(scale_for_pairs(w[:, :1], start, limited(), 0), start)
