"""Random numbers, warnings and loggers while chipfit computes, and after."""

import inspect
import logging
import random
import warnings

import numpy as np
import pytest
import torch

from chipfit.engine.process import preserve_random_state, quiet, seeded


def draws():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def started(seed):
    torch.manual_seed(seed), np.random.seed(seed & 0xFFFFFFFF), random.seed(seed)
    return draws()


@pytest.mark.parametrize("seed", [0, 1, 12345, 0xFFFFFFFF, 1 << 32, (1 << 32) + 5])
def test_a_seed_starts_every_generator_as_its_own_does_and_the_callers_go_on(seed):
    want = started(seed)
    started(3), draws()
    after = draws()
    started(3), draws()
    with seeded(seed):
        assert draws() == want
        with seeded(seed):  # a call within a call gives nothing back
            assert draws() == want
    assert draws() == after


def test_generators_are_given_back_after_an_error():
    started(3)
    after = draws()
    started(3)
    with pytest.raises(ZeroDivisionError), seeded(1):
        _ = 1 / 0
    assert draws() == after


@preserve_random_state
def drawing(x=2, *, seed=0):
    """Draws."""
    return x, draws()


#: any integer is a seed, by its lowest 63 bits
WIDE = [({"seed": s}, s & (1 << 63) - 1) for s in (-1, 1 << 62, (1 << 62) + 7, (1 << 63) - 1, 1 << 63, 1 << 70)]


@pytest.mark.parametrize(
    "given, seed", [({}, 0), ({"seed": 5}, 5), ({"seed": "five"}, 0), ({"seed": None}, 0), *WIDE], ids=str
)
def test_a_function_draws_from_its_seed_and_keeps_name_and_signature(given, seed):
    want = started(seed)
    assert drawing(3, **given) == (3, want)
    assert (drawing.__name__, drawing.__doc__) == ("drawing", "Draws.")
    assert list(inspect.signature(drawing).parameters) == ["x", "seed"]


def test_nothing_warns_logs_or_has_gradients_while_torch_traces_and_all_is_as_before_afterwards(caplog):
    logging.disable(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with quiet():
                warnings.warn("unheard", stacklevel=1)
                logging.getLogger("anyone").warning("unheard")
                logging.getLogger("anyone").error("heard")
                assert not torch.is_grad_enabled()
            with pytest.raises(UserWarning):
                warnings.warn("heard", stacklevel=1)
        assert [r.message for r in caplog.records] == ["heard"]
        assert logging.root.manager.disable == logging.DEBUG and torch.is_grad_enabled()
        with pytest.raises(ZeroDivisionError), quiet():
            _ = 1 / 0
        assert logging.root.manager.disable == logging.DEBUG
    finally:
        logging.disable(logging.NOTSET)


class Accelerator:
    """A module of torch for an accelerator, whose generators have numbers as states."""

    def __init__(self, used=True):
        self.used, self.seeds = used, [[3], [4]]

    def is_initialized(self):
        return self.used

    def get_rng_state(self, index=0):
        return torch.tensor(self.seeds[index])

    def set_rng_state(self, state, index=0):
        self.seeds[index] = state.tolist()

    def manual_seed_all(self, seed):
        self.seeds = [[seed], [seed]]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("used", [True, False])
def test_generators_of_an_accelerator_in_use_are_seeded_and_given_back(monkeypatch, used, count):
    there = Accelerator(used)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch, "get_device_module", lambda device: there)
    with seeded(5):
        assert there.seeds == ([[5], [5]] if used else [[3], [4]])
        there.manual_seed_all(6)
    assert there.seeds[:count] == ([[3], [4]] if used else [[6], [6]])[:count]
