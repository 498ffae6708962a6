"""Export under MCT's names: which file each pair of formats writes, and that it computes what the model computes."""

import inspect

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import chipfit
from chipfit import errors
from chipfit.exporter import (
    KerasExportSerializationFormat,
    PytorchExportSerializationFormat,
    QuantizationFormat,
    keras_export_model,
    pytorch_export_model,
)
from tests.build import randn, sequential

ONNX, SCRIPT = PytorchExportSerializationFormat.ONNX, PytorchExportSerializationFormat.TORCHSCRIPT
FAKE, INT8, MCTQ = QuantizationFormat


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model, batch = sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)), randn(4, 3, 8, 8)
    return chipfit.pytorch_post_training_quantization(model, lambda: iter([[batch]]))[0], batch


def test_names_and_arguments_are_those_of_mct():
    assert chipfit.exporter.pytorch_export_model is pytorch_export_model
    shared = ["is_layer_exportable_fn", "serialization_format", "quantization_format"]
    assert [*inspect.signature(keras_export_model).parameters] == ["model", "save_model_path", *shared]
    expected = ["model", "save_model_path", "repr_dataset", *shared, "onnx_opset_version"]
    parameters = inspect.signature(pytorch_export_model).parameters
    assert [*parameters] == expected and parameters["onnx_opset_version"].default == 15
    assert [f.value for f in QuantizationFormat] == [0, 1, 2]
    assert [f.name for f in KerasExportSerializationFormat] == ["KERAS", "TFLITE"]


@pytest.mark.parametrize("quantized, name", [(FAKE, "m.onnx"), (INT8, "m.onnx"), (FAKE, "m.bin"), (MCTQ, "m.onnx")])
def test_an_onnx_file_of_any_suffix_computes_what_the_model_computes(net, quantized, name, tmp_path):
    model, batch = net
    options = onnxruntime.SessionOptions()
    if quantized is MCTQ:
        options = pytest.importorskip("mct_quantizers").get_ort_session_options()
    options.add_session_config_entry("session.x64quantprecision", "1")  # weights of 8 bits saturate on some CPUs
    pytorch_export_model(model, str(tmp_path / name), lambda: iter([[batch]]), quantization_format=quantized)
    session = onnxruntime.InferenceSession((tmp_path / name).read_bytes(), options)
    got = session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0]
    np.testing.assert_allclose(got, model(batch).detach().numpy(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_file_computes_what_the_model_computes(net, tmp_path):
    model, batch = net
    seen = []
    pytorch_export_model(model, tmp_path / "m.pt", None, seen.append, SCRIPT, FAKE)
    assert torch.equal(torch.jit.load(str(tmp_path / "m.pt"))(batch), model(batch))
    assert seen == [*model.children()]


def test_the_opset_of_onnx_files_can_be_chosen(net, tmp_path):
    pytorch_export_model(net[0], tmp_path / "m.onnx", quantization_format=FAKE, onnx_opset_version=17)
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 17


def test_a_trained_and_finalized_model_is_exported(net, tmp_path):
    batch = net[1]
    model, _ = chipfit.pytorch_quantization_aware_training_init(
        sequential(nn.Flatten(), nn.Linear(192, 2)), lambda: [[batch]]
    )
    final = chipfit.pytorch_quantization_aware_training_finalize(model)
    pytorch_export_model(final, tmp_path / "m.onnx", quantization_format=INT8)
    assert (tmp_path / "m.onnx").exists()


def test_a_model_that_trained_since_is_refused(net, tmp_path):
    batch = net[1]
    model, information = chipfit.pytorch_post_training_quantization(
        sequential(nn.Flatten(), nn.Linear(192, 2)), lambda: iter([[batch]])
    )
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    with pytest.raises(errors.PlanError, match="trained"):
        pytorch_export_model(model, tmp_path / "m.onnx", quantization_format=FAKE)
    information.result.trained().export(tmp_path / "m.onnx", format="fake")


@pytest.mark.parametrize(
    "form, quantized, message",
    [
        (SCRIPT, INT8, "TORCHSCRIPT files have no such quantization format.*Got: INT8.*Allowed: FAKELY_QUANT"),
        (ONNX, "mctq", "Got: 'mctq'.*Allowed: FAKELY_QUANT, INT8, MCTQ"),
        ("onnx", FAKE, "serialization_format"),
    ],
)
def test_a_pair_without_a_file_is_refused(net, form, quantized, message, tmp_path):
    with pytest.raises(errors.ConfigError, match=message):
        pytorch_export_model(net[0], tmp_path / "m", None, None, form, quantized)


def test_a_model_of_no_facade_is_refused(tmp_path):
    with pytest.raises(errors.PlanError, match="does not come from a facade"):
        pytorch_export_model(nn.Linear(2, 2), tmp_path / "m.onnx")
