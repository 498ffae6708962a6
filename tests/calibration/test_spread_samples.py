"""A few samples of data of unknown length."""

import torch

from chipfit.calibration.data import IndivisibleBatch
from chipfit.calibration.spread_samples import SpreadSamples


def spread(count, batch, numbers=2):
    found = SpreadSamples()
    for x in torch.arange(float(count)).view(-1, 1).expand(-1, numbers).split(batch):
        found.add([x])
    return found


def test_samples_are_spread_evenly_whatever_the_batches_are():
    for batch in (1, 7, 16, 1000):
        ((x,),) = spread(1000, batch).take(4)
        assert x[:, 0].tolist() == [0, 252, 504, 756]  # every fourth is kept, of these every 63rd is taken


def test_few_samples_are_all_taken():
    ((x,),) = spread(5, 2).take(128)
    assert x[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert SpreadSamples().take(4) == []


def test_memory_is_bounded_for_large_samples():
    ((x,),) = spread(64, 4, numbers=1 << 20).take(128)
    assert x[:, 0].tolist() == [0, 16, 32, 48]


def test_tensors_of_different_sizes_stay_together():
    found = SpreadSamples()
    found.add([torch.zeros(3, 2), torch.zeros(5)])
    found.add([torch.ones(3, 2), torch.tensor(1.0)])
    assert [[x.shape for x in batch] for batch in found.take(8)] == [[(3, 2), (5,)], [(3, 2), ()]]


def test_batches_of_a_fixed_size_are_not_cut():
    found = SpreadSamples()
    found.add(IndivisibleBatch([torch.zeros(3, 2)]))
    assert [x.shape for (x,) in found.take(8)] == [(3, 2)]
