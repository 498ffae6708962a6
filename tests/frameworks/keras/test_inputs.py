"""Batches in the forms that Keras's `fit` takes: several inputs, integers of one axis, dicts, labels, fixed sizes."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("onnxruntime")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402

R = np.random.default_rng(0)
X, T = R.normal(size=(6, 8, 8)).astype("float32"), R.integers(0, 10, (6, 8)).astype("int32")


class Steps(keras.Model):
    """A network of data and a step, which is one integer a sample."""

    def __init__(self):
        super().__init__()
        self.body, self.table, self.head = layers.Dense(8, activation="relu"), layers.Embedding(10, 8), layers.Dense(3)

    def call(self, inputs):
        x, t = (inputs["x"], inputs["t"]) if isinstance(inputs, dict) else inputs
        return self.head(self.body(x) + self.table(t))


def functional(named):
    given = {"x": keras.Input((8,), name="x"), "t": keras.Input((), dtype="int32", name="t")}
    return keras.Model(given if named else list(given.values()), Steps()(given))


def subclassed(named):
    model = Steps()
    model({"x": X[0], "t": T[0]} if named else [X[0], T[0]])
    return model


FORMS = {
    "a tuple": (False, lambda x, t: (x, t)),
    "a list": (False, lambda x, t: [x, t]),
    "a tuple and a label": (False, lambda x, t: ((x, t), t)),
    "a dict": (True, lambda x, t: {"x": x, "t": t}),
    "a dict and a label": (True, lambda x, t: ({"x": x, "t": t}, t)),
}


@pytest.mark.parametrize("named, form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("make", [functional, subclassed])
def test_an_integer_for_each_sample_is_an_input_where_the_model_takes_it(make, named, form):
    keras.utils.set_random_seed(0)
    model, data = make(named), [form(x, t) for x, t in zip(X, T, strict=True)]
    result = chipfit.quantize(model, data, "ort_cpu", progress=False)
    assert sorted(result.graph.shape(i) for i in result.graph.inputs) == [(None,), (None, 8)]
    assert result.verify(data).exact
    given = {"x": X[0], "t": T[0]} if named else [X[0], T[0]]
    got, want = (ops.convert_to_numpy(m(given)) for m in (result.model, model))
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_a_dict_names_the_inputs_of_a_list():
    data = [{"t": t, "x": x} for x, t in zip(X, T, strict=True)]
    assert chipfit.quantize(functional(False), data, "ort_cpu", progress=False).verify(data).exact
    arrays = {"t": np.concatenate(T), "x": np.concatenate(X)}
    assert chipfit.quantize(functional(False), arrays, "ort_cpu", progress=False).verify(arrays).exact


def test_a_label_behind_all_inputs_is_still_a_label():
    data = [(x, t, t % 3) for x, t in zip(X, T, strict=True)]
    result = chipfit.quantize(functional(False), data, "ort_cpu", progress=False)
    assert len(result.graph.inputs) == 2 and "device" in result.verify(data).accuracy


class OfFour(layers.Layer):
    """A layer that refuses other batches than those of four samples."""

    def call(self, x):
        if x.shape[0] != 4:
            raise ValueError("four samples, please")
        return ops.fft2((x, x))[0]


def test_a_layer_may_refuse_other_batches_than_those_that_the_model_fixes():
    x = keras.Input((8,), batch_size=4)
    result = chipfit.quantize(keras.Model(x, layers.Dense(3)(OfFour()(x))), X.reshape(-1, 8)[:8], progress=False)
    assert result.graph.shape(result.graph.inputs[0]) == (4, 8)


def test_an_array_is_split_into_the_batches_that_a_model_fixes():
    x = keras.Input((8,), batch_size=4)
    model = keras.Model(x, layers.Dense(3)(x - ops.mean(x, axis=0, keepdims=True)))
    data = X.reshape(-1, 8)[:30]  # seven batches of four, and a rest
    result = chipfit.quantize(model, data, "ort_cpu", progress=False)
    assert result.graph.shape(result.graph.inputs[0]) == (4, 8)
    check = result.verify(data)
    assert check.exact and check.samples == 28
