"""Trainable quantizers in Keras: by hand, in whole models, through the facades, saved and loaded."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit import trainable_infrastructure as infra  # noqa: E402
from chipfit.constants import MIN_THRESHOLD, RANGE_MAX, RANGE_MIN, THRESHOLD  # noqa: E402
from chipfit.errors import PlanError, UnknownNameError, UnsupportedError  # noqa: E402
from chipfit.plan.training import Training  # noqa: E402
from chipfit.qat import QATConfig, TrainingMethod, result_of  # noqa: E402
from chipfit.target_platform import QuantizationMethod  # noqa: E402
from tests.build import keras_sequential, quantized  # noqa: E402
from tests.mct.trainable.quantizers_of_a_user import activation, weights  # noqa: E402

iq = infra.keras_inferable_quantizers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 6, 6, 2)).astype("float32"), RNG.normal(size=(16, 3)).astype("float32")


def numbers(x):
    return ops.convert_to_numpy(x)


def started(name, start, layer, quantizer):
    start = np.asarray(start, "float32")
    variable = layer.add_weight(name=name, shape=start.shape, initializer="zeros", trainable=True)
    variable.assign(start)
    quantizer.add_quantizer_variable(name, variable, infra.VariableGroup.QPARAMS)


def straight_through(x, y):
    return x + ops.stop_gradient(y - x)


@keras.saving.register_keras_serializable(package="tests")
@infra.mark_quantizer(infra.QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], "keras_ours")
class OurWeights(infra.BaseKerasTrainableQuantizer):
    def __init__(self, quantization_config: infra.TrainableQuantizerWeightsConfig):
        super().__init__(quantization_config)
        self.levels = 2 ** (quantization_config.weights_n_bits - 1)

    def initialize_quantization(self, tensor_shape, name, layer):
        started(f"{name}_t", self.quantization_config.weights_quantization_params[THRESHOLD], layer, self)
        self.name = f"{name}_t"

    def __call__(self, inputs, training):
        step = ops.abs(self.get_quantizer_variable(self.name)) / self.levels
        x = ops.clip(inputs / step, -self.levels, self.levels - 1)
        return straight_through(x, ops.round(x)) * step

    def convert2inferable(self):
        c, t = self.quantization_config, np.abs(numbers(self.get_quantizer_variable(self.name)))
        per = {"per_channel": c.weights_per_channel_threshold, "channel_axis": c.weights_channels_axis}
        return iq.WeightsSymmetricInferableQuantizer(c.weights_n_bits, t.flatten().tolist(), **per)


@keras.saving.register_keras_serializable(package="tests")
@infra.mark_quantizer(infra.QuantizationTarget.Activation, [QuantizationMethod.UNIFORM], "keras_ours")
class OurActivations(infra.BaseKerasTrainableQuantizer):
    def __init__(self, quantization_config: infra.TrainableQuantizerActivationConfig):
        super().__init__(quantization_config)
        self.levels = 2**quantization_config.activation_n_bits - 1

    def initialize_quantization(self, tensor_shape, name, layer):
        params = self.quantization_config.activation_quantization_params
        for key in (RANGE_MIN, RANGE_MAX):
            started(key, params[key], layer, self)

    def __call__(self, inputs, training):
        low, high = ops.minimum(self.get_quantizer_variable(RANGE_MIN), 0.0), self.get_quantizer_variable(RANGE_MAX)
        step = (high - low) / self.levels  # of a range with 0, which every chip has a code for
        zero = ops.round(-low / step)
        x = ops.clip(inputs / step + zero, 0, self.levels) - zero
        return straight_through(x, ops.round(x)) * step

    def convert2inferable(self):
        ends = ([float(numbers(self.get_quantizer_variable(k)))] for k in (RANGE_MIN, RANGE_MAX))
        return iq.ActivationUniformInferableQuantizer(self.quantization_config.activation_n_bits, *ends)


def small():
    keras.utils.set_random_seed(1)
    image = keras.Input((6, 6, 2), name="image")
    x = layers.Conv2D(4, 3, activation="relu", name="conv")(image)
    return keras.Model(image, layers.Dense(3, name="head")(layers.Flatten(name="flat")(x)))


def fit(model, epochs=3):
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False).history["loss"]


# ---------------------------------------------------------------- inferable quantizers


@pytest.mark.parametrize("name", infra.pytorch_inferable_quantizers.CLASSES)
def test_they_round_as_those_of_pytorch_do_and_are_saved(name):
    how = {"num_bits": 3, "threshold": [2.0], "signed": True, "per_channel": False, "lut_values": [-3.0, 0.0, 5.0]}
    how |= {"min_range": [-1.0], "max_range": [2.0]}
    cls = infra.pytorch_inferable_quantizers.CLASSES[name]
    given = {k: v for k, v in how.items() if k in inspect.signature(cls).parameters}
    x = RNG.normal(size=(50, 3)).astype("float32")
    q = getattr(iq, name)(**given)
    np.testing.assert_array_equal(numbers(q(x)), cls(**given)(torch.from_numpy(x)).numpy())
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(q))
    np.testing.assert_array_equal(numbers(again(x)), numbers(q(x)))


def test_thresholds_of_channels_run_along_their_axis():
    x = (RNG.normal(size=(3, 3, 2, 3)) * 5).astype("float32")
    y = numbers(iq.WeightsSymmetricInferableQuantizer(2, [3.0, 6.0, 2.0], True, 3, input_rank=4)(x))
    for c, t in enumerate([3.0, 6.0, 2.0]):
        np.testing.assert_array_equal(y[..., c], np.clip(np.round(x[..., c] / (t / 2)), -2, 1) * (t / 2))


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("made", [infra.KerasWeightsQuantizer, OurWeights])
def test_the_documents_configurations_train_a_layer(made):
    wrapper = infra.KerasQuantizationWrapper(
        layers.Conv2D(4, 3, name="conv"), {"kernel": made(weights())}, name="wrapped"
    )
    holder = infra.KerasActivationQuantizationHolder(infra.KerasActivationQuantizer(activation()), name="holder")
    model = keras_sequential((6, 6, 2), wrapper, holder, layers.Flatten(), layers.Dense(3))
    before = [numbers(v).copy() for v in model.trainable_variables]
    assert len(before) == 6  # kernels and biases, and what both quantizers train
    losses = fit(model, 8)
    assert losses[-1] < losses[0]
    assert all(not np.array_equal(numbers(v), b) for v, b in zip(model.trainable_variables, before, strict=True))
    want, kernel = numbers(model(X)), numbers(wrapper.get_quantized_weights()["kernel"])
    wrapper.convert_to_inferable_quantizers()
    holder.convert_to_inferable_quantizers()
    np.testing.assert_allclose(numbers(wrapper.get_quantized_weights()["kernel"]), kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(model(X)), want, rtol=1e-4, atol=1e-4)


def test_a_quantizer_in_the_wrong_place_is_refused_and_one_that_is_not_enabled_does_nothing():
    def config(enabled):
        params = {THRESHOLD: 2.0}
        return infra.TrainableQuantizerWeightsConfig(
            QuantizationMethod.SYMMETRIC, 4, params, enabled, None, False, MIN_THRESHOLD
        )

    x = RNG.normal(size=(5, 3)).astype("float32")
    off = infra.KerasQuantizationWrapper(layers.Dense(4), {"kernel": infra.KerasWeightsQuantizer(config(False))})
    assert np.array_equal(numbers(off(x)), numbers(off.layer(x)))
    on = infra.KerasQuantizationWrapper(layers.Dense(4), {"kernel": infra.KerasWeightsQuantizer(config(True))})
    assert not np.array_equal(numbers(on(x)), numbers(on.layer(x)))
    with pytest.raises(UnknownNameError, match="'kernel'"):
        infra.KerasQuantizationWrapper(layers.Dense(4), {"kernle": infra.KerasWeightsQuantizer(config(True))})(x)
    for wrong in (infra.KerasWeightsQuantizer, infra.PytorchWeightsQuantizer):
        with pytest.raises(UnsupportedError, match="activations of keras"):
            infra.KerasActivationQuantizationHolder(wrong(config(True)))


# ---------------------------------------------------------------- in a whole model


def init(**options):
    given = {"target_platform_capabilities": "ort_cpu", **options}
    return chipfit.keras_quantization_aware_training_init_experimental(small(), lambda: iter([[X]]), **given)


def test_a_quantizer_is_like_an_inferable_one_unless_it_trains():
    result = quantized(small(), torch.from_numpy(X))
    for model, trains in ((result.model, False), (result.trains(Training("lsq")).model, True)):
        wrappers = [x for x in model.layers if isinstance(x, infra.KerasQuantizationWrapper)]
        (kernel, *_) = [w.weights_quantizers["kernel"] for w in wrappers]
        holders = [x for x in model.layers if isinstance(x, infra.KerasActivationQuantizationHolder)]
        of_activations = holders[0].activation_holder_quantizer
        assert isinstance(kernel, iq.WeightsSymmetricInferableQuantizer) != trains
        assert isinstance(of_activations, iq.ActivationUniformInferableQuantizer) != trains


def test_a_quantizer_of_a_user_trains_a_whole_model_and_is_exact_on_the_device(tmp_path):
    model, information, objects = init(qat_config=QATConfig(OurWeights, "keras_ours"))
    assert objects["OurWeights"] is OurWeights and "KerasQuantizationWrapper" in objects
    found = [
        x.activation_holder_quantizer for x in model.layers if isinstance(x, infra.KerasActivationQuantizationHolder)
    ]
    assert found and any(isinstance(x, infra.KerasQuantizationWrapper) for x in model.layers)
    losses = fit(model)
    assert losses[-1] < losses[0]
    want = numbers(model(X))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=objects)
    np.testing.assert_array_equal(numbers(loaded(X)), want)
    final = chipfit.keras_quantization_aware_training_finalize(model)
    np.testing.assert_allclose(numbers(final(X)), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    result = result_of(final)
    assert result.plan.tensors["conv/kernel"].origin.endswith("trained")
    assert result.verify([X]).exact
    again = chipfit.keras_quantization_aware_training_finalize(loaded, information)
    assert torch.equal(result_of(again).plan["conv/kernel"].scale, result.plan["conv/kernel"].scale)


def test_the_facade_trains_scales_with_lsq():
    model, *_ = init(qat_config=QATConfig(TrainingMethod.LSQ, TrainingMethod.LSQ))
    losses = fit(model)
    assert losses[-1] < losses[0]
    final = chipfit.qat.keras_quantization_aware_training_finalize_experimental(model)
    np.testing.assert_allclose(numbers(final(X)), numbers(model(X)), rtol=1e-5, atol=1e-6)
    assert not any(v.trainable for x in final.layers for v in x.variables if v.name == "scale")
    assert result_of(final).verify([X]).exact


def test_numbers_of_another_plan_are_refused(tmp_path):
    plans = [chipfit.quantize(small(), [X], "imx500", overrides=o, progress=False) for o in ({}, {"head": {"bits": 4}})]
    own, other = (plan.trains("lsq") for plan in plans)
    own.model.save_weights(tmp_path / "model.weights.h5")
    own.model.load_weights(tmp_path / "model.weights.h5")
    with pytest.raises(PlanError, match="checkpoint belongs to another plan: the grid of 'head_kernel_quantizer' is"):
        other.model.load_weights(tmp_path / "model.weights.h5")
    with pytest.raises((ValueError, OSError), match="No such file|not found"):
        own.model.load_weights(tmp_path / "none.weights.h5")
    with pytest.raises(ValueError, match="File format not supported"):  # Keras's own words
        own.model.load_weights(tmp_path / "model.weights")
    own.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert dataclasses.replace(own, _model=loaded).trained()
    with pytest.raises(PlanError, match=r"model belongs to another plan: the grid of 'head_kernel_quantizer'"):
        dataclasses.replace(other, _model=loaded).trained()


def test_a_quantizer_of_another_framework_is_refused():
    from tests.mct.trainable.quantizers_of_a_user import OurWeights as Theirs

    result = chipfit.quantize(small(), [X], platform="ort_cpu", progress=False)
    with pytest.raises(UnsupportedError, match="another framework"):
        result.trains(Training(weights=Theirs)).model
