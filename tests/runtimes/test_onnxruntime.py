"""A loaded ONNX file: its tensors, its notes, and what machines are told apart."""

import contextlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from chipfit.errors import RuntimeUnavailable
from chipfit.platform.load import load
from chipfit.registry import lookup
from chipfit.runtimes import onnxruntime as module
from chipfit.runtimes.onnxruntime import OnnxRuntime, read, saturates
from tests.onnx_models import onnx_node, onnx_of

make = helper.make_node


def value(name: str, *shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, list(shape))


def model(nodes, constants, outputs=("y", "z"), inputs=("x",)):
    ends = (dict.fromkeys(names, (None, 2)) for names in (inputs, outputs))
    return onnx_of(*nodes, **dict(zip(("inputs", "outputs"), ends, strict=True)), constants=constants)


def shared(kind=np.int8):
    """One weight of codes that two products read, the second twice, and a table of other codes."""
    nodes = [
        onnx_node("w = DequantizeLinear(w_q, s, zero)", name="w"),
        onnx_node("v = DequantizeLinear(v_q, s, none)", name="v"),
        onnx_node("y = MatMul(x, w)", name="first"),
        onnx_node("ww = MatMul(w, w)", name="second"),
        onnx_node("q = MatMul(y, ww)", name="third"),
        onnx_node("p = Add(q, v)", name="fourth"),
        onnx_node("z = Add(p, v)", name="fifth"),
    ]
    constants = {"w_q": np.array([[1, -2], [3, 4]], kind), "v_q": np.array([[5, 6]], np.uint8), "s": np.float32(0.5)}
    return model(nodes, {**constants, "zero": np.array(0, kind), "none": np.uint8(2)})


@pytest.mark.parametrize(
    "flags, found",
    [
        ("flags : fpu avx2", True),
        ("flags : fpu avx512_vnni", False),
        ("flags : avx_vnni avx2", False),
        ("Features : asimd", False),
        (None, False),  # unknown
    ],
)
def test_a_cpu_without_vnni_saturates(monkeypatch, flags, found):
    def read_text(self, **_):
        if flags is None:
            raise FileNotFoundError
        return flags

    monkeypatch.setattr(Path, "read_text", read_text)
    assert saturates() is found


def test_a_warning_is_for_platforms_that_do_not_saturate_on_machines_that_do(monkeypatch, tmp_path):
    onnx.save(shared(), path := tmp_path / "m.onnx")
    runtime = OnnxRuntime(path)
    for selected, saturating, count in (("VNNI", True, 1), ("VNNI", False, 0), ("AVX2", True, 0), ("AVX2", False, 0)):
        monkeypatch.setattr(module, "saturates", lambda s=saturating: s)
        said = runtime.warnings(load(f"ort_cpu@{selected}"))
        assert len(said) == count and all("'ort_cpu@VNNI'; quantize for 'ort_cpu'" in s for s in said)


def test_names_that_the_file_does_not_make_are_left_out(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(shared(), path)
    assert [o.name for o in read(path, ["ww", "y", "x", "other"]).graph.output] == ["y", "z", "ww"]


def noted(tmp_path, notes: str) -> Path:
    m = shared()
    helper.set_model_props(m, {"chipfit.io": notes})
    onnx.save(m, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def codes(end: str, name: str, kind: str = "int8", scale: str = "0.5", zero: str = "0") -> str:
    return json.dumps({end: {name: {"type": kind, "scale": float(scale), "zero_point": json.loads(zero), "own": True}}})


@pytest.mark.parametrize(
    "note, words",
    [
        (("outputs", "y"), ""),
        (("outputs", "z"), ""),
        (("inputs", "x"), ""),
        (("outputs", "y", "uint16", "1e-38", "65536"), ""),
        (("outputs", "y", "int16", "1e38", "-65536"), ""),
        (("outputs", "y", "int32"), "malformed"),
        (("outputs", "y", "int8", "9e-39"), "malformed"),
        (("outputs", "y", "int8", "1.1e38"), "malformed"),
        (("outputs", "y", "int8", "0.5", "65537"), "malformed"),
        (("outputs", "y", "int8", "0.5", "-65537"), "malformed"),
        (("outputs", "y", "int8", "0.5", "0.5"), "malformed"),
        (("outputs", "x"), "do not fit"),
        (("inputs", "y"), "do not fit"),
    ],
)
def test_integers_of_inputs_and_outputs_are_as_the_notes_say(tmp_path, note, words):
    path = noted(tmp_path, codes(*note))
    with pytest.raises(RuntimeUnavailable, match=words) if words else contextlib.nullcontext():
        OnnxRuntime(path)


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(range(256)) * 8, None])
@pytest.mark.parametrize("runtime, suffix", [("onnxruntime", "onnx"), ("openvino", "onnx"), ("litert", "tflite")])
def test_a_deployed_file_of_garbage_is_refused(tmp_path, content, runtime, suffix):
    file = tmp_path / f"m.{suffix}"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RuntimeUnavailable, match="TensorFlow Lite|not an ONNX model|refuses|does not exist") as e:
        lookup("runtime", runtime)(file, [])
    assert str(file) in e.value.where
