"""`Result.device_model` is the device: its outputs are the runtime's, bit for bit, on data that nobody has seen."""

from __future__ import annotations

import copy
import os
import warnings

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

os.environ.setdefault("KERAS_BACKEND", "torch")

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.registry import lookup
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
    assert not same(outputs, [x.detach().numpy() for x in tree_leaves(want) if isinstance(x, torch.Tensor)])


@pytest.mark.parametrize(("runtime", "platform"), CASES[:2], ids=[p for _, p in CASES[:2]])
@pytest.mark.parametrize("name", ["residual", "many_in_and_out", "named_inputs", "heads"])
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


def test_it_tells_which_operators_the_runtime_computes_in_float():
    model, batch = make("attention_fused")
    device = chipfit.quantize(model, [batch], progress=False).device_model
    assert {"LayerNorm", "SDPA", "Gelu", "Mean"} == set(device.float_operators)
    assert "in float: Gelu, LayerNorm, Mean, SDPA" in repr(device)
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
