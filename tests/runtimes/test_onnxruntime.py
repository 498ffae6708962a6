"""A loaded ONNX file: shared weights on CPUs without VNNI, codes of either sign, and what machines are told apart."""

import contextlib
import json
import types
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from chipfit.errors import RuntimeUnavailable
from chipfit.platform.load import load
from chipfit.registry import lookup
from chipfit.runtimes import onnxruntime as module
from chipfit.runtimes.onnxruntime import OnnxRuntime, has_signed_activations, read, saturates, unshare_weights

make = helper.make_node


def value(name: str, *shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, list(shape))


def model(nodes, constants, outputs=("y", "z"), inputs=("x",)):
    held = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    ends = [[value(n, None, 2) for n in names] for names in (inputs, outputs)]
    graph = helper.make_graph(nodes, "g", *ends, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def shared(kind=np.int8):
    """One weight of codes that two products read, the second twice, and a table of other codes."""
    nodes = [
        make("DequantizeLinear", ["w_q", "s", "zero"], ["w"], name="w"),
        make("DequantizeLinear", ["v_q", "s", "none"], ["v"], name="v"),
        make("MatMul", ["x", "w"], ["y"], name="first"),
        make("MatMul", ["w", "w"], ["ww"], name="second"),
        make("MatMul", ["y", "ww"], ["q"], name="third"),
        make("Add", ["q", "v"], ["p"], name="fourth"),
        make("Add", ["p", "v"], ["z"], name="fifth"),
    ]
    constants = {"w_q": np.array([[1, -2], [3, 4]], kind), "v_q": np.array([[5, 6]], np.uint8), "s": np.float32(0.5)}
    return model(nodes, {**constants, "zero": np.array(0, kind), "none": np.uint8(2)})


def test_every_reader_of_int8_weights_has_a_copy_and_computes_the_same():
    before, after = shared(), shared()
    unshare_weights(after)
    reads = {n.name: list(n.input) for n in after.graph.node}
    assert reads["first"] == ["x", "w"] and reads["second"] == ["w/second/0", "w/second/1"]
    copies = [n for n in after.graph.node if n.op_type == "DequantizeLinear"]
    assert sorted(n.name for n in copies) == ["v", "w", "w/second/0", "w/second/1"]
    held = {i.name: numpy_helper.to_array(i) for i in after.graph.initializer}
    for n in copies:
        if n.name.startswith("w/"):
            assert list(n.input) == [f"{n.name}/0", "s", f"{n.name}/2"] and list(n.output) == [n.name]
            assert np.array_equal(held[n.input[0]], held["w_q"]) and held[n.input[2]] == 0
    assert reads["fourth"][1] == reads["fifth"][1] == "v"  # of no sign: none is shifted
    onnx.checker.check_model(after)
    x = np.float32([[1, 2], [3, 4]])
    results = [onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x}) for m in (before, after)]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_a_weight_with_one_reader_stays_as_it_is():
    dequantize = make("DequantizeLinear", ["w_q", "s", "zero"], ["w"], name="w")
    constants = {"w_q": np.int8([[1, 2], [3, 4]]), "s": np.float32(0.5), "zero": np.int8(0)}
    m = model([dequantize, make("MatMul", ["x", "w"], ["y"], name="m")], constants, ["y"])
    before = m.SerializeToString()
    unshare_weights(m)
    assert m.SerializeToString() == before


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16])
def test_activations_have_a_sign_where_a_quantizers_zero_point_is_int8(kind):
    nodes = [make("QuantizeLinear", ["x", "s", "zero"], ["q"]), make("DequantizeLinear", ["q", "s", "zero"], ["y"])]
    m = model(nodes, {"s": np.float32(1), "zero": kind(0)}, ["y"])
    assert has_signed_activations(m) is (kind is np.int8)
    assert not has_signed_activations(shared())  # weights have it, no activation does


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
    def read_text(self):
        if flags is None:
            raise FileNotFoundError
        return flags

    monkeypatch.setattr(Path, "read_text", read_text)
    assert saturates() is found


def test_a_warning_is_for_platforms_that_do_not_saturate_on_machines_that_do(monkeypatch):
    platform = load("ort_cpu")
    for selected, saturating, count in (("VNNI", True, 1), ("VNNI", False, 0), ("AVX2", True, 0), ("AVX2", False, 0)):
        monkeypatch.setattr(module, "saturates", lambda s=saturating: s)
        said = OnnxRuntime.warnings(None, types.SimpleNamespace(arch_selected=selected))
        assert len(said) == count and all("session.x64quantprecision to 1" in s for s in said)
    assert platform.arch_selected == "VNNI"


@pytest.mark.parametrize("saturating", [True, False])
def test_shared_weights_compute_alike_on_either_machine(tmp_path, monkeypatch, saturating):
    """Codes of 100 and -100 times inputs of 255 are beyond 16 bits in pairs, which must not saturate."""
    monkeypatch.setattr(module, "saturates", lambda: saturating)
    nodes = [
        make("QuantizeLinear", ["x", "one", "none"], ["x_q"], name="xq"),
        make("DequantizeLinear", ["x_q", "one", "none"], ["xd"], name="xd"),
        make("DequantizeLinear", ["w_q", "one", "zero"], ["w"], name="w"),
        *(make("MatMul", ["xd", "w"], [f"m{k}"], name=f"m{k}") for k in "yz"),
        *(make("QuantizeLinear", [f"m{k}", "s", "none"], [f"{k}_q"], name=f"{k}q") for k in "yz"),
        *(make("DequantizeLinear", [f"{k}_q", "s", "none"], [k], name=k) for k in "yz"),
    ]
    constants = {"w_q": np.int8([[100, -100], [127, 1]]), "one": np.float32(1), "s": np.float32(500)}
    constants |= {"none": np.uint8(0), "zero": np.int8(0)}
    path, unshared = tmp_path / "m.onnx", []
    onnx.save(model(nodes, constants), path)
    monkeypatch.setattr(module, "unshare_weights", lambda m: [unshared.append(m), unshare_weights(m)])
    got = OnnxRuntime(path, ["y_q"]).run([np.float32([[255, 255], [2, 200]])])
    assert bool(unshared) is saturating
    assert list(got) == ["y", "z", "y_q"]
    want = np.clip(np.rint(np.array([[255, 255], [2, 200]]) @ np.array([[100, -100], [127, 1]]) / 500), 0, 255)
    assert np.array_equal(got["y"], want * 500) and np.array_equal(got["z"], want * 500)
    assert np.array_equal(got["y_q"], want)


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
