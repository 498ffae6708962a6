"""Memory of the device: what runs out, what is kept, and what comes back."""

import gc

import pytest
import torch

import chipfit
from chipfit.errors import MemoryExceeded
from tests.accelerators import chosen, moved
from tests.build import images, small_cnn


def quantize(model, data):
    return chipfit.quantize(model, data, "ort_cpu", progress=False)


def test_memory_that_runs_out_in_calibration_names_device_and_batch_and_loses_nothing(fake):
    model, small = moved(small_cnn()), images(4)
    large = images(64, size=8).to(chosen.device)
    state = torch.fakegpu.get_rng_state(0)
    fake.limit_memory(fake.counts()["allocated"] + 64 * 8 * 64 * 4)  # a single activation of the large batch
    with pytest.raises(MemoryExceeded, match=r"batch of 64: .*\[64, 3, 8, 8\]") as e:
        quantize(model, [small, large])
    assert str(e.value).startswith("Device 'fakegpu:0' ran out of memory")
    fake.limit_memory(0)
    assert torch.equal(torch.fakegpu.get_rng_state(0), state)
    assert quantize(model, [small, large]).plan.tensors.keys() == quantize(model, [small]).plan.tensors.keys()


def test_memory_that_runs_out_in_the_users_model_is_no_fault_of_its_code(fake):
    model, large = moved(small_cnn()), images(64).to(chosen.device)
    fake.limit_memory(fake.counts()["allocated"] + 1)
    with pytest.raises(MemoryExceeded, match="ran out of memory: fakegpu"):
        quantize(model, [large])


def test_calibration_keeps_no_more_than_a_few_batches_on_the_device(fake):
    """Twelve batches need what three need."""

    def peak(count: int) -> int:
        fake.reset()
        before = fake.counts()["allocated"]
        quantize(moved(small_cnn()), (images(32, seed=k) for k in range(count)))
        return fake.counts()["peak"] - before

    assert peak(12) <= 1.1 * peak(3)


def test_a_result_keeps_no_more_than_a_batch_on_the_device_beside_its_model(fake):
    model = moved(small_cnn())
    gc.collect()  # of errors in other tests, whose frames hold batches
    before = fake.counts()["allocated"]
    result = quantize(model, [images(8)])
    kept = fake.counts()["allocated"] - before
    assert kept < 2 * 8 * 3 * 8 * 8 * 4  # bytes of two batches
    assert next(result.model.parameters()).device == chosen.device and fake.counts()["allocated"] > before + kept


def test_memory_that_runs_out_in_any_loop_over_data_is_an_error_of_the_device(fake):
    """Wherever it happens: in a copy of weights or batches, a product, a sum, or the gradients."""
    model, data, seen = moved(small_cnn(norm=True)), [images(64, seed=k) for k in range(2)], {}
    result, example = quantize(model, data), torch.zeros(2, 3, 8, 8)
    loops = {
        "sensitivity": lambda: result.sensitivity(data),
        "pareto": lambda: result.pareto(data),
        "similarity": lambda: result.similarity(data),
        "generated": lambda: chipfit.generated(model, 32, example=example, options=chipfit.Generation(steps=2)),
        "lint": lambda: chipfit.lint(model, data[0]),
        "prune": lambda: chipfit.prune(model, data, limits=chipfit.Limits(bops="60%"), progress=False),
    }
    for bytes_left in (1_000, 30_000, 100_000, 200_000):
        for name, loop in loops.items():
            fake.limit_memory(fake.counts()["allocated"] + bytes_left)
            try:
                loop()
            except MemoryExceeded as e:
                seen[name] = str(e)
            finally:
                fake.limit_memory(0)
    assert seen.keys() == loops.keys() and all("evice" in text for text in seen.values())
