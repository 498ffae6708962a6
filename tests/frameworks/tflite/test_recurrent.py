"""LSTM and SVDF of `.tflite` files: read with their states, simulated as LiteRT and TensorFlow Lite Micro compute."""

import importlib.util
import warnings

import numpy as np
import pytest
import torch

import chipfit
from chipfit.errors import CaptureError, RuntimeUnavailable

pytest.importorskip("ai_edge_litert")
from ai_edge_litert import schema_py_generated as schema

from chipfit.engine.run import run
from chipfit.frameworks.tflite.capture import capture
from chipfit.frameworks.tflite.variables import packed
from chipfit.simulate.integer import simulate
from chipfit.verify.file import read_quantized
from tests.frameworks.tflite.recurrent_files import lstm_file, svdf_file

MICRO = pytest.mark.skipif(importlib.util.find_spec("tflite_micro") is None, reason="tflite_micro is not installed")
FAMILIES = ["litert_reference", "litert", pytest.param("tflm", marks=MICRO)]


def draw(*shape, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype("f4") * 1.5)


def proof(file, data, runtime):
    """Verify a file with the platform whose kernels a runtime has."""
    platform = "tflm_cmsis_nn" if runtime == "tflm" else ""
    return chipfit.verify_file(file, data, platform=platform, runtime=runtime)


LAYERS = {
    "one sequence at a time": {},
    "three sequences": {"batch": 3, "steps": 4},
    "steps before sequences": {"batch": 2, "steps": 5, "major": True},
    "one step a call": {"steps": 1},
    "cells at their clip": {"steps": 20, "gain": 8.0, "cell": 2.0**-11, "clip": 2.0},
    "fine cells without clip": {"cell": 2.0**-15, "clip": 0.0},
    "gates beyond 16 bits": {"gain": 40.0, "steps": 12},
    "states of other scales": {"state": (0.006, 15), "hidden": (0.008, 3), "result": (0.0085, -2)},
}


