"""A share of the random networks of `make random`, and a harness that has been seen to fail."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from benchmarks.random_networks import Network, Outcome, Tally, apart, check, platforms

from chipfit.registry import lookup
from chipfit.simulate.integer import Simulation

#: 40 and 20 networks in parts, so that workers share them
PARTS = [("onnxruntime", range(10 * k, 10 * k + 10)) for k in range(4)]
PARTS += [("litert", range(100 + 5 * k, 105 + 5 * k)) for k in range(4)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("runtime, seeds", PARTS)
def test_no_integer_of_a_random_network_differs_from_the_runtimes(runtime, seeds):
    tally = Tally([check(seed, runtime) for seed in seeds])
    assert not [line for o in tally.outcomes for line in o.faults], tally.report()
    assert len(tally.refused) <= 1, tally.report()


def test_a_runtime_that_ends_the_process_is_a_fault_of_that_network():
    assert apart(7, "litert", lambda seed, runtime: Outcome(seed, runtime)) == Outcome(7, "litert")
    (fault,) = apart(7, "litert", lambda seed, runtime: os.kill(os.getpid(), signal.SIGKILL)).faults
    assert fault == "the process ended with exit status -9"


def test_the_networks_draw_what_real_ones_have():
    networks = [Network(seed) for seed in range(150)]
    made, layers = " ".join(map(str, networks)), {type(m).__name__ for n in networks for m in n.modules()}
    norms = {"BatchNorm2d", "BatchNorm1d", "LayerNorm", "RMSNorm", "GroupNorm"}
    spatial = {"Conv1d", "ConvTranspose2d", "ConvTranspose1d", "Upsample", "AvgPool2d", "MaxPool2d"}
    assert layers >= norms | spatial | {"Attention", "PReLU", "Linear"}
    for how in ("groups=2", "groups=8", "dilation=(2, 2)", "stride=(1, 2)", "mode='bilinear'"):
        assert how in made, how


def test_every_platform_that_names_a_runtime_is_drawn():
    assert {"ort_cpu@AVX2", "ort_cpu@VNNI"} <= {*platforms("onnxruntime")}
    assert {"tflite_int8", "tflite_int16x8", "xnnpack", "ethos_u"} <= {*platforms("litert")}


def off_by_one(kernel):
    """The kernel with one of its integers wrong."""

    def broken(run: Simulation, unit) -> None:
        kernel(run, unit)
        out = unit[-1].output
        codes = run.codes[out].clone(memory_format=torch.contiguous_format)
        codes.view(-1)[0] += 1 if int(codes.view(-1)[0]) < run.stored(out).grid.qmax else -1
        run.codes[out] = codes

    return broken


@pytest.mark.parametrize("op", ["Conv2D", "Add", "Linear"])
def test_a_kernel_of_the_simulator_that_is_wrong_is_noticed(monkeypatch, op):
    kernels = lookup("kernels", "onnxruntime").kernels
    monkeypatch.setitem(kernels, op, off_by_one(kernels[op]))
    outcomes = [check(seed, "onnxruntime") for seed in range(5)]
    lines = [line for o in outcomes for line in o.faults]
    assert any(f"{op} " in line and "2 of" in line for line in lines)  # in each of two batches, lines


@pytest.mark.parametrize("family", ["litert_reference", "litert_optimized", "litert_xnnpack"])
def test_a_kernel_of_a_family_that_is_wrong_is_noticed(monkeypatch, family):
    kernels = lookup("kernels", family).kernels
    monkeypatch.setitem(kernels, "Conv2D", off_by_one(kernels["Conv2D"]))
    runtime = family.replace("litert_xnnpack", "litert")
    lines = (line for seed in range(100, 115) for line in check(seed, "litert").faults)
    assert any(line.startswith(f"{runtime}: Conv2D") for line in lines)


def test_refusals_and_a_small_share_are_faults_of_the_whole():
    outcomes = [Outcome(k, "p", refused="UnsupportedError: no") for k in range(2)] + [Outcome(k, "p") for k in range(9)]
    faults = Tally(outcomes).faults
    assert any("2 of 11 networks were refused" in line for line in faults)
    assert any("compared without tolerance" in line for line in faults)
    assert not Tally([replace(o, refused="") for o in outcomes]).refused
