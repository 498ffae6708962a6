"""A Keras file is read as data: it makes layers of Keras, and calls nothing else that it names."""

import json
import zipfile

import keras
import pytest
import torch
from torch import nn

from chipfit import load
from chipfit.cli.inputs import load_model
from chipfit.errors import CaptureError, GraphError
from chipfit.frameworks import load_keras
from tests.build import model_of, quantized, randn, rezipped, tampered


@pytest.fixture
def keras_file(tmp_path):
    x = keras.Input((4,), name="x")
    y = keras.layers.Dense(4, activation="relu", kernel_regularizer="l2")(x)
    keras.Model(x, keras.layers.GRU(3)(keras.layers.Reshape((2, 2))(y))).save(tmp_path / "m.keras")
    return tmp_path / "m.keras"


def layer(module, name, config=None, registered=None):
    return {"module": module, "class_name": name, "config": config or {}, "registered_name": registered}


def function(module, name):
    return {"module": module, "class_name": "function", "config": name, "registered_name": "function"}


CODE = "4wEAAAAAAAAAAAAAAAEAAAADAAAA8wYAAACXAGQAUwApAU7p"
KERAS = {
    "a foreign class": layer("trap", "Thing"),
    "a foreign class as Keras's": layer("keras.trap", "Thing"),
    "a foreign class by registered name": layer("trap", "Dense", registered="trap>Thing"),
    "a lambda layer": layer(
        "keras.layers", "Lambda", {"function": {"class_name": "__lambda__", "config": {"code": CODE}}}
    ),
    "a lambda": {"class_name": "__lambda__", "config": {"value": [CODE, None, None]}},
    "a lambda as activation": layer("keras.layers", "Dense", {"units": 4, "activation": {"class_name": "__lambda__"}}),
    "a module of torch": layer(
        "keras.layers", "TorchModuleWrapper", {"module": {"class_name": "__bytes__", "config": {}}}
    ),
    "a SavedModel": layer("keras.layers", "TFSMLayer", {"filepath": "MARK"}),
    "a type": {
        "class_name": "__typespec__",
        "spec_name": "Thing",
        "module": "trap",
        "registered_name": None,
        "config": [],
    },
    "a function of Keras that acts": function("keras.config", "enable_unsafe_deserialization"),
    "a function that loads": function("keras.models", "load_model"),
    "a function that downloads": function("keras.utils", "get_file"),
    "a function of the system": function("os", "system"),
    "a builtin": function("builtins", "exec"),
    "a class that is no layer": layer("keras.utils", "PyDataset"),
    "a module of Keras that is not loaded": layer("keras.src.trap", "Thing"),
    "a vocabulary on the disk": layer("keras.layers", "StringLookup", {"vocabulary": "/etc/passwd"}),
}


@pytest.mark.parametrize("config", KERAS.values(), ids=KERAS)
def test_a_keras_file_makes_only_layers_of_keras(keras_file, trap, config):
    def change(inside):
        model = json.loads(inside["config.json"])
        model["config"]["layers"][1] |= config
        return {**inside, "config.json": json.dumps(model).encode()}

    rezipped(keras_file, change)
    with pytest.raises(CaptureError, match="is not data"):
        load_model(str(keras_file))
    assert not trap.exists()


@pytest.mark.parametrize("config", KERAS.values(), ids=KERAS)
def test_a_saved_keras_layer_is_one_of_keras(tmp_path, trap, config):
    model = model_of(lambda m, x: torch.special.i0e(m.a(x)), a=nn.Linear(4, 4))
    root = quantized(model, randn(4, 4)).save(tmp_path / "out")  # i0e has no canonical operator: an opaque node
    target, args = "keras:" + json.dumps(config), [[], [{"$ref": 0}], {}]

    def change(graph):
        opaque = next(n for n in graph["nodes"] if n["op"] == "Opaque")
        opaque["attrs"].update(target=target, args=args, kwargs={})

    with pytest.raises(GraphError, match="is refused"):
        load(tampered(root, "graph.json", change)).model(randn(4, 4))
    assert not trap.exists()


