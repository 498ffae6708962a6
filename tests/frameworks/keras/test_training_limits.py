"""A platform's rules hold in every step of a Keras optimizer, and training ends where a number is none."""

import copy
from dataclasses import replace

import keras
import numpy as np
import pytest
import torch

from chipfit.errors import PlanError, TrainingError
from tests.build import quantized
from tests.training.test_scale_bounds import broken

SEED = np.random.default_rng(0)
DATA = [SEED.normal(size=(8, 6, 6, 4)).astype("float32") for _ in range(2)]
Y = np.arange(8) % 3


def keras_net():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, 6, 4))
    a = keras.layers.Conv2D(4, 3, padding="same", name="a")(x)
    x = keras.layers.Add(name="add")([keras.layers.Conv2D(4, 1, name="b")(a), a])
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax", name="head")(x))


@pytest.fixture(scope="module")
def twin():
    return quantized(keras_net(), [torch.from_numpy(x) for x in DATA], "tflite_int8", training="lsq")


def test_a_keras_optimizer_stays_inside(twin):
    result = twin.as_calibrated().trains("lsq")
    model, plan = result.model, result.plan
    assert plan.limits and plan.fixed
    bounds = model.bounds
    softmax = next(t for t in bounds.quantizers if t in plan.fixed)
    assert not bounds.quantizers[softmax].trainable_variables
    name = next(t for x in plan.limits if x.op == "Add" for t, e in x.terms if e < 0 and t in bounds.quantizers)
    q = bounds.quantizers[name]
    model.compile(keras.optimizers.SGD(1e-6), "sparse_categorical_crossentropy")

    def scales(t):
        return torch.tensor(keras.ops.convert_to_numpy(bounds.quantizers[t].numbers()[0])).reshape(-1)

    held = replace(
        plan, tensors={t: v for t, v in plan.tensors.items() if t in bounds.quantizers}, limits=tuple(bounds.bounds)
    )
    q.least.assign(q.least * 2.0**-9)
    q.scale.assign(q.scale * 2.0**-9)
    assert broken(held, scales)
    model.fit(DATA[0], Y, epochs=1, verbose=0)
    assert broken(held, scales) == []
    q.scale.assign(q.scale * 2.0**-1)
    after = result.trained()  # and after a step that no optimizer of Keras took
    assert broken(after.plan) == []


def saved_and_loaded(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def compiled(model):
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    return model


#: every way to come by a model that trains
DOORS = {
    "made": lambda model, folder: model,
    "from a file": saved_and_loaded,
    "copied": lambda model, folder: copy.deepcopy(model),
}


@pytest.mark.parametrize("door", DOORS)
def test_keras_training_ends_where_a_number_is_none(door, twin, tmp_path):
    model = compiled(DOORS[door](twin.as_calibrated().trains("lsq").model, tmp_path))
    model.train_on_batch(DATA[0], Y)
    own = keras.callbacks.CallbackList(add_history=True, model=model)
    with pytest.raises(TrainingError, match=r"In step 2 of training.*Where: \w+"):
        model.fit(DATA[0] * float("nan"), Y, epochs=1, verbose=0, callbacks=own)
    with pytest.raises(TrainingError, match="In step 3 of training"):
        model.train_on_batch(DATA[0], Y)


def test_the_rules_are_in_the_file_of_a_model(twin, tmp_path):
    """The next step of a loaded model too moves a scale back that was pushed out of its bounds."""
    made = twin.as_calibrated().trains("lsq").model
    loaded = compiled(saved_and_loaded(made, tmp_path))
    assert [str(x) for x in loaded.bounds.bounds] == [str(x) for x in made.bounds.bounds] != []
    limit = next(x for x in loaded.bounds.bounds if x.op == "Add")
    q = loaded.bounds.quantizers[next(t for t, e in limit.terms if e < 0)]
    q.least.assign(q.least * 2.0**-9)
    q.scale.assign(q.scale * 2.0**-9)

    def total():
        numbers = {t: keras.ops.convert_to_numpy(loaded.bounds.quantizers[t].numbers()[0]) for t, _ in limit.terms}
        return float(sum(e * np.log2(numbers[t]) for t, e in limit.terms))

    assert total() > limit.high + 1
    loaded.fit(DATA[0], Y, epochs=1, verbose=0)
    assert total() <= limit.high + 1e-5


def test_a_clone_does_not_know_the_rules_and_does_not_train(twin):
    clone = compiled(keras.models.clone_model(twin.model))
    clone.set_weights(twin.model.get_weights())
    assert np.array_equal(clone.predict(DATA[0], verbose=0), twin.model.predict(DATA[0], verbose=0))
    with pytest.raises(PlanError, match="does not know the rules that hold while it trains"):
        clone.fit(DATA[0], Y, verbose=0)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="every step of JAX is compiled, or differentiated as one")
def test_a_loop_of_ones_own_ends_where_a_number_is_none(twin, tmp_path):
    model = saved_and_loaded(twin.as_calibrated().trains("lsq").model, tmp_path)
    model(DATA[0], training=True)
    kernel = model.get_layer("b").layer.kernel
    kernel.assign(kernel * float("nan"))
    model(DATA[0], training=False)
    with pytest.raises(TrainingError, match=r"In step 2 of training, '.*kernel' holds NaN.*Where: .*b"):
        model(DATA[0], training=True)
