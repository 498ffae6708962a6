"""OpenVINO: what it leaves behind."""

import subprocess
import sys

import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("openvino")


def file_of(op: str, path):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, 2]) for n in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


SIGNAL_AFTER_TWO_SESSIONS = """
import faulthandler, gc, os, signal, sys
faulthandler.enable()  # signals are handled on an alternate stack
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
from chipfit.runtimes.openvino import OpenVino
first, second = OpenVino(sys.argv[1]), OpenVino(sys.argv[1])
del first; gc.collect()
del second; gc.collect()
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_after_sessions_have_ended_is_handled(tmp_path):
    path = file_of("Relu", tmp_path / "m.onnx")
    done = subprocess.run([sys.executable, "-c", SIGNAL_AFTER_TWO_SESSIONS, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
