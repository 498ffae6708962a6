"""LSTM, GRU and RNN of ONNX files compute what ONNX Runtime computes, and are written as they were read."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

import chipfit
from chipfit.engine.run import run
from chipfit.export.onnx.writer import export_onnx
from chipfit.frameworks import capture, load_model
from tests.onnx_models import onnx_of

T, N, F, H = 5, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def model(op, path, direction="forward", bias=True, states=0, zero_states=False, lengths=(), **attrs):
    """Write a model of one recurrent layer with all of its results; return its path."""
    rng, ways, g = np.random.default_rng(0), 2 if direction == "bidirectional" else 1, GATES[op]
    tensors = {"W": (ways, g * H, F), "R": (ways, g * H, H)} | ({"B": (ways, 2 * g * H)} if bias else {})
    tensors |= dict.fromkeys(("h", "c")[:states], (ways, N, H))
    factors = {k: 0 if zero_states and k in "hc" else 0.5 for k in tensors}
    constants = {k: (rng.normal(size=s) * factors[k]).astype("f4") for k, s in tensors.items()}
    constants |= {"lengths": np.array(lengths, "i4")} if lengths else {}
    results = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    inputs = ["X", "W", "R", "B" if bias else "", "lengths" if lengths else "", *("h", "c")[:states]]
    node = helper.make_node(op, inputs, results, hidden_size=H, direction=direction, **attrs)
    onnx.save(onnx_of(node, inputs={"X": [T, N, F]}, outputs=results, constants=constants), path)
    return path


def on_onnxruntime(path, x):
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: x})


FORMS = [
    ("LSTM", {}),
    ("LSTM", {"direction": "bidirectional", "states": 2}),
    ("LSTM", {"direction": "reverse", "bias": False}),
    ("LSTM", {"states": 2, "zero_states": True}),
    ("GRU", {"linear_before_reset": 1}),
    ("GRU", {"direction": "bidirectional"}),
    ("GRU", {"direction": "reverse", "linear_before_reset": 1, "states": 1}),
    ("RNN", {"direction": "bidirectional", "activations": ["Relu", "Tanh"]}),
    ("RNN", {"states": 1}),
    ("LSTM", {"direction": "bidirectional", "states": 2, "lengths": (5, 2, 1)}),
    ("GRU", {"direction": "reverse", "linear_before_reset": 1, "lengths": (1, 5, 3)}),
]


@pytest.mark.parametrize(("op", "form"), FORMS)
def test_a_layer_is_read_and_written_as_onnx_runtime_computes_it(op, form, tmp_path):
    path = model(op, tmp_path / "a.onnx", **form)
    x = np.random.default_rng(1).normal(size=(T, N, F)).astype("f4")
    want, graph = on_onnxruntime(path, x), capture(load_model(str(path)), (torch.from_numpy(x),))
    assert op in {n.op for n in graph.nodes} and "Opaque" not in {n.op for n in graph.nodes}
    values = run(graph, [torch.from_numpy(x)], keep=graph.outputs)
    export_onnx(graph, None, tmp_path / "b.onnx")
    again = on_onnxruntime(tmp_path / "b.onnx", x)
    assert op in {n.op_type for n in onnx.load(tmp_path / "b.onnx").graph.node}
    for w, o, written in zip(want, graph.outputs, again, strict=True):
        np.testing.assert_allclose(values[o].numpy(), w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(written, w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attrs", [{"activations": ["Sigmoid", "Relu", "Tanh"]}, {"clip": 1.0}, {"input_forget": 1}])
def test_what_the_kernels_do_not_have_stays_one_opaque_node(attrs, tmp_path):
    path = model("LSTM", tmp_path / "a.onnx", **attrs)
    x = np.random.default_rng(1).normal(size=(T, N, F)).astype("f4")
    graph = capture(load_model(str(path)), (torch.from_numpy(x),))
    assert [n.op for n in graph.nodes] == ["Opaque"]
    values = run(graph, [torch.from_numpy(x)], keep=graph.outputs)
    for w, o in zip(on_onnxruntime(path, x), graph.outputs, strict=True):
        np.testing.assert_allclose(values[o].numpy(), w, rtol=1e-4, atol=1e-6)


def test_initial_states_of_zeros_need_no_operand(tmp_path):
    graph = capture(
        load_model(str(model("LSTM", tmp_path / "a.onnx", states=2, zero_states=True))), (torch.zeros(T, N, F),)
    )
    (node,) = [n for n in graph.nodes if n.op == "LSTM"]
    assert len(node.inputs) == 5


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_sequences_whose_steps_come_first_have_their_samples_on_axis_1(op, tmp_path):
    made = onnx.load(model(op, tmp_path / "a.onnx", **({"linear_before_reset": 1} if op == "GRU" else {})))
    for axis, name in enumerate(("steps", "samples")):
        made.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    del made.graph.output[1:]
    data = [torch.from_numpy(np.random.default_rng(k).normal(size=(9, 7, F)).astype("f4")) for k in range(3)]
    result = chipfit.quantize(made, data, platform="tflite_int8", progress=False)
    assert result.graph.shape("X") == (9, None, F)
    check = result.verify(data[:1])
    assert check.exact and check.integers > 9 * 7 * H, str(check)
