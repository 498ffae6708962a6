"""OpenVINO: what it leaves behind."""

import onnx
import pytest

from tests.onnx_models import onnx_of
from tests.processes import python

pytest.importorskip("openvino")


def file_of(op: str, path):
    onnx.save(onnx_of(f"y = {op}(x)", inputs={"x": [None, 2]}, outputs={"y": [None, 2]}), path)
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
    done = python(SIGNAL_AFTER_TWO_SESSIONS, path)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
