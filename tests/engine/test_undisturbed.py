"""Quantizing leaves the caller's process as it was, depends on nothing in it, and may run in several threads."""

import json
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from chipfit import lint
from tests.build import mlp, model_of, quantized, randn
from tests.engine.test_process import draws, started


def noisy():
    """A network that draws random numbers whenever it runs."""
    torch.manual_seed(0)

    def forward(m, x):
        y = torch.relu(m.a(x))
        return m.b(y * torch.rand_like(y))

    return model_of(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3))


X = randn(32, 6, seed=1)


def numbers(result):
    return {n: (t.scale.tolist(), t.zero_point.tolist()) for n, t in result.plan.tensors.items() if t.quantized}


def test_the_callers_random_numbers_are_left_alone(tmp_path):
    started(7)
    want = draws()
    started(7)
    result = quantized(noisy_model, X)
    _ = result.model
    lint(noisy_model, X)
    plain_result.export(tmp_path / "m.onnx")
    assert draws() == want


noisy_model, plain_result = noisy(), quantized(mlp(6, 8, 3), X)


def test_results_do_not_depend_on_the_callers_random_numbers():
    found = []
    for seed in (1, 2):
        started(seed)
        found.append(numbers(quantized(noisy_model, X)))
    assert found[0] == found[1] != numbers(quantized(noisy_model, X, seed=5))


def test_threads_give_what_one_after_the_other_gives():
    models = [mlp(6, w, 3) for w in (8, 9, 10, 11)]
    want = [numbers(quantized(m, X)) for m in models]
    filters, disabled = list(warnings.filters), logging.root.manager.disable
    started(3)
    drawn = draws()
    started(3)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda m: numbers(quantized(m, X)), models)) == want
    assert (list(warnings.filters), logging.root.manager.disable) == (filters, disabled)
    assert draws() == drawn


BATCHES = [X[:16], X[16:]]
CHANGED = {
    "a number in the middle": lambda: [X[:16], X[16:].clone().index_fill_(0, torch.tensor([3]), 0.125)],
    "the order": lambda: BATCHES[::-1],
    "the borders of batches": lambda: [X[:8], X[8:]],
    "the number of batches": lambda: [*BATCHES, X[:16]],
    "the type": lambda: [b.half().float() for b in BATCHES],
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_the_hash_of_the_data_tells_them_apart(change):
    told = [quantized(mlp(6, 8, 3), b).plan.provenance["data_sha256"] for b in (BATCHES, BATCHES, change())]
    assert told[0] == told[1] != told[2]
    json.dumps(told)