def test_a_keras_file_loads_and_a_registered_class_is_the_users_own(keras_file):
    assert load_model(str(keras_file)).output_shape == load_keras(str(keras_file)).output_shape == (None, 3)


@pytest.mark.parametrize(
    "config", [[], {"class_name": {"Dense": "Dense"}}, {"layers": [{"class_name": ["Dense"]}]}], ids=str
)
def test_a_keras_configuration_of_another_shape_is_refused(tmp_path, config):
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as z:
        z.writestr("config.json", json.dumps(config))
    with pytest.raises(CaptureError, match="not a Keras model|is not data"):
        load_model(str(tmp_path / "m.keras"))


# ---------------------------------------------------------------- files of HDF5, which Keras 2 wrote

h5py = pytest.importorskip("h5py")
#: settings of layers that Keras 2 wrote and Keras 3 has not
OLD = {
    "DepthwiseConv2D": {"groups": 1},
    "SeparableConv2D": {"groups": 1, "kernel_initializer": None, "kernel_regularizer": None, "kernel_constraint": None},
    "Conv2DTranspose": {"groups": 1},
    "GRU": {"time_major": False},
}


def as_keras_2(file, change=lambda layers: None):
    """Rewrite the configuration of an .h5 file as Keras 2 wrote it: short entries, with settings that are gone."""
    with h5py.File(file, "r+") as f:
        model = json.loads(f.attrs["model_config"])
        for entry in every_layer(model):
            entry["config"] |= OLD.get(entry["class_name"], {})
            entry.pop("module", None)
            entry.pop("registered_name", None)
        change(model["config"]["layers"])
        f.attrs["model_config"] = json.dumps(model)
    return file


def every_layer(model):
    for entry in model["config"]["layers"]:
        yield entry
        if "layer" in entry["config"]:
            yield entry["config"]["layer"]


@pytest.fixture
def old_file(tmp_path):
    L = keras.layers
    x = keras.Input((8, 8, 3), name="x")
    y = L.SeparableConv2D(4, 3)(L.DepthwiseConv2D(3, name="deep")(x))
    y = L.Bidirectional(L.GRU(2))(L.Reshape((-1, 4))(L.Conv2DTranspose(4, 2)(y)))
    model = keras.Model(x, y)
    model.save(tmp_path / "m.h5")
    return model, as_keras_2(tmp_path / "m.h5")


def test_a_file_of_keras_2_gives_the_same_network(old_file):
    model, file = old_file
    x = randn(2, 8, 8, 3)
    with torch.no_grad():
        torch.testing.assert_close(load_model(str(file))(x), model(x))


@pytest.mark.parametrize(
    "config",
    [
        {"class_name": "Lambda", "config": {"function": [CODE, None, None], "function_type": "lambda"}},
        {"class_name": "TFOpLambda", "config": {"function": "math.multiply"}},
        {"class_name": "Thing", "config": {}},
        KERAS["a foreign class"],
    ],
    ids=["a lambda layer", "a function of TensorFlow", "an unknown class", "a foreign class"],
)
def test_a_file_of_keras_2_makes_only_layers_of_keras(old_file, trap, config):
    as_keras_2(old_file[1], lambda layers: layers[1].update(config))
    with pytest.raises(CaptureError, match="is not data"):
        load_model(str(old_file[1]))
    assert not trap.exists()


def test_a_setting_of_keras_2_that_does_something_is_refused(old_file):
    as_keras_2(old_file[1], lambda layers: layers[1]["config"].update(groups=3))
    with pytest.raises(CaptureError, match="class 'DepthwiseConv2D'"):
        load_model(str(old_file[1]))


def test_weights_alone_are_no_model(tmp_path, old_file):
    old_file[0].save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(CaptureError, match="holds weights without a model.*load_weights"):
        load_model(str(tmp_path / "m.weights.h5"))


@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n", b"no file of this kind"])
def test_a_damaged_h5_file_is_refused(tmp_path, content):
    (tmp_path / "m.h5").write_bytes(content)
    with pytest.raises(CaptureError, match="not a Keras model"):
        load_model(str(tmp_path / "m.h5"))
