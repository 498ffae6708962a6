"""`Result.device_model` is the device: its outputs are the runtime's, bit for bit, on data that nobody has seen."""

import concurrent.futures
import copy
import io
import multiprocessing
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.registry import lookup
from tests.build import quantized
from tests.zoo import make, unseen


def of_onnx_runtime(result, inputs, folder):
    device = lookup("runtime", "onnxruntime")(result.export(folder / "m.onnx"))
    return list(device.run([x.numpy() for x in inputs]).values())


def of_litert(result, inputs, folder):
    """LiteRT as a user calls it, on a file in the model's own layout."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(result.export(folder / "m.tflite", keep_layout=True)))
    run = interpreter.get_signature_runner()
    found = run(**{name: x.numpy() for name, x in zip(result.graph.inputs, inputs, strict=True)})
    from chipfit.export.io_spec import output_names

    return [found[name] for name in output_names(result.graph)]


CASES = [(of_onnx_runtime, "ort_cpu"), (of_litert, "tflite_int8"), (of_litert, "tflite_int16x8")]


def same(a, b):
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(map(np.ascontiguousarray, a), map(np.ascontiguousarray, b), strict=True)
    )


@pytest.mark.parametrize(("runtime", "platform"), CASES, ids=[p for _, p in CASES])
@pytest.mark.parametrize("name", ["residual", "squeeze_excite", "dict_out", "unet_nearest", "mlp", "residual_gelu"])
def test_its_outputs_are_the_runtimes_bit_for_bit(tmp_path, name, runtime, platform):
    pytest.importorskip("onnxruntime" if runtime is of_onnx_runtime else "ai_edge_litert")
    model, batch = make(name)
    result = chipfit.quantize(model, [batch], platform=platform, progress=False)
    device, new = result.device_model, unseen(batch)
    got, want = device(new), model(new)
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(want)
    outputs = [x.numpy() for x in tree_leaves(got) if isinstance(x, torch.Tensor)]
    assert same(outputs, runtime(result, tree_leaves(new), tmp_path))
    arrays = device(tree_map_only(torch.Tensor, lambda x: x.numpy(), new))
    assert same([x.numpy() for x in tree_leaves(arrays) if isinstance(x, torch.Tensor)], outputs)
    assert not same(outputs, [x.detach().numpy() for x in tree_leaves(want) if isinstance(x, torch.Tensor)])


@pytest.mark.parametrize(("runtime", "platform"), CASES[:2], ids=[p for _, p in CASES[:2]])
def test_parts_that_float_operators_join_are_the_runtimes_but_for_the_last_bits(tmp_path, runtime, platform):
    pytest.importorskip("keras")
    pytest.importorskip("onnxruntime" if runtime is of_onnx_runtime else "ai_edge_litert")
    from tests.keras_zoo import make as make_keras

    model, batch = make_keras("heads")
    result = chipfit.quantize(model, [batch], platform=platform, progress=False)
    new = np.concatenate((batch, batch[::-1])) * np.float32(0.9)
    (want,) = runtime(result, [torch.from_numpy(new)], tmp_path)
    got = np.asarray(result.device_model.predict(new, verbose=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-7)
    assert np.abs(want - np.asarray(model.predict(new, verbose=0))).max() > 1e-3


@pytest.mark.parametrize(("runtime", "platform"), CASES[:2], ids=[p for _, p in CASES[:2]])
@pytest.mark.parametrize("name", ["residual", "many_in_and_out", "named_inputs"])
def test_its_outputs_are_the_runtimes_for_keras_models_too(tmp_path, name, runtime, platform):
    keras = pytest.importorskip("keras")
    pytest.importorskip("onnxruntime" if runtime is of_onnx_runtime else "ai_edge_litert")
    from tests.keras_zoo import make as make_keras

    model, batch = make_keras(name)
    result = chipfit.quantize(model, [batch], platform=platform, progress=False)
    new = keras.tree.map_structure(lambda x: np.concatenate((x, x[::-1])) * np.float32(0.9), batch)
    new = list(new) if isinstance(new, tuple) else new
    got, want = result.device_model(new), model(new)
    keras.tree.assert_same_structure(got, want)
    outputs = [keras.ops.convert_to_numpy(x) for x in keras.tree.flatten(got)]
    flat = new.values() if isinstance(new, dict) else keras.tree.flatten(new)
    inputs = [torch.from_numpy(np.asarray(x)) for x in flat]
    assert same(outputs, runtime(result, inputs, tmp_path))
    predicted = result.device_model.predict(new, batch_size=3, verbose=0)
    assert same([np.asarray(x) for x in keras.tree.flatten(predicted)], outputs)


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
def test_its_pickled_copies_compute_the_same(platform):
    model, batch = make("dict_out")
    device = chipfit.quantize(model, [batch], platform=platform, progress=False).device_model
    want = device(batch)
    file = io.BytesIO()
    torch.save(device, file)
    file.seek(0)
    copies = copy.deepcopy(device), pickle.loads(pickle.dumps(device)), torch.load(file, weights_only=False)
    for again in copies:
        assert repr(again) == repr(device)
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(again(batch)), tree_leaves(want), strict=True))


def test_it_runs_in_a_worker_process():
    model, batch = make("mlp")
    device = chipfit.quantize(model, [batch], progress=False).device_model
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
        assert torch.equal(workers.submit(device, batch).result(), device(batch))


def test_a_device_model_of_keras_can_be_pickled():
    keras = pytest.importorskip("keras")
    from tests.keras_zoo import make as make_keras

    model, batch = make_keras("residual")
    device = chipfit.quantize(model, [batch], progress=False).device_model
    got = pickle.loads(pickle.dumps(device))(batch)
    assert same([keras.ops.convert_to_numpy(got)], [keras.ops.convert_to_numpy(device(batch))])


def test_it_tells_which_operators_the_runtime_computes_in_float():
    model, batch = make("attention_fused")
    device = chipfit.quantize(model, [batch], progress=False).device_model
    assert {"LayerNorm", "SDPA", "Gelu", "Mean"} == set(device.float_operators)
    assert "in float: Gelu, LayerNorm, Mean, SDPA" in repr(device)
    integers = quantized(torch.nn.Conv2d(3, 4, 3), torch.randn(8, 3, 6, 6)).device_model
    assert integers.float_operators == () and "in float: nothing" in repr(integers)
    assert not list(device.parameters()) and not device.training
    assert torch.equal(copy.deepcopy(device)(batch), device(batch))


def test_it_warns_where_no_runtime_proves_the_platform_and_refuses_where_nothing_is_known():
    model, batch = make("mlp")
    with pytest.warns(UserWarning, match="No runtime proves 'qnnpack'"):
        device = chipfit.quantize(model, [batch], platform="qnnpack", progress=False).device_model
    assert device(batch).shape == model(batch).shape
    with pytest.raises(UnsupportedError, match="no verified arithmetic"):
        chipfit.quantize(model, [batch], platform="qnn_htp", progress=False).device_model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chipfit.quantize(model, [batch], platform="ort_cpu", progress=False).device_model
