"""From a Keras model to a verified file: everything that a user does, on every backend."""

import warnings

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers  # noqa: E402 -- after the import that may skip
from typer.testing import CliRunner  # noqa: E402

import chipfit  # noqa: E402
from chipfit.cli.app import app  # noqa: E402
from chipfit.errors import CaptureError, PlanError, UnsupportedError  # noqa: E402
from chipfit.plan.diff import diff  # noqa: E402
from tests.frameworks.keras.test_lower import flat, quantized  # noqa: E402
from tests.keras_zoo import make  # noqa: E402
from tests.processes import LEAN, python  # noqa: E402


def on(backend):
    return keras.backend.backend() == backend


def test_the_file_computes_the_simulated_integers():
    result, batch = quantized("mobilenet")
    labels = np.argmax(result.model.run_flat(flat(batch))[0].numpy(), 1)
    found = result.verify([(batch, labels)])
    assert found.exact and found.integers > 5000
    assert found.accuracy["simulated"] == found.accuracy["device"] == 1


def test_one_hot_labels_count_too():
    result, batch = quantized("mobilenet")
    labels = np.eye(4, dtype="float32")[np.argmax(result.model.run_flat(flat(batch))[0].numpy(), 1)]
    assert result.verify([(batch, labels)]).accuracy["device"] == 1


def test_the_file_takes_images_as_the_model_does(tmp_path):
    import onnx

    path = quantized("residual")[0].export(tmp_path / "model.onnx")
    (given,) = onnx.load(path).graph.input
    assert given.name == "image" and [d.dim_value for d in given.type.tensor_type.shape.dim][1:] == [8, 8, 3]


@pytest.mark.parametrize("name", ["residual", "recurrent", "named_inputs"])
def test_a_saved_result_is_the_same_model(name, tmp_path):
    result, batch = quantized(name)
    result.save(tmp_path / "saved")
    loaded = chipfit.load(tmp_path / "saved")
    assert not diff(loaded.plan, result.plan)
    for a, b in zip(loaded.model.run_flat(flat(batch)), result.model.run_flat(flat(batch)), strict=True):
        assert torch.equal(a, b)


def test_lint_needs_no_data():
    found = chipfit.lint(make("residual")[0], np.zeros((1, 8, 8, 3), "float32"))
    assert {n.exec for n in found.rows if n.op == "Conv2D"} == {"int"}


def test_data_may_come_as_keras_users_have_them():
    model, batch = make("residual")
    labels = np.zeros(4, "int64")

    class Set(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return batch, labels

    forms = [batch, [batch], [(batch, labels)], Set(), [keras.ops.convert_to_tensor(batch)]]
    if on("tensorflow"):
        import tensorflow as tf

        forms.append(tf.data.Dataset.from_tensor_slices((batch, labels)).batch(4))
    first, *others = [chipfit.quantize(model, data, progress=False).plan for data in forms]
    assert all(not diff(first, p) for p in others)


def test_an_opaque_layer_is_said_to_run_in_float():
    result, _ = quantized("recurrent")
    assert result.plan.nodes["lstm"].exec == "float" and result.plan.nodes["lstm"].why
    assert "lstm" in str(result.report.to_dict())


@keras.saving.register_keras_serializable("tests")
class Spectrum(layers.Layer):
    """A layer whose transform has two results."""

    def call(self, x):
        return keras.ops.fft2((x, keras.ops.zeros_like(x)))[0]


def test_an_opaque_layer_with_two_results_is_simulated():
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(2, 3), Spectrum(), layers.Flatten(), layers.Dense(2)]
    )
    data = [torch.randn(2, 8, 8, 3)]
    result = chipfit.quantize(model, data, platform="tflite_int8", progress=False)
    assert tuple(result.model(data[0]).shape) == (2, 2)


def test_a_file_with_an_opaque_layer_needs_the_torch_backend(tmp_path):
    result, batch = quantized("recurrent")
    if on("torch"):
        assert result.verify([batch]).exact
    else:
        with pytest.raises(UnsupportedError, match=r"'LSTM' of 'lstm' has no ONNX form.*KERAS_BACKEND=torch"):
            result.export(tmp_path / "model.onnx")


def test_a_custom_layer_without_a_configuration_runs_in_float():
    class Odd(layers.Layer):
        """Its argument has no JSON form, and its code cannot be traced."""

        def __init__(self, f):
            super().__init__(name="odd")
            self.f = f

        def call(self, x):
            return self.f(x) if isinstance(x, keras.KerasTensor) else keras.ops.tanh(x)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    v = keras.Input((4,))
    model = keras.Model(v, layers.Dense(2, name="tail")(Odd(object())(layers.Dense(3, name="head")(v))))
    x = np.ones((2, 4), "float32")
    result = chipfit.quantize(model, [x], progress=False)
    assert result.plan.nodes["odd"].op == "Opaque" and result.plan.nodes["odd"].exec == "float"
    assert result.model.run_flat([torch.from_numpy(x)])[0].shape == (2, 2)


# ---------------------------------------------------------------- the command line


def run(*args):
    return CliRunner().invoke(app, list(args), catch_exceptions=True, env={"COLUMNS": "200"})


