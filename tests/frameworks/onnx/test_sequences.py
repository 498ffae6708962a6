"""Sequences of tensors in ONNX files are read as their tensors, or refused by the operator that has no equivalent."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from chipfit.errors import CaptureError
from chipfit.frameworks import capture, load_model
from tests.build import quantized, randn

#: body of a model of x [N, 6] with the output y
MODELS = {
    "parts of given sizes": """
        sizes = Constant <value = int64[2] {2, 4}> ()
        s = SplitToSequence <axis = 1> (x, sizes)
        a = SequenceAt (s, zero)
        b = SequenceAt (s, last)
        c = ReduceSum <keepdims = 1> (b, one)
        y = Add (a, c)""",
    "parts of one size": """
        size = Constant <value = int64 {4}> ()
        s = SplitToSequence <axis = 1> (x, size)
        y = ConcatFromSequence <axis = -1> (s)""",
    "elements, without their axis": """
        s = SplitToSequence <axis = 1, keepdims = 0> (x)
        t = SequenceErase (s, zero)
        y = ConcatFromSequence <axis = 1, new_axis = 1> (t)""",
    "what is inserted": """
        e = SequenceEmpty ()
        a = Relu (x)
        s = SequenceInsert (e, a)
        t = SequenceInsert (s, x, zero)
        n = SequenceLength (t)
        f = Cast <to = 1> (n)
        u = Identity (t)
        z = ConcatFromSequence <axis = 1> (u)
        y = Mul (z, f)""",
    "what a loop collects": """
        e = SequenceEmpty ()
        two = Constant <value = int64 {2}> ()
        yes = Constant <value = bool {1}> ()
        s, w = Loop (two, yes, e, x) <body = step (int64 i, bool c, seq(float) before, float[N, 6] v)
            => (bool d, seq(float) after, float[N, 6] next) {
                d = Identity (c)
                next = Relu (v)
                after = SequenceInsert (before, next)
            }>
        y = ConcatFromSequence <axis = 1> (s)""",
}


def model(body, tmp_path):
    first = "zero = Constant <value = int64 {0}> ()\nlast = Constant <value = int64 {-1}> ()\n"
    first += "one = Constant <value = int64[1] {1}> ()\n"
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[N, 6] x) => (float[N, M] y) {{ {first} {body} }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_is_its_tensors(name, tmp_path):
    path, x = model(MODELS[name], tmp_path), randn(3, 6, seed=1)
    result = quantized(load_model(str(path)), [randn(4, 6), x])
    assert "Opaque" not in {n.op for n in result.graph.nodes} and result.verify([x]).exact
    (want,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    (got,) = torch.utils._pytree.tree_leaves(result.model.eval()(x))
    np.testing.assert_allclose(got.detach().numpy(), want, atol=0.05 * np.abs(want).max())


UNKNOWN = {
    "a place that data decide": """
        f = Cast <to = 7> (x)
        k = ReduceMax <keepdims = 0> (f)
        s = SplitToSequence <axis = 1> (x)
        y = SequenceAt (s, k)""",
    "a place that there is not": """
        far = Constant <value = int64 {9}> ()
        s = SplitToSequence <axis = 1> (x)
        y = SequenceAt (s, far)""",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_tensors_that_are_not_known_are_refused_by_the_operator(name, tmp_path):
    words = "lacks a tensor that 'SequenceAt' reads" if "is not" in name else "is not known before the model runs"
    with pytest.raises(CaptureError, match=rf"{words}.*tensors themselves"):
        capture(load_model(str(model(UNKNOWN[name], tmp_path))), (randn(3, 6),))


def test_a_sequence_of_samples_fixes_the_batch(tmp_path):
    path = model("s = SplitToSequence <axis = 0> (x)\ny = ConcatFromSequence <axis = 1> (s)", tmp_path)
    assert capture(load_model(str(path)), (randn(3, 6),)).shape("x") == (3, 6)


def test_a_sequence_is_no_output(tmp_path):
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 6] x) => (seq(float) s) {'
    onnx.save(onnx.parser.parse_model(text + "s = SequenceConstruct (x, x) }"), tmp_path / "m.onnx")
    with pytest.raises(CaptureError, match="Output 's' is a sequence of tensors"):
        capture(load_model(str(tmp_path / "m.onnx")), (randn(3, 6),))


@pytest.mark.parametrize("kind", ["SplitToSequence", "ConcatFromSequence <axis = 1>", "SequenceAt", "Shape", "Relu"])
def test_operators_with_operands_of_another_kind_are_refused(kind, tmp_path):
    given = "(x)" if kind.startswith("Concat") else "(x, zero)" if kind == "SequenceAt" else "(s)"
    path = model(f"s = SequenceConstruct (x, x)\ny = {kind} {given}", tmp_path)
    with pytest.raises(CaptureError):
        capture(load_model(str(path)), (randn(3, 6),))