@pytest.mark.parametrize("runtime", FAMILIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_an_lstm_computes_the_simulated_integers(tmp_path, layer, runtime):
    how = {"batch": 1, "steps": 7, **LAYERS[layer]}
    file = lstm_file(tmp_path / "lstm.tflite", **how)
    samples = 6 if how["batch"] == 1 else how["batch"]
    shape = (how["steps"], samples) if how.get("major") else (samples, how["steps"])
    found = proof(file, [draw(*shape, 9, seed=s) for s in range(3)], runtime)
    assert found.exact and not found.float_ops and found.integers > 300
    assert all(not h.fault for h in found.held) and len(found.held) >= 4


@pytest.mark.parametrize("runtime", FAMILIES)
def test_the_cell_state_is_compared_too(tmp_path, runtime):
    found = proof(lstm_file(tmp_path / "lstm.tflite"), [draw(6, 7, 9)], runtime)
    cells = [r for r in found.rows if r.op == "LSTM" and r.elements == 6 * 13]
    assert len(cells) == 1 and cells[0].tensor == "y.2" and not cells[0].fault


def test_curves_of_one_family_are_not_those_of_the_other(tmp_path):
    """A negative control: LiteRT computes them in fixed point, TensorFlow Lite Micro by tables."""
    found, platform = read_quantized(lstm_file(tmp_path / "lstm.tflite", steps=20))
    x, y = draw(20, 20, 9), found.graph.outputs[0]
    a, b = (simulate(found.graph, found.plan, [x], platform, kernels=k)[y] for k in ("litert_reference", "tflm"))
    assert 0 < float((a != b).float().mean()) < 0.1


@pytest.mark.parametrize("what", ["weight", "cell"])
def test_an_lstm_with_another_number_departs(tmp_path, what):
    found, platform = read_quantized(lstm_file(tmp_path / "lstm.tflite"))
    named = tmp_path / "named.tflite"
    named.write_bytes(found.content)
    if what == "weight":
        found.graph.weights["y/r"][3] += 0.3
    else:
        cell = found.plan.tensors["y.2"]
        found.plan.tensors["y.2"] = cell.with_(scale=cell.scale / 2)
    check = chipfit.verify.verify(found.graph, found.plan, platform, [draw(6, 7, 9)], path=named)
    assert check.verdict == "departs" and check.differing


def test_states_stay_from_step_to_step_of_a_stream_only(tmp_path):
    """One step a call is a stream: what the second step gives depends on the first one."""
    x = draw(6, 1, 9)
    for steps, stays in ((1, True), (2, False)):
        found, platform = read_quantized(lstm_file(tmp_path / "lstm.tflite", steps=steps))
        y, given = found.graph.outputs[0], x.expand(6, steps, 9)
        together = simulate(found.graph, found.plan, [given], platform)[y]
        alone = torch.cat([simulate(found.graph, found.plan, [row[None]], platform)[y] for row in given])
        assert bool((together != alone).any()) is stays


@pytest.mark.parametrize(
    ("runtime", "state"),
    [
        ("litert_reference", "i2"),
        ("litert", "i2"),
        pytest.param("tflm", "i2", marks=MICRO),
        pytest.param("tflm", "i1", marks=MICRO),
        pytest.param(None, "i1", marks=MICRO),  # the runtime that has a kernel for it
    ],
)
def test_an_svdf_computes_the_simulated_integers(tmp_path, runtime, state):
    found = proof(svdf_file(tmp_path / "svdf.tflite", state=state), [draw(20, 8, seed=s) for s in range(3)], runtime)
    assert found.exact and not found.float_ops and found.integers == 3 * 20 * (6 + 8)


def test_states_that_change_their_meaning_are_a_warning(tmp_path):
    how = LAYERS["states of other scales"]
    check = chipfit.verify_file(lstm_file(tmp_path / "lstm.tflite", **how), [draw(2, 7, 9)])
    assert any("rounded to scale 0.008, and read in the next step with 0.006" in w for w in check.warnings)
    assert any("rounded to scale 0.008, and read behind it with 0.0085" in w for w in check.warnings)
    assert not any("rounded" in w for w in proof(lstm_file(tmp_path / "b.tflite"), [draw(2, 7, 9)], "litert").warnings)


def test_litert_refuses_an_svdf_at_which_it_would_crash(tmp_path):
    file = svdf_file(tmp_path / "svdf.tflite", state="i1")
    with pytest.raises(RuntimeUnavailable, match=r"no kernel for SVDF with a state of 8 bits.*tflm"):
        chipfit.verify_file(file, [draw(4, 8)], runtime="litert")
    with pytest.raises(CaptureError, match="no kernel for SVDF"):
        chipfit.load_model(file)(draw(1, 8))


def test_an_lstm_with_peephole_weights_is_refused_by_name(tmp_path):
    with pytest.raises(CaptureError, match="UNIDIRECTIONAL_SEQUENCE_LSTM of 'y' has no reader: .* peephole weights"):
        read_quantized(lstm_file(tmp_path / "lstm.tflite", peephole=True))


@pytest.mark.parametrize("how", [{}, {"batch": 2}, {"batch": 3, "steps": 2, "major": True}, {"steps": 1}])
def test_a_float_lstm_computes_what_litert_computes(tmp_path, how):
    """Capture compares the graph with LiteRT, on several samples where the batch is open."""
    model = chipfit.load_model(lstm_file(tmp_path / "lstm.tflite", quantized=False, clip=0.2, **how))
    x = draw(5 if model.opens else model.inputs[0].shape[0], *model.inputs[0].shape[1:])
    graph = capture(model, [x])
    assert [n.op for n in graph.nodes].count("LSTM") == 1
    assert torch.allclose(run(graph, [x])[graph.outputs[0]], model(x), atol=2e-6)


def test_a_float_svdf_computes_what_litert_computes_step_by_step(tmp_path):
    model = chipfit.load_model(svdf_file(tmp_path / "svdf.tflite", quantized=False))
    x = draw(20, 8)
    graph = capture(model, [x])
    assert [n.op for n in graph.nodes] == ["SVDF", "Relu"]
    y = run(graph, [x])[graph.outputs[0]]
    assert torch.allclose(y, model(x), atol=1e-5) and not torch.allclose(y[5:], run(graph, [x[5:]])[graph.outputs[0]])


@pytest.mark.parametrize("runtime", ["litert", pytest.param("tflm", marks=MICRO)])
def test_a_float_file_with_an_lstm_is_quantized_step_by_step(tmp_path, runtime):
    model = chipfit.load_model(lstm_file(tmp_path / "lstm.tflite", quantized=False, steps=12, gain=0.3))
    data = [draw(8, 12, 9, seed=s) for s in range(3)]
    platform = "tflm_cmsis_nn" if runtime == "tflm" else "tflite_int8"
    found = chipfit.quantize(model, data, platform=platform, progress=False).verify(data[:1], runtime=runtime)
    assert found.exact and not found.float_ops and found.rows[-1].sqnr_db > 10


# ---------------------------------------------------------------- files of TensorFlow's converter


NETWORKS = {
    "last state": lambda k, x: k.LSTM(9)(x),
    "sequence": lambda k, x: k.Flatten()(k.LSTM(7, return_sequences=True)(x)),
    "stacked": lambda k, x: k.LSTM(5)(k.LSTM(8, return_sequences=True)(x)),
    "backwards": lambda k, x: k.LSTM(8, go_backwards=True)(x),
    "both directions": lambda k, x: k.Flatten()(k.Bidirectional(k.LSTM(6, return_sequences=True))(x)),
    "behind a convolution": lambda k, x: k.LSTM(8)(k.Conv1D(6, 3, activation="relu")(x)),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_an_lstm_of_keras_as_tensorflow_converts_it_computes_the_simulated_integers(tmp_path, name):
    tf, keras = pytest.importorskip("tensorflow"), pytest.importorskip("tf_keras")
    keras.utils.set_random_seed(len(name))
    x = keras.layers.Input((10, 6), batch_size=1)
    model = keras.Model(x, keras.layers.Dense(4, activation="softmax")(NETWORKS[name](keras.layers, x)))
    for v in model.weights:
        v.assign(v * 2.5)
    concrete = tf.function(model).get_concrete_function(tf.TensorSpec([1, 10, 6], tf.float32))
    made = tf.lite.TFLiteConverter.from_concrete_functions([concrete], model)
    made.optimizations = [tf.lite.Optimize.DEFAULT]
    made.representative_dataset = lambda: ([draw(1, 10, 6, seed=s).numpy()] for s in range(20))
    made.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    file = tmp_path / "keras.tflite"
    with warnings.catch_warnings(action="ignore"):
        file.write_bytes(made.convert())
    for runtime in ["litert_reference", "litert", *(["tflm"] if importlib.util.find_spec("tflite_micro") else [])]:
        found = proof(file, [draw(5, 10, 6, seed=99)], runtime)
        assert found.exact and "LSTM" not in found.float_ops


@pytest.mark.parametrize("quantized", [False, True])
def test_variables_of_a_streaming_network_become_states(tmp_path, quantized):
    """A window of samples, as networks for wake words have them: its first three are those of the calls before."""
    tf = pytest.importorskip("tensorflow")
    net, steps, kernel = tf.Module(), draw(24, 1, 2, 4), draw(4, 1, 4, 5, seed=1).numpy()
    net.window = tf.Variable(tf.zeros((1, 3, 2, 4)))

    @tf.function(input_signature=[tf.TensorSpec((1, 1, 2, 4))])
    def step(x):
        seen = tf.concat([net.window, x], 1)
        net.window.assign(seen[:, 1:])
        return tf.nn.conv2d(seen, kernel, 1, "VALID")

    tf.saved_model.save(net, tmp_path / "saved", signatures=step)
    made = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "saved"))
    if quantized:
        made.optimizations, made._experimental_variable_quantization = [tf.lite.Optimize.DEFAULT], True
        made.representative_dataset = lambda: ([x[None].numpy()] for x in steps)
        made.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    file, data = tmp_path / "stream.tflite", [steps[:20], steps[20:]]
    with warnings.catch_warnings(action="ignore"):
        file.write_bytes(made.convert())
    model = chipfit.load_model(file)
    _, window = next(model.steps(data))
    assert torch.allclose(window[19], steps[16:19, 0], atol=0.03)
    proof = chipfit.verify_file if quantized else chipfit.quantize(file, data, "tflite_int8", progress=False).verify
    found = proof(file, data) if quantized else proof(data)
    assert found.exact and not found.float_ops and found.rows[-1].sqnr_db > 30
    table = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.read_bytes(), 0))
    step, first = table.subgraphs
    start = table.buffers[first.tensors[first.operators[-1].inputs[1]].buffer]
    zeros, start.data, broken = start.data, start.data + 1, tmp_path / "broken.tflite"
    broken.write_bytes(packed(table))
    with pytest.raises(CaptureError, match="does not start from zeros.*Got: [a-zA-Z]"):
        chipfit.load_model(broken)
    codes = [c.builtinCode for c in table.operatorCodes]
    reads = [op for op in step.operators if codes[op.opcodeIndex] == schema.BuiltinOperator.READ_VARIABLE]
    reads[0].inputs, start.data = step.inputs, zeros
    broken.write_bytes(packed(table))
    with pytest.raises(CaptureError, match="not a .tflite file that LiteRT can run"):
        chipfit.load_model(broken)