def test_the_command_line_takes_a_keras_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, batch = make("residual")
    model.save("model.keras")
    np.savez("data.npz", x=batch, y=np.zeros(4, "int64"))
    done = run("quantize", "model.keras", "--data", "data.npz", "--out", "out")
    assert done.exit_code == 0, (done.output, done.exception)
    assert run("verify", "out", "--data", "data.npz").exit_code == 0
    done = run("lint", "model.keras")
    assert done.exit_code == 0 and "operators can run in integers" in done.output, (done.output, done.exception)


def test_a_folder_of_images_is_read_channels_last(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for k in range(2):
        Image.fromarray(np.random.default_rng(k).integers(0, 255, (10, 9, 3), dtype="uint8")).save(
            tmp_path / "images" / f"{k}.png"
        )
    make("residual")[0].save("model.keras")
    done = run("quantize", "model.keras", "--data", "images", "--input-size", "8", "--out", "out", "--no-verify")
    assert done.exit_code == 0, (done.output, done.exception)


def test_a_damaged_file_is_refused(tmp_path):
    make("residual")[0].save(tmp_path / "model.keras")
    data = bytearray((tmp_path / "model.keras").read_bytes())
    data[100:2000] = bytes(1900)
    (tmp_path / "model.keras").write_bytes(data)
    done = run("lint", str(tmp_path / "model.keras"))
    assert isinstance(done.exception, CaptureError) and "not a Keras model that can be loaded" in str(done.exception)
    done = run("lint", str(tmp_path / "nowhere.keras"))
    assert isinstance(done.exception, CaptureError) and "does not exist" in str(done.exception)


def test_code_in_a_file_is_never_executed(tmp_path):
    v = keras.Input((4,))
    model = keras.Model(v, layers.Dense(2)(layers.Lambda(lambda x: x * 2)(v)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of lambdas
        model.save(tmp_path / "model.keras")
    done = run("lint", str(tmp_path / "model.keras"))
    assert isinstance(done.exception, CaptureError) and "lambdas are never executed" in str(done.exception)


# ---------------------------------------------------------------- what loads what


@pytest.mark.skipif(not on("torch"), reason="the backend does not matter")
def test_a_torch_user_never_loads_keras():
    code = """
import sys, torch, chipfit
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU())
x = [torch.randn(2, 1, 6, 6)]
result = chipfit.quantize(model, x, progress=False)
result.model(x[0]); result.verify(x); result.report.to_dict()
print(sorted({"keras", "tensorflow", "jax", "tf_keras"} & set(sys.modules)))
"""
    assert python(code).stdout == "[]\n"


@pytest.mark.skipif(not on("torch"), reason="the backend does not matter")
@pytest.mark.parametrize("backend, hidden", [("jax", "jax"), ("mxnet", "")])
def test_a_backend_that_is_not_there_is_an_error_with_a_way_out(backend, hidden, tmp_path):
    make("residual")[0].save(tmp_path / "model.keras")
    code = f"""
import sys
sys.modules[{hidden!r}] = None
from chipfit.frameworks import load
try: load({str(tmp_path / "model.keras")!r})
except Exception as e: print(type(e).__name__, e)
"""
    said = python(code, KERAS_BACKEND=backend).stdout
    assert (
        said.startswith("CaptureError Keras cannot be imported")
        and "set KERAS_BACKEND to a backend that is installed" in said
    )


@pytest.mark.skipif(not on("torch"), reason="the backend does not matter")
def test_a_file_is_loaded_on_torch_unless_the_configured_backend_is_installed(tmp_path):
    """Keras writes such a file when it is first imported: it names TensorFlow, installed or not."""
    make("residual")[0].save(tmp_path / "model.keras")
    quantized("residual")[0].save(tmp_path / "saved")
    (tmp_path / "keras.json").write_text('{"backend": "absent"}')
    for name, call in (("model.keras", "chipfit.load_model"), ("saved", "chipfit.load")):
        code = f"""
import chipfit
{call}({str(tmp_path / name)!r})
import keras
print(keras.backend.backend())
"""
        done = python(LEAN + code, KERAS_BACKEND=None, KERAS_HOME=str(tmp_path), HOME=str(tmp_path))
        assert done.stdout.endswith("torch\n"), (name, done.stderr)


def test_every_layer_can_be_named_although_it_is_joined_folded_or_computes_nothing():
    image = keras.Input((8, 8, 3))
    x = layers.Rescaling(1 / 255, name="scale")(image)
    x = layers.BatchNormalization(name="norm")(layers.Conv2D(4, 3, name="conv", use_bias=False)(x))
    x = layers.Multiply(name="gate")([x, layers.Activation("tanh", name="tanh")(layers.Activation("softplus")(x))])
    x = layers.GaussianNoise(0.1, name="noise")(layers.Identity(name="same")(x))
    model = keras.Model(image, layers.Dense(2, name="head")(layers.Flatten(name="flat")(x)))
    data = [255 * np.random.default_rng(0).random((4, 8, 8, 3), dtype=np.float32)]
    result = chipfit.quantize(model, data, "tflite_int8", progress=False)
    (curve,) = [n.layer for n in result.graph.nodes if n.op == "Curve"]
    for name, kept in {"scale": "conv", "norm": "conv", "tanh": curve, "gate": curve, "activation*": curve}.items():
        edited = result.edit({name: "float"})
        floats = [n for n in edited.graph.nodes if edited.plan.nodes[n.name].exec == "float"]
        assert {n.layer for n in floats if not n.facts.moves} == {kept}
    for name in ("noise", "same"):
        with pytest.raises(PlanError, match=f"Nothing is left of '{name}'"):
            result.edit({name: "float"})
