"""Samples that were seen are known again, whatever batches they came in."""

import hashlib

import pytest
import torch

from chipfit.calibration.sample_fingerprints import SampleHashes

X = torch.randn(200, 3, 2, generator=torch.Generator().manual_seed(0))


def noted(*batches):
    seen = SampleHashes()
    for inputs in batches:
        seen.add(inputs)
    return seen


def test_samples_are_known_in_other_batches_and_others_are_not():
    seen = noted([X[:5]], [X[5:8]])
    assert len(seen.digests) == 8
    assert seen.count_known([X[3:12]]) == 5 and seen.count_known([X[8:]]) == 0 and seen.count_known([X[6:7]]) == 1
    assert SampleHashes(sorted(seen.digests)).count_known([X]) == 8 and SampleHashes().count_known([X]) == 0


def test_at_most_128_are_kept_and_the_same_ones_in_any_order():
    forth, back = noted([X[:100]], [X[100:]]), noted([X.flip(0)])
    assert len(forth.digests) == 128 and forth.digests == back.digests
    assert forth.digests == set(sorted(d for x in X.split(1) for d in noted([x]).digests)[:128])


def test_every_input_of_a_sample_counts_and_one_without_a_batch_axis_for_each():
    y, mask, scalar = X[:4] + 1, torch.tensor([1.0, 0.0, 1.0]), torch.tensor(2.0)
    seen = noted([X[:4], y, mask, scalar])
    assert len(seen.digests) == 4 and seen.count_known([X[:4], y, mask, scalar]) == 4
    assert seen.count_known([X[1:3], y[1:3], mask, scalar]) == 2
    assert seen.count_known([X[:4], y.flip(0), mask, scalar]) == seen.count_known([X[:4], y, mask * 2, scalar]) == 0
    assert seen.count_known([X[:4], y, mask, scalar + 1]) == seen.count_known([X[:4]]) == 0
    alone = noted([scalar])
    assert len(alone.digests) == 1 and alone.count_known([scalar]) == 1 and alone.count_known([scalar + 1]) == 0
    first = noted([scalar, X[:4]])  # the number of samples is that of the first input that has any
    assert len(first.digests) == 4


@pytest.mark.parametrize("size, at, told", [(1024, 1, True), (2047, 1, True), (2048, 1, False), (2048, 2, True)])
def test_of_large_inputs_about_a_thousand_numbers_are_compared(size, at, told):
    x = torch.zeros(1, size)
    y = x.clone()
    y[0, at] = 1
    assert noted([x]).count_known([y]) == (0 if told else 1)


def test_the_hash_is_over_types_shapes_numbers_order_and_borders():
    def sha(*batches):
        h = hashlib.sha256()
        for inputs in batches:
            for x in inputs:
                h.update(f"{len(inputs)} {x.dtype} {tuple(x.shape)} ".encode() + x.numpy().tobytes())
        return h.hexdigest()

    empty = torch.zeros(2, 0)
    for batches in ([[X[:2]]], [[X[:1]], [X[1:2]]], [[X[:2], X[2:4].double()]], [[empty]], [[X[:3].transpose(1, 2)]]):
        assert noted(*batches).hash == sha(*batches)
