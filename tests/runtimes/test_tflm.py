"""TensorFlow Lite Micro in its own process: what it refuses, and what becomes of one that crashes, hangs or prints."""

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import RuntimeUnavailable
from chipfit.registry import lookup
from chipfit.runtimes.child import Child
from tests.build import quantized, sequential

pytest.importorskip("tflite_micro")
ANSWER = """
import pickle, sys
pickle.load(sys.stdin.buffer)
{}
pickle.dump(("", 7), sys.stdout.buffer)
"""


def script(tmp_path, line: str) -> str:
    path = tmp_path / "child.py"
    path.write_text(ANSWER.format(line))
    return str(path)


def test_a_runtime_that_crashes_is_an_error_with_its_last_words(tmp_path):
    child = Child(script(tmp_path, "print('arena is full', file=sys.stderr, flush=True); import os; os.abort()"), "Toy")
    with pytest.raises(RuntimeUnavailable, match=r"^Toy ended with code -6 \(arena is full\)"):
        child.ask("run")


def test_a_runtime_that_hangs_is_stopped(tmp_path):
    child = Child(script(tmp_path, "import time; time.sleep(60)"), "Toy", limit_s=0.5)
    with pytest.raises(RuntimeUnavailable, match=r"^Toy gave no answer within 0.5 s"):
        child.ask("run")


def test_what_a_runtime_prints_is_kept_from_the_users_screen(tmp_path, capfd):
    child = Child(script(tmp_path, "print('hello', file=sys.stderr, flush=True)"), "Toy")
    assert child.ask("run") == 7
    assert child.printed() == "hello\n"
    assert capfd.readouterr() == ("", "")


def test_an_operator_that_the_runtime_lacks_is_named(tmp_path, capfd):
    result = quantized(sequential(nn.Linear(6, 4), nn.GELU()), [torch.randn(8, 6)], "tflite_int8")
    path = result.export(tmp_path / "gelu.tflite")
    with pytest.raises(RuntimeUnavailable, match=r"TensorFlow Lite Micro.*'GELU'.*Where: .*gelu\.tflite"):
        lookup("runtime", "tflm")(path)
    assert capfd.readouterr() == ("", "")


def test_sizes_of_a_file_are_fixed(tmp_path):
    net = sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    path = quantized(net, [torch.randn(8, 3, 6, 6)], "tflite_int8").export(tmp_path / "net.tflite")
    device = lookup("runtime", "tflm")(path)
    (y,) = device.run([np.zeros((5, 3, 6, 6), np.float32)]).values()
    assert y.shape[0] == 5 and device.part == 1  # sample by sample
    with pytest.raises(RuntimeUnavailable, match="do not fit the file|fixed sizes"):
        device.run([np.zeros((5, 3, 7, 6), np.float32)])


class ManyParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(46, 5)

    def forward(self, x):
        parts = [x[:, k : k + 2] for k in range(23)]
        return self.linear(torch.cat(parts[::-1], 1))


def test_more_operands_than_it_concatenates_are_concatenated_in_parts(tmp_path):
    data = [torch.randn(8, 46) for _ in range(2)]
    result = quantized(sequential(ManyParts()), data, "tflm_cmsis_nn")
    found = result.verify(data)
    assert found.exact and found.executed["CONCATENATION"] == 4  # 10, 10 and 3 of them, and these


def test_a_file_that_is_not_one_is_refused(tmp_path):
    (tmp_path / "bad.tflite").write_bytes(b"not a network at all")
    with pytest.raises(RuntimeUnavailable, match="identifier TFL3 is missing"):
        lookup("runtime", "tflm")(tmp_path / "bad.tflite")


def test_a_network_is_verified_integer_by_integer():
    torch.manual_seed(0)
    net = sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(72, 10), nn.Sigmoid()
    )
    data = [torch.randn(8, 3, 10, 10) for _ in range(2)]
    found = chipfit.quantize(net, data, platform="tflite_int8", progress=False).verify(data, runtime="tflm")
    assert found.exact and len(found.compared) == len(found.rows), found.summary()
    assert dict(found.executed)["FULLY_CONNECTED"] == 1
