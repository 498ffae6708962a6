"""The arena that TensorFlow Lite Micro needs, predicted, beside what its interpreter needs."""

import pytest

pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")

import shutil

import numpy as np
import torch
from benchmarks.recurrent import Spotter, host_build, tones
from torch import nn

from chipfit.errors import RuntimeUnavailable
from chipfit.export.tflite.arena import Buffer, arena, place
from chipfit.export.tflite.file import TYPES, File
from chipfit.runtimes.tflm import Tflm
from tests.build import quantized, randn
from tests.zoo import make

FLOAT, INT8, INT32 = (TYPES[k] for k in ("float32", "int8", "int32"))


def exported(net, data, folder, platform="tflm_cmsis_nn", **options) -> bytes:
    return quantized(net, data, platform).export(folder / "m.tflite", batch=1, **options).read_bytes()


@pytest.mark.parametrize(
    "name",
    ["residual", "residual_sigmoid", "inverted_residual", "squeeze_excite", "fire", "unet_nearest", "unet_transposed"]
    + ["residual_hardswish", "conv1d", "mlp", "grouped_strided", "shared_and_tied"],
)
def test_the_predicted_arena_is_within_5_percent_of_what_the_interpreter_needs(name, tmp_path):
    net, batch = make(name)
    content = exported(net, [batch], tmp_path)
    needed, predicted = Tflm.arena(content), arena(content)
    assert predicted.total == pytest.approx(needed, rel=0.05)
    assert predicted.tensors <= predicted.total and predicted.layer and predicted.alive <= predicted.tensors


@pytest.mark.parametrize("platform, io", [("tflm_cmsis_nn", "int8"), ("tflite_int16x8", "int16")])
def test_files_with_integers_outside_are_predicted_too(platform, io, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 40), nn.Softmax(1)).eval()
    content = exported(net, randn(4, 3, 8, 8), tmp_path, platform, io=io)
    assert arena(content).total == pytest.approx(Tflm.arena(content), rel=0.05)


def test_many_small_tensors_need_more_while_the_file_loads_than_later():
    file = File()
    x = first = file.tensor("x", (1, 4), FLOAT)
    for k in range(40):
        y = file.tensor(f"y{k}", (1, 4), FLOAT)
        file.op("NEG", [x], y)
        x = y
    content = file.content({"x": first}, {"y": x}, {})
    found = arena(content)
    assert found.tensors == 32 and found.total > found.tensors + found.records + 1000
    assert found.total == pytest.approx(Tflm.arena(content), rel=0.02)


def test_a_buffer_lies_in_the_first_gap_that_is_large_enough():
    below, above = Buffer(64, 0, 9), Buffer(64, 5, 9)
    assert place([below, above, Buffer(16, 0, 4)]) == 128  # beside the one that comes later
    assert place([Buffer(96, 0, 1), below, Buffer(32, 1, 2), Buffer(48, 2, 9)]) == 192
    assert place([]) == 0


def test_the_operator_at_which_most_is_alive_is_named():
    file = File()
    x, y, z = (file.tensor(name, (1, n), INT8) for name, n in (("x", 100), ("wide", 900), ("z", 10)))
    axis = file.constant(np.array([0], np.int32))
    file.op("ADD", [x, x], y)
    file.op("ARG_MAX", [y, axis], z)
    found = arena(file.content({"x": x}, {"z": z}, {}))
    assert (found.layer, found.alive) == ("wide", 112 + 912)


def test_a_kernel_that_crashes_in_a_small_arena_needs_a_larger_one(monkeypatch):
    asked = []

    class Crashing:
        def __init__(self, *args):
            asked.append("new")

        def ask(self, function, content, *args):
            if function == "loads" and args[0] < 4096:
                raise RuntimeUnavailable("TensorFlow Lite Micro ended with code -11")
            return args[0] >= 5008

    monkeypatch.setattr("chipfit.runtimes.tflm.Child", Crashing)
    assert Tflm.arena(b"") == 5008 and asked.count("new") > 2


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_host_build_of_a_spotters_c_file_holds_a_file_that_gives_the_simulated_integers(kind, tmp_path):
    torch.manual_seed(0)
    frames = tones(48, 0)[0][:, :6]
    result = quantized(Spotter(kind, hidden=8).eval(), [frames[:32]], "tflm_cmsis_nn")
    file, header = (result.export(tmp_path / f"spotter{s}", batch=1, io="int8") for s in (".tflite", ".h"))
    assert host_build(header) == file.read_bytes()
    (tmp_path / "built.tflite").write_bytes(host_build(header))
    found = result.verify([frames[32:]], runtime="tflm", path=tmp_path / "built.tflite")
    assert found.exact and not found.float_ops and len(found.compared) == len(found.rows), found.summary()
