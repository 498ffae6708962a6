"""The Graph of a Keras model computes what the model computes, whatever way it was written."""

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit.engine.run import run  # noqa: E402
from chipfit.engine.trees import ResultStructure  # noqa: E402
from chipfit.errors import CaptureError  # noqa: E402
from chipfit.frameworks.keras.backend import forward  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402
from tests.build import keras_sequential  # noqa: E402
from tests.keras_zoo import make, networks, randomize  # noqa: E402


def arguments(batch):
    """A batch as positional arguments, torch tensors."""
    given = keras.tree.map_structure(torch.from_numpy, batch)
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def captured(model, batch=None):
    return capture(model, arguments(batch) if batch is not None else ())


def ops_of(graph):
    return [n.op for n in graph.nodes]


@pytest.mark.parametrize("name", networks())
def test_the_graph_computes_what_the_model_computes(name):
    model, batch = make(name)
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]
    graph = captured(model, batch)
    assert (OPAQUE in ops_of(graph)) == (name == "recurrent")
    env = run(graph, graph.example)
    got = ResultStructure(graph)([env[o].numpy() for o in graph.outputs])
    outputs = forward(model, keras.tree.map_structure(torch.from_numpy, batch))
    want = keras.tree.map_structure(lambda y: y.numpy(), outputs)
    keras.tree.assert_same_structure(got, want)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())
    for v, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(v), old)


@pytest.mark.parametrize(
    "made",
    [
        lambda a, b: keras.layers.Dot(axes=1)([a, b]),
        lambda a, b: keras.layers.Dot(axes=[2, 1], normalize=True)([a, b]),
        lambda a, b: keras.ops.split(a + b, 1, axis=0)[0],
    ],
)
def test_products_and_parts_of_batches_of_open_size_compute_what_keras_computes(made):
    a, b = keras.Input((4, 4, 3)), keras.Input((4, 4, 3))
    model = keras.Model([a, b], made(a, b))
    batch = [np.random.default_rng(k).normal(size=(2, 4, 4, 3)).astype("float32") for k in (1, 2)]
    graph = captured(model, batch)
    env = run(graph, [torch.from_numpy(x) for x in batch])
    want = forward(model, [torch.from_numpy(x) for x in batch])
    torch.testing.assert_close(env[graph.outputs[0]], want)


def test_a_layer_without_canonical_operator_is_opaque_and_its_weights_are_the_graphs():
    model, batch = make("recurrent")
    graph = captured(model, batch)
    (lstm,) = [n for n in graph.nodes if n.op == OPAQUE]
    assert (lstm.layer, lstm.layer_type, lstm.config["units"]) == ("lstm", "LSTM", 8)
    assert {i for i in lstm.inputs if i in graph.trainable} == {"lstm/kernel", "lstm/recurrent_kernel", "lstm/bias"}


def test_a_functional_model_of_fixed_shape_needs_no_example():
    model, _ = make("residual")
    graph = captured(model)
    assert graph.inputs == ["image"] and graph.values["image"].shape == (None, 8, 8, 3)
    assert graph.data_format == "channels_first" and graph.framework == "keras"


def test_inputs_and_outputs_keep_the_users_layout():
    """A Transpose at the border, none inside."""
    model, batch = make("shared")
    graph = captured(model, batch)
    assert graph.values[graph.outputs[0]].shape == (None, 8, 8, 6)
    assert ops_of(graph).count("Transpose") == 2 and ops_of(graph)[0] == ops_of(graph)[-1] == "Transpose"


def test_settings_of_layers_and_calls_are_visible():
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, strides=2, activation="relu", name="conv")(image)
    x = ops.mean(x, axis=(1, 2), keepdims=True)
    graph = captured(keras.Model(image, layers.Softmax(name="head")(x)))
    by_op = {n.op: n for n in graph.nodes}
    conv, relu, mean, softmax = (by_op[o] for o in ("Conv2D", "Relu", "GlobalAvgPool", "Softmax"))
    assert (conv.layer_type, conv.config["filters"], conv.config["strides"]) == ("Conv2D", 4, (2, 2))
    assert (relu.layer, relu.layer_type, relu.config) == ("conv", "Activation", {"activation": "relu"})
    assert (mean.layer_type, mean.config["axis"], mean.config["keepdims"]) == ("mean", (1, 2), True)
    assert (softmax.layer, softmax.layer_type, softmax.config["axis"]) == ("head", "Softmax", -1)


def test_an_activation_layer_is_its_function():
    act = captured(keras_sequential((4,), layers.Dense(3), layers.Activation("gelu", name="act"))).nodes[-1]
    assert (act.op, act.layer_type, act.config["activation"]) == ("Gelu", "Activation", "gelu")


def test_a_shared_layer_is_one_weight_read_often():
    model, batch = make("shared")
    graph = captured(model, batch)
    kernels = [n.inputs[1] for n in graph.nodes if n.op == "Conv2D"]
    assert kernels[1:] == ["shared/kernel"] * 3


def test_layers_of_a_nested_model_have_paths():
    model, batch = make("nested")
    names = {n.layer for n in captured(model, batch).nodes}
    assert {"stem", "block/conv", "head/out"} <= names


def test_average_pooling_at_an_uneven_edge_is_what_this_backend_makes_of_it():
    """Keras on torch repeats the edge, the others leave it out."""
    image = keras.Input((6, 6, 3))
    pooled = layers.AveragePooling2D(3, strides=2, padding="same")(image)
    x = ops.pad(pooled, [(0, 0), (1, 1), (2, 0), (0, 0)], mode="reflect")
    graph = captured(keras.Model(image, x), np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype("float32"))
    assert OPAQUE not in ops_of(graph)
    assert ops_of(graph).count("Pad") == (2 if keras.backend.backend() == "torch" else 1)


