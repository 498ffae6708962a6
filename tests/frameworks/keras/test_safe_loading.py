"""A Keras file is read as data: it makes layers of Keras, and calls nothing else that it names."""

from __future__ import annotations

import json
import zipfile

import keras
import pytest
import torch
from torch import nn

from chipfit import load
from chipfit.cli.inputs import load_model
from chipfit.errors import CaptureError, GraphError
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
    model = model_of(lambda m, x: torch.cumprod(m.a(x), 1), a=nn.Linear(4, 4))
    root = quantized(model, randn(4, 4)).save(tmp_path / "out")  # cumprod has no canonical operator: an opaque node
    target, args = "keras:" + json.dumps(config), [[], [{"$ref": 0}], {}]

    def change(graph):
        opaque = next(n for n in graph["nodes"] if n["op"] == "Opaque")
        opaque["attrs"].update(target=target, args=args, kwargs={})

    with pytest.raises(GraphError, match="is refused"):
        load(tampered(root, "graph.json", change)).model(randn(4, 4))
    assert not trap.exists()


def test_a_keras_file_loads_and_a_registered_class_is_the_users_own(keras_file):
    assert load_model(str(keras_file)).output_shape == (None, 3)


@pytest.mark.parametrize(
    "config", [[], {"class_name": {"Dense": "Dense"}}, {"layers": [{"class_name": ["Dense"]}]}], ids=str
)
def test_a_keras_configuration_of_another_shape_is_refused(tmp_path, config):
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as z:
        z.writestr("config.json", json.dumps(config))
    with pytest.raises(CaptureError, match="not a Keras model|is not data"):
        load_model(str(tmp_path / "m.keras"))
