"""Limits on a chip's RAM and flash, kept by bits or refused with the layer that needs most."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.cli.inputs import parse_limits
from chipfit.decision import plan_of
from chipfit.errors import ConfigError, PlanError
from chipfit.export.tflite import footprint
from chipfit.report.html import page
from chipfit.report.terminal import facts
from chipfit.search.chip_memory import Footprint, fit_widths
from chipfit.search.limits import Limits
from chipfit.search.losses import NEAREST
from chipfit.search.resources import resources
from tests.build import quantized, randn

DATA = randn(8, 3, 12, 12)


def net():
    torch.manual_seed(0)
    layers = {"wide": nn.Conv2d(3, 24, 3), "r": nn.ReLU(), "deep": nn.Conv2d(24, 32, 3, 2), "flat": nn.Flatten()}
    model = nn.Sequential()
    for name, layer in {**layers, "head": nn.Linear(512, 10)}.items():
        model.add_module(name, layer)
    return model.eval()


def fitted(**limits):
    return quantized(net(), DATA, "tflm_cmsis_nn", limits=Limits(**limits) if limits else None)


def bits(result):
    return {n: t.grid.bits for n, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}


def test_a_network_that_fits_keeps_its_bits():
    free, result = fitted(), fitted(ram="256 KiB", flash="1 MiB")
    assert bits(result) == bits(free) == dict.fromkeys(("wide.weight", "deep.weight", "head.weight"), 8)
    assert result.plan.provenance["limits"] == {"ram": "256 KiB", "flash": "1 MiB"}


def test_a_file_that_is_too_large_for_the_flash_gets_weights_of_fewer_bits(tmp_path):
    size = footprint((free := fitted()).graph, free.plan).flash
    result = fitted(flash=size - 3000)
    path = result.export(tmp_path / "m.tflite", batch=1)
    assert path.stat().st_size <= size - 3000 and 4 in bits(result).values()
    assert any("widths of weights chosen" in note for note in result.plan.rewrites)
    assert result.verify(DATA[:2]).exact


@pytest.mark.parametrize(
    "limits, words",
    [
        (
            {"ram": "4 KiB"},
            r"arena does not keep the limit on ram\. Got: .* Allowed: 4,096 bytes.*'(wide|deep)' needs most",
        ),
        ({"flash": 2000}, r"file does not keep the limit on flash\. Got: .* Allowed: 2,000 bytes.*'deep' needs most"),
    ],
)
def test_a_limit_that_no_bits_keep_is_refused_with_the_layer_that_needs_most(limits, words):
    with pytest.raises(PlanError, match=words):
        fitted(**limits)


def test_the_layer_that_needs_most_ram_holds_its_input_and_its_output():
    result = fitted()
    found = footprint(result.graph, result.plan)
    assert found.ram_layer == "deep" and found.ram_alive == 24 * 100 + 32 * 16  # of 8 bits
    assert found.flash_layer == "deep" and found.flash_weights == 24 * 32 * 9


@pytest.mark.parametrize(
    "limits, words",
    [
        ({"flash": "1 MB", "weights": 10}, "about the same memory. Got: flash and weights"),
        ({"ram": "1 MB", "total": 10}, "about the same memory. Got: ram and total"),
        ({"ram": "50%"}, "Limit on ram is not a valid amount.*number with one of B, KB"),
        ({"flash": "2 parsecs"}, "Limit on flash is not a valid amount"),
    ],
)
def test_limits_that_contradict_each_other_or_are_no_memory_are_refused(limits, words):
    with pytest.raises(ConfigError, match=words):
        Limits(**limits)


def test_a_platform_without_such_files_refuses_the_limit_before_calibration():
    with pytest.raises(ConfigError, match=r"'ort_cpu' has no .tflite file.*Got: ram.*Allowed: weights"):
        chipfit.quantize(net(), [], platform="ort_cpu", limits=Limits(ram="1 MB"))


def test_pruning_refuses_limits_on_files():
    with pytest.raises(ConfigError, match="Limits without loss, flash, ram"):
        chipfit.prune(net(), DATA, "tflm_cmsis_nn", limits=Limits(ram="1 MB"))


def test_the_command_line_has_the_same_limits():
    assert parse_limits(["ram=256KiB", "flash=1 MB"]).of_file() == {"ram": 262_144.0, "flash": 1e6}


def test_the_report_shows_arena_and_flash_beside_the_limits():
    report = fitted(ram="256 KiB").report
    shown = facts(report)
    assert " of 262,144 bytes of arena" in shown["ram"] and "'deep'" in shown["ram"] and "'deep'" in shown["flash"]
    assert f"{report.memory['flash']:,} bytes;" in shown["flash"] and "memory of the chip" in page(report)
    assert quantized(net(), DATA, "tflite_int8").report.memory is None


# ---------------------------------------------------------------- a chip on which activations may have fewer bits


def searched(ram: float, more: int = 0):
    d = quantized(net(), DATA, "mqbench_academic").decision

    def measure(graph, plan):
        used = resources(graph, plan)
        return Footprint(int(used.activations) + more, int(used.weights), "wide", int(used.activations), "deep", 9)

    return measure, fit_widths(d, Limits(ram=ram), lambda: [[DATA]], NEAREST, measure)


def test_activations_get_fewer_bits_until_what_is_measured_fits():
    measure, d = searched(1e9)
    free = measure(d.graph, plan_of(d)).ram
    for more in (0, 100):  # what the file adds to its tensors is not in the search's budget
        _, d = searched(0.98 * free, more)
        assert measure(d.graph, plan_of(d)).ram + more <= 0.98 * free


def test_one_scale_for_fully_connected_layers_comes_before_fewer_bits():
    free = fitted()
    needs = footprint(free.graph, free.plan)
    result = fitted(ram=needs.ram - 16, flash=needs.flash)
    head = result.plan.stored("head.weight")
    assert head.scale.numel() == 1 and head.grid.bits == 8 and result.plan.stored("deep.weight").scale.numel() == 32
    found = footprint(result.graph, result.plan)
    assert found.ram == needs.ram - 2 * 48  # a multiplier and a shift for each of 10 outputs, aligned
    assert any("share one scale" in note for note in result.plan.rewrites) and result.verify(DATA[:2]).exact


def test_weights_with_one_scale_keep_8_bits():
    result = quantized(net(), DATA, "tflm_cmsis_nn", overrides={"Linear": {"per": "tensor"}})
    assert result.plan.stored("head.weight").grid.bits == 8 and result.plan.stored("head.weight").scale.numel() == 1


def test_what_the_file_adds_to_a_layer_is_named_like_the_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, 2, 1, groups=4), nn.BatchNorm2d(4), nn.ReLU()).eval()
    result = quantized(model, DATA, "tflm_cmsis_nn")  # the second is padded by an operator of its own
    assert footprint(result.graph, result.plan).ram_layer in ("0", "1")