# ---------------------------------------------------------------- what is refused, and how


@pytest.mark.parametrize("made", ["model", "device_model"])
def test_the_simulation_of_a_result_is_quantized_already(made):
    data = [np.ones((4, 6), "float32")]
    result = chipfit.quantize(keras_sequential((6,), layers.Dense(2)), data, progress=False)
    with pytest.raises(CaptureError, match=r"quantized already.*(Wrapper|DeviceModel).*result.edit"):
        chipfit.quantize(getattr(result, made), data, progress=False)


def test_a_layer_that_keras_has_quantized_is_refused_by_name():
    model = keras_sequential((8,), layers.Dense(4, name="first"))
    model.layers[-1].quantize("int8")
    with pytest.raises(CaptureError, match="'first' has been quantized by Keras. Got: int8"):
        capture(model)


def test_a_layer_that_works_channels_first_is_refused_by_name():
    model = keras_sequential((3, 8, 8), layers.Conv2D(4, 3, data_format="channels_first", name="first"))
    with pytest.raises(CaptureError, match="'first' works channels-first.*channels_last"):
        captured(model)


def test_a_layer_that_keeps_its_states_between_calls_is_refused_with_the_way_out():
    model = keras.Sequential([keras.Input((5, 4), batch_size=2), layers.LSTM(3, stateful=True, name="memory")])
    with pytest.raises(CaptureError, match="'memory' keeps its states from call to call.*stateful=False.*streaming"):
        captured(model)


def test_a_model_without_weights_is_refused():
    with pytest.raises(CaptureError, match="has no weights yet.*call it once"):
        captured(keras.Sequential([layers.Dense(3)]))


def test_a_layer_is_no_model():
    with pytest.raises(CaptureError, match=r"instance of keras.Model.*Got: Dense.*keras.Sequential"):
        capture(layers.Dense(3))


def test_a_subclassed_model_needs_an_example():
    model, _ = make("subclassed")
    with pytest.raises(CaptureError, match=r"not fixed.*example batch"):
        captured(model)


def test_a_call_that_branches_on_values_is_refused():
    @keras.saving.register_keras_serializable("test")
    class Branching(keras.Model):
        def call(self, x):
            return x * 2 if float(ops.sum(x)) > 0 else x

    model = Branching()
    model(np.ones((1, 3), "float32"))
    with pytest.raises(CaptureError, match=r"cannot be traced.*without branches on values"):
        captured(model, np.ones((2, 3), "float32"))


def test_half_precision_is_read_in_float32_and_refused_where_the_model_cannot_be_made_again():
    model = keras_sequential((4,), layers.Dense(2, dtype="mixed_bfloat16", name="half"))
    assert "bfloat16" in captured(model).notes[0]

    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.narrow = layers.Dense(2, dtype="mixed_bfloat16")

        def call(self, x):
            return self.narrow(x)

        def get_config(self):
            raise NotImplementedError

    own = Own()
    own(np.ones((1, 3), "float32"))
    with pytest.raises(CaptureError, match=r"'own' computes in bfloat16.*float32"):
        captured(own, np.ones((2, 3), "float32"))


def test_open_spatial_sizes_are_taken_from_the_example():
    conv = layers.Conv2D(4, 3, strides=2, padding="same")
    model = keras_sequential((None, None, 3), conv, layers.GlobalAveragePooling2D())
    randomize(model)
    with pytest.raises(CaptureError, match="not fixed"):
        captured(model)
    graph = captured(model, np.random.default_rng(0).normal(size=(2, 9, 8, 3)).astype("float32"))
    assert graph.values[graph.inputs[0]].shape == (None, 9, 8, 3)


def test_an_example_of_another_structure_is_refused():
    model, _ = make("many_in_and_out")
    with pytest.raises(CaptureError, match=r"does not fit the model.*2 inputs"):
        capture(model, (torch.zeros(2, 6),))


class Token(layers.Layer):
    """A learned token in front of each sequence, as image transformers have it."""

    def __init__(self, repeated):
        super().__init__()
        self.repeated = repeated

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), initializer="random_normal", name="token")

    def call(self, x):
        return ops.concatenate([self.repeated(self.token, ops.shape(x)[0]), x], axis=1)


REPEATED = {
    "broadcast_to": lambda token, n: ops.broadcast_to(token, (n, 1, token.shape[-1])),
    "tile": lambda token, n: ops.tile(token, (n, 1, 1)),
    "repeat": lambda token, n: ops.repeat(token, n, axis=0),
}


@pytest.mark.parametrize("how", REPEATED)
def test_a_token_that_is_repeated_for_each_sample_stays_in_integers(how, tmp_path):
    keras.utils.set_random_seed(0)
    given = keras.Input((6, 8))
    x = Token(REPEATED[how])(layers.Dense(8)(given))
    model = keras.Model(given, layers.Dense(4)(x[:, 0] + ops.mean(x, axis=1)))
    data = torch.randn(16, 6, 8, generator=torch.Generator().manual_seed(0))
    result = chipfit.quantize(model, [data[:8], data[8:]], "tflite_int8", progress=False)
    assert [n.op for n in result.graph.nodes][:4] == ["Linear", "Size", "Expand", "Concat"]
    assert [n.op for n in result.plan.nodes.values() if n.exec == "float"] == ["Size"]
    other = data[:3]  # another number of samples
    want, got = (ops.convert_to_numpy(m(ops.convert_to_tensor(other.numpy()))) for m in (model, result.model))
    assert np.square(got - want).mean() < 1e-3 * np.square(want).mean()
    assert result.verify(other).exact
    result.export(tmp_path / "token.tflite", io="int8", batch=1)
