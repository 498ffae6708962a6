"""Reals to codes as LiteRT makes them: eight at once by the inverse of the scale, and what is left by division."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from chipfit.registry import lookup
from chipfit.simulate.integer import simulate
from chipfit.simulate.litert import vector_elements
from tests.build import model_of, quantized, sequential

pytest.importorskip("ai_edge_litert")
KERNELS = {"litert": "litert_xnnpack", "litert_optimized": "litert_optimized", "litert_reference": "litert_reference"}


def near_ties(stored, *shape):
    """Reals whose quotient by the scale, and product with its inverse, are rounded to different codes."""
    torch.manual_seed(shape[0])
    zero, scale = int(stored.zero_point), stored.scale.float()
    k = torch.randint(stored.grid.qmin - zero + 1, stored.grid.qmax - zero - 1, (300_000,)).double() + 0.5
    x = (k * scale.double()).float()
    x = torch.cat((x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(-torch.inf))))
    quotient = (x / scale).double()
    away = torch.sign(quotient) * torch.floor(quotient.abs() + 0.5)
    found = x[away != torch.round(x * (1.0 / scale))]
    return found[torch.randperm(len(found))[: int(np.prod(shape))]].reshape(shape)


@pytest.mark.parametrize("runtime", KERNELS)
@pytest.mark.parametrize("platform", ["tflite_int8", "tflite_int16x8"])
@pytest.mark.parametrize("length", [1, 5, 7, 8, 9, 16, 19, 23])
def test_reals_between_two_codes(platform, length, runtime):
    result = square(length, platform=platform)
    x = near_ties(result.plan["x"], 1, length)
    found = result.verify([x], runtime=runtime)
    assert found.rows[0].elements == length and not found.departures, found.departures


@pytest.mark.parametrize("runtime", ["litert", "litert_optimized"])
def test_another_way_of_rounding_would_be_seen(runtime):
    """A control: the kernels' ways differ on these reals, so that the test above can fail."""
    result = square(23)
    x = near_ties(result.plan["x"], 1, 23)
    own, theirs = (
        simulate(result.graph, result.plan, [x], result.platform, kernels=k)["x"]
        for k in (KERNELS[runtime], "litert_reference")
    )
    assert (own[:, :16] != theirs[:, :16]).all() and (own != theirs).sum() >= 16


def square(*shape: int, platform="tflite_int16x8"):
    """relu(x) * x of samples of this many numbers."""
    torch.manual_seed(sum(shape))
    return quantized(model_of(lambda m, x: torch.relu(x) * x), torch.randn(8, *shape), platform)


def up():
    """A network whose file holds one sample: 18 reals of each, of which 16 are taken by eights."""
    torch.manual_seed(4)
    return quantized(sequential(nn.ConvTranspose2d(2, 2, 2, 2), nn.ReLU()), torch.randn(8, 2, 3, 3), "tflite_int16x8")


@pytest.mark.parametrize("runtime", ["litert", "litert_optimized"])
def test_what_is_left_begins_anew_in_each_part_of_the_samples(runtime):
    result = up()
    x = near_ties(result.plan["input"], 5, 2, 3, 3)
    found = result.verify([x], runtime=runtime)
    assert found.rows[0].elements == 90 and not found.departures, found.departures
    how = {"keep": ["input"], "kernels": KERNELS[runtime]}
    whole, parts, pairs = (
        simulate(result.graph, result.plan, [x], result.platform, part=p, **how)["input"] for p in (None, 1, 2)
    )
    assert (whole != parts).any() and (pairs != parts).any() and (pairs != whole).any()
    alone = [simulate(result.graph, result.plan, [s], result.platform, **how)["input"] for s in x.split(2)]
    assert torch.equal(torch.cat(alone), pairs)


def test_sums_of_wide_codes_begin_anew_in_each_part_too():
    """The optimised kernel rounds once where vector instructions take 16, of each part of the samples."""
    torch.manual_seed(0)
    data = torch.randn(8, 21), torch.randn(8, 21) * 0.37
    result = quantized(model_of(lambda m, x, y: x + y), [data], "tflite_int16x8")
    x = [torch.randn(400, 21), torch.randn(400, 21) * 0.37]

    def total(*inputs, part=None):
        how = {"kernels": "litert_optimized", "part": part}
        return simulate(result.graph, result.plan, inputs, result.platform, **how)["add"]

    parts = total(*x, part=1)
    assert torch.equal(torch.cat([total(a, b) for a, b in zip(x[0].split(1), x[1].split(1), strict=True)]), parts)
    assert (parts != total(*x)).any()


def test_a_device_model_takes_as_many_samples_at_once_as_the_file(tmp_path):
    result = up()
    x = near_ties(result.plan["input"], 5, 2, 3, 3)
    (want,) = lookup("runtime", "litert")(result.export(tmp_path / "m.tflite")).run([x.numpy()]).values()
    assert np.array_equal(result.device_model(x).numpy(), want)
    one = lookup("runtime", "litert")(result.export(tmp_path / "five.tflite", batch=5))
    assert not np.array_equal(next(iter(one.run([x.numpy()]).values())), want)


@pytest.mark.parametrize("runtime", KERNELS)
def test_codes_that_an_application_hands_over_are_those_that_the_kernel_would_make(runtime, tmp_path):
    result = square(23)
    x = near_ties(result.plan["x"], 3, 23)
    path = result.export(tmp_path / "m.tflite", io="int16")
    assert not result.verify([x], runtime=runtime, path=path).departures


def test_a_batch_without_samples_has_no_codes():
    result = square(23)
    empty = [torch.zeros(0, 23)]
    for part in (None, 1):
        found = simulate(result.graph, result.plan, empty, result.platform, kernels="litert_optimized", part=part)
        assert all(q.shape == (0, 23) for q in found.values())


@pytest.mark.parametrize("kernels", KERNELS.values())
def test_a_number_without_axes_is_left_over(kernels):
    torch.manual_seed(1)
    result = quantized(model_of(lambda m, x: torch.relu(x) * x), torch.randn(()), "tflite_int16x8")
    stored = result.plan["x"]
    for value in near_ties(stored, 64):
        code = int(simulate(result.graph, result.plan, [value], result.platform, kernels=kernels)["x"])
        quotient = float(value / stored.scale) if kernels == "litert_reference" else float(value) / float(stored.scale)
        assert code == int(np.sign(quotient) * np.floor(abs(quotient) + 0.5)) + int(stored.zero_point)


def test_what_does_not_follow_the_samples_is_in_one_part():
    graph = SimpleNamespace(shape={"x": (None, 20), "fixed": (20,), "number": ()}.get)
    run = SimpleNamespace(part=2, graph=graph, forms={})
    assert vector_elements(run, "fixed", 8, (20,)).tolist() == [True] * 16 + [False] * 4
    assert vector_elements(run, "number", 8, ()).tolist() is False
    by_two, odd = [True] * 40, [True] * 16 + [False] * 4
    assert vector_elements(run, "x", 8, (5, 20)).flatten().tolist() == [*by_two, *by_two, *odd]
