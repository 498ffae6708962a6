"""chipfit computes with torch's defaults, whatever the caller has switched on, and restores what was on."""

import threading

import pytest
import torch
from torch import nn

from chipfit.engine.torch_defaults import torch_defaults
from chipfit.plan.diff import diff
from tests.build import images, quantized, randn, sequential, small_cnn

BACKENDS = torch.backends
SETTINGS = {
    "torch's defaults": lambda: None,
    "TF32 in products": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "no TF32": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "bfloat16 in products": lambda: torch.set_float32_matmul_precision("medium"),
    "bfloat16 in convolutions": lambda: setattr(BACKENDS.mkldnn.conv, "fp32_precision", "bf16"),
    "the new switches": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_products_are_exact_inside_and_the_switches_as_before_outside(setting, precisions):
    setting()
    before = precisions()
    with torch_defaults():
        assert {*precisions()} <= {"none", "ieee"}
        assert not BACKENDS.cudnn.allow_tf32 and not BACKENDS.cuda.matmul.allow_tf32
    assert precisions() == before


def test_kernels_are_those_that_give_the_same_numbers_each_time(monkeypatch):
    monkeypatch.setattr(BACKENDS.cudnn, "deterministic", False)
    monkeypatch.setattr(BACKENDS.cudnn, "benchmark", True)
    with torch_defaults():
        assert BACKENDS.cudnn.deterministic and not BACKENDS.cudnn.benchmark
    assert not BACKENDS.cudnn.deterministic and BACKENDS.cudnn.benchmark


def test_switches_are_restored_after_an_error(precisions):
    BACKENDS.cuda.matmul.allow_tf32 = True
    with pytest.raises(ZeroDivisionError), torch_defaults():
        1 / 0
    assert BACKENDS.cuda.matmul.allow_tf32 and BACKENDS.cudnn.allow_tf32


def test_the_last_thread_restores_the_switches(precisions):
    BACKENDS.cuda.matmul.allow_tf32 = True
    entered, leave, found = threading.Event(), threading.Event(), []

    def other() -> None:
        with torch_defaults():
            entered.set()
            leave.wait(10)
            found.append(BACKENDS.cuda.matmul.allow_tf32)

    thread = threading.Thread(target=other)
    with torch_defaults():
        thread.start()
        assert entered.wait(10)
    assert not BACKENDS.cuda.matmul.allow_tf32
    leave.set()
    thread.join()
    assert found == [False] and BACKENDS.cuda.matmul.allow_tf32


def test_calibration_runs_without_tf32_wherever_it_reads_data(precisions):
    torch.set_float32_matmul_precision("high")
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.append({*precisions()} <= {"none", "ieee"})
            return x

    quantized(sequential(nn.Linear(4, 4), Watched()), [randn(8, 4)]).verify([randn(8, 4)])
    assert seen and all(seen) and torch.get_float32_matmul_precision() == "high"


def test_autocast_around_the_call_changes_no_plan_and_no_proof():
    net, batches = small_cnn(), [images(seed=k) for k in range(2)]
    want = quantized(net, batches)
    with torch.autocast("cpu", torch.bfloat16):
        result = quantized(net, batches)
        assert result.verify(batches).exact and torch.is_autocast_enabled("cpu")
    assert not diff(want.plan, result.plan)


def test_a_default_type_is_the_models_and_not_chipfits():
    torch.set_default_dtype(torch.float64)
    try:
        net = sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        result = quantized(net, [torch.randn(8, 4)])
        assert result.model(torch.randn(3, 4)).dtype == torch.float64 == torch.get_default_dtype()
        assert result.verify([torch.randn(8, 4)]).exact
    finally:
        torch.set_default_dtype(torch.float32)
