"""The Keras model that comes out computes what our engine computes, and is a Keras model in every other way."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit.engine.run import run  # noqa: E402
from chipfit.errors import UnsupportedError  # noqa: E402
from chipfit.frameworks.keras.backend import forward  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.frameworks.keras.layers import (  # noqa: E402
    KerasActivationQuantizationHolder,
    KerasQuantizationWrapper,
    KerasQuantizer,
)
from chipfit.frameworks.keras.lower import (  # noqa: E402
    QuantizedModel,
    lower,
    read_back,
)
from chipfit.frameworks.torch.lower import lower as engine  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402
from chipfit.plan.diff import diff  # noqa: E402
from chipfit.plan.record import Plan, TensorPlan  # noqa: E402
from chipfit.plan.training import Training  # noqa: E402
from chipfit.quantizers.grids import Grid  # noqa: E402
from chipfit.quantizers.stored import Stored  # noqa: E402
from tests.build import keras_sequential  # noqa: E402
from tests.keras_zoo import make, networks, on_others  # noqa: E402

#: networks in which interpolation puts values half-way between two codes, where the order of additions decides
TIES = {"unet", "transposed"}


@cache
def quantized(name, platform="ort_cpu"):
    model, batch = make(name)
    return chipfit.quantize(
        model, [batch], platform="imx500" if name == "transposed" else platform, progress=False
    ), batch


def flat(batch):
    return [torch.from_numpy(x) for x in keras.tree.flatten(batch)]


def both(result, batch):
    """The outputs of the Keras model and of the engine."""
    with torch.no_grad():
        want = engine(result.graph, result.plan).run_flat(flat(batch))
    return zip(result.model.run_flat(flat(batch)), want, strict=True)


def numbers(x):
    return keras.ops.convert_to_numpy(x)


@pytest.mark.parametrize("name", networks())
def test_it_computes_what_the_engine_computes(name):
    result, batch = quantized(name)
    for a, b in both(result, batch):
        apart = (a - b).abs() > 1e-5 * b.abs().max()
        assert float(apart.float().mean()) <= (0.05 if name in TIES else 0)
        assert float((a - b).abs().max()) <= 0.02 * float(b.abs().max())  # a code or two


REST = on_others(pytest.mark.slow)


@pytest.mark.parametrize(
    "platform", ["imx500", "graphcore_fp8", *(pytest.param(p, marks=REST) for p in ("xnnpack", "k210", "tflite_int8"))]
)
def test_it_does_so_on_every_kind_of_grid(platform):
    result, batch = quantized("mobilenet", platform)
    for a, b in both(result, batch):
        torch.testing.assert_close(a, b, rtol=0, atol=float(1e-5 * b.abs().max()))


def test_inputs_and_outputs_are_the_users():
    for name in ("many_in_and_out", "named_inputs", "sequential"):
        result, batch = quantized(name)
        original, _ = make(name)
        given = keras.tree.map_structure(torch.from_numpy, batch)
        keras.tree.assert_same_structure(forward(result.model, given), forward(original, given))


def test_layers_keep_names_and_classes():
    model = quantized("mobilenet")[0].model
    original, _ = make("mobilenet")
    wrapped = {x.name: type(x.layer).__name__ for x in model.layers if isinstance(x, KerasQuantizationWrapper)}
    kernels = {x.name.rstrip("_0123456789"): type(x).__name__ for x in original.layers if "Conv" in type(x).__name__}
    assert {(n.rstrip("_0123456789"), t) for n, t in wrapped.items()} == set(kernels.items())
    assert sum(isinstance(x, KerasActivationQuantizationHolder) for x in model.layers) > 5


def test_a_layer_that_is_used_often_is_one_layer():
    model = quantized("shared")[0].model
    (wrapper,) = [x for x in model.layers if x.name == "shared"]
    assert len(wrapper._inbound_nodes) == 3
    assert len(wrapper.own_biases) == 2  # one for each scale of the input after the first


def test_functions_of_the_user_that_keras_cannot_restore_are_left_out_of_the_simulation():
    def halves(shape, dtype=None):
        return keras.ops.full(shape, 0.5, dtype=dtype)

    class Unregistered(keras.constraints.Constraint):
        def __call__(self, w):
            return w

    x = np.ones((8, 4), "float32")
    settings = {"kernel_initializer": halves, "bias_initializer": lambda shape, dtype=None: keras.ops.ones(shape)}
    model = keras_sequential((4,), layers.Dense(2, **settings))
    simulation = chipfit.quantize(model, [x], progress=False).model
    np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (simulation(x), model(x))), rtol=0.02)
    model = keras_sequential((4,), layers.Dense(2, name="bounded", kernel_constraint=Unregistered()))
    result = chipfit.quantize(model, [x], progress=False)
    with pytest.warns(UserWarning, match=r"without the kernel_constraint of 'bounded'.*register_keras_serializable"):
        result.model.build(x.shape)


def test_regularizers_and_constraints_of_the_user_stay():
    dense = layers.Dense(3, kernel_regularizer="l2", bias_constraint="non_neg", name="head")
    model = keras_sequential((4,), dense)
    result = chipfit.quantize(model, [np.ones((2, 4), "float32")], progress=False)
    head = result.model.get_layer("head").layer
    assert isinstance(head.kernel_regularizer, keras.regularizers.L2)
    assert isinstance(head.bias_constraint, keras.constraints.NonNeg)
    assert len(result.model.losses) == 1


def test_a_layer_of_the_users_own_class_becomes_what_it_derives_from():
    class Widening(layers.Conv2DTranspose):
        pass

    class Filter(layers.Conv2D):
        pass

    own = Filter(3, 3, padding="same", name="filter"), Widening(4, 3, strides=2, padding="same", name="up")
    x, data = keras_sequential((4, 4, 3), *own), np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype("float32")
    result = chipfit.quantize(x, [data], "imx500", progress=False)
    for a, b in both(result, data):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert type(result.model.get_layer("up").layer) is layers.Conv2DTranspose


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "name",
    ["mobilenet", "shared", "recurrent", *(pytest.param(n, marks=REST) for n in ("arithmetic", "many_in_and_out"))],
)
def test_a_saved_model_loads_exactly(name, tmp_path):
    result, batch = quantized(name)
    result.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, QuantizedModel)
    for a, b in zip(loaded.run_flat(flat(batch)), result.model.run_flat(flat(batch)), strict=True):
        assert torch.equal(a, b)


def test_a_configuration_makes_the_model_again():
    result, batch = quantized("shared")
    again = type(result.model).from_config(result.model.get_config())
    again.set_weights(result.model.get_weights())
    for a, b in zip(again.run_flat(flat(batch)), result.model.run_flat(flat(batch)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif("CHIPFIT_SAVED" not in os.environ, reason="`test_backends` saves the files")
def test_a_file_that_another_backend_saved_computes_the_same():
    folder = Path(os.environ["CHIPFIT_SAVED"])
    for name in ("mobilenet", "shared"):
        model, want = keras.saving.load_model(folder / f"{name}.keras"), np.load(folder / f"{name}.npy")
        (got,) = model.run_flat(flat(make(name)[1]))
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5 * np.abs(want).max())


# ---------------------------------------------------------------- the pieces alone


def test_a_quantizer_rounds_halves_to_even_and_saturates():
    q = KerasQuantizer(-8, 7)
    q.assign({"scale": np.array(0.5, "float32")})
    given = np.array([-9.0, -0.75, 0.25, 0.75, 100.0, np.inf], "float32")
    assert numbers(q(given)).tolist() == [-4.0, -1.0, 0.0, 1.0, 3.5, 3.5]


def test_a_quantizer_with_a_table_takes_the_nearest_entry():
    q = KerasQuantizer(0, 3, table=(-1.0, 0.0, 0.5, 2.0))
    q.assign({"scale": np.array(2.0, "float32")})
    assert numbers(q(np.array([-9.0, -0.9, 0.6, 2.4, 3.0, 9.0], "float32"))).tolist() == [-2.0, 0.0, 1.0, 1.0, 4.0, 4.0]


def test_a_wrapper_keeps_the_original_weight():
    result, _ = quantized("residual")
    head = result.model.get_layer("head")
    rounded = head.get_quantized_weights()["kernel"]
    plan = result.plan.tensors["head/kernel"]
    codes = numbers(rounded) / plan.scale.numpy()
    np.testing.assert_allclose(codes, np.round(codes), atol=1e-3)
    np.testing.assert_array_equal(numbers(head.layer.kernel), result.graph.weights["head/kernel"].T.numpy())
    assert not np.array_equal(numbers(rounded), numbers(head.layer.kernel))


# ---------------------------------------------------------------- training


def trained(step):
    """A convolution and a linear layer, whose input, weights and biases are all rounded, after a step."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6, 6, 2)).astype("float32"), rng.normal(size=(8, 3)).astype("float32")
    image = keras.Input((6, 6, 2), name="image")
    z = layers.Conv2D(4, 3, activation="relu", name="conv")(image)
    model = keras.Model(image, layers.Dense(3, name="head")(layers.Flatten(name="flat")(z)))
    for v in model.variables:
        v.assign(rng.normal(0, 0.3, tuple(v.shape)).astype("float32"))
    result = chipfit.quantize(model, [x], platform="ort_cpu", progress=False)
    step(result, x, y)
    return result


@pytest.mark.parametrize("function", [ops.sqrt, ops.rsqrt])
def test_zeros_that_rounding_makes_do_not_spoil_gradients(function):
    x = np.concatenate([np.full((1, 4), 1e-4), np.linspace(1, 4, 28).reshape(7, 4)]).astype("float32")
    given = keras.Input((4,))
    model = keras.Model(given, function(layers.Dense(4, use_bias=False, kernel_initializer="identity")(given)))
    simulated = chipfit.quantize(model, [x[1:]], platform="tflite_int8", progress=False).model
    simulated.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")
    simulated.train_on_batch(x, np.zeros_like(x))
    assert all(np.isfinite(keras.ops.convert_to_numpy(v)).all() for v in simulated.variables)


def test_one_step_of_training_is_the_step_that_the_engine_takes():
    """Weights, biases and scales, on every backend, up to the order of additions."""

    def in_keras(result, x, y):
        model = result.model
        for layer in model.layers:
            if isinstance(layer, KerasQuantizationWrapper):
                layer.weights_quantizers["kernel"].scale.trainable = True
            if isinstance(layer, KerasActivationQuantizationHolder):
                layer.activation_holder_quantizer.scale.trainable = True
        model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)

    def in_torch(result, x, y):
        module = engine(result.graph, result.plan)
        for name in (n for n, t in result.plan.tensors.items() if t.role != "bias" and t.quantized):
            module.quantizer_of(name).scale.requires_grad_()
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-3)
        loss = (module.run_flat([torch.from_numpy(x)])[0] - torch.from_numpy(y)).square().mean()
        loss.backward()
        optimizer.step()
        from chipfit.frameworks.torch.lower import read_back

        result.graph, result.plan = read_back(module, result.graph, result.plan)

    ours, before, want = trained(in_keras).trained(), trained(lambda *_: None), trained(in_torch)
    for name, w in want.graph.weights.items():
        moved = float((w - before.graph.weights[name]).abs().max())
        assert moved > 0
        assert float((ours.graph.weights[name] - w).abs().max()) <= 1e-4 * moved + 1e-7
    for name, t in want.plan.tensors.items():
        if t.quantized:
            moved = float((t.scale - before.plan.tensors[name].scale).abs().max())
            off = float((ours.plan.tensors[name].scale - t.scale).abs().max())
            assert off <= 1e-3 * moved + 1e-7, name  # a gradient is a sum of errors x / s - round(x / s), which cancel


def test_an_untrained_model_reads_back_as_it_was():
    for name in ("mobilenet", "shared", "subclassed", "recurrent"):
        result, _ = quantized(name)
        graph, plan = read_back(result.model, result.graph, result.plan)
        assert not diff(result.plan, plan)
        assert all(torch.equal(graph.weights[k], w) for k, w in result.graph.weights.items()), name


def test_another_model_is_not_read_back():
    result, _ = quantized("residual")
    with pytest.raises(chipfit.errors.PlanError, match="not a quantized model"):
        read_back(make("residual")[0], result.graph, result.plan)
    with pytest.raises(chipfit.errors.PlanError, match="another graph or plan"):
        read_back(quantized("shared")[0].model, result.graph, result.plan)


def test_a_layer_of_which_nothing_is_rounded_stays_the_plain_layer():
    model = keras_sequential((6, 6, 3), layers.Conv2D(4, 1, name="first"), layers.Conv2D(2, 1, name="last"))
    x = np.linspace(-1, 1, 2 * 6 * 6 * 3, dtype=np.float32).reshape(2, 6, 6, 3)
    result = chipfit.quantize(model, [x], overrides={"last": "float"}, progress=False)
    assert {type(x) for x in result.model.layers if "last" in x.name} == {layers.Conv2D}
    assert any(isinstance(x, KerasQuantizationWrapper) and "first" in x.name for x in result.model.layers)


# ---------------------------------------------------------------- what a model is built of


def bare(f, *shape, rows=3):
    """The graph of a function of one input, whose variables are set, and data for it."""
    x = keras.Input(shape, name="x")
    model = keras.Model(x, f(x))
    rng = np.random.default_rng(0)
    for v in model.variables:
        v.assign(rng.uniform(-1, 1, v.shape))
    return capture(model), torch.from_numpy(rng.normal(size=(rows, *shape)).astype("float32"))


def same_as_the_engine(graph, plan, x):
    model = lower(graph, plan)
    with torch.no_grad():
        want = engine(graph, plan).run_flat([x])
    torch.testing.assert_close(model.run_flat([x]), want, rtol=1e-5, atol=1e-5)
    return model


@pytest.mark.parametrize("lo, hi", [(0, 1), (2, 0), (3, 2)])
def test_padding_that_has_no_word_in_keras_is_an_operator_before_the_convolution(lo, hi):
    graph, x = bare(layers.Conv2D(2, 3, strides=2, name="conv"), 9, 9, 3)
    pairs = ((lo, hi), (hi, lo))
    graph.nodes = [n.with_(attrs={**n.attrs, "padding": pairs}) if n.op == "Conv2D" else n for n in graph.nodes]
    (conv,) = (n for n in graph.nodes if n.op == "Conv2D")
    size = (9 + lo + hi - 3) // 2 + 1
    graph.values[conv.output] = replace(graph.values[conv.output], shape=(None, 2, size, size))
    for n in graph.nodes:
        if n.op == "Transpose" and n.data == conv.output:
            graph.values[n.output] = replace(graph.values[n.output], shape=(None, size, size, 2))
    model = same_as_the_engine(graph, Plan(), x)
    assert [v.name for v in model.layers if "padding" in v.name] == [f"{conv.name}_padding"]


def test_calls_of_the_same_weights_with_other_biases_are_one_layer():
    """As corrections of biases make them."""
    dense = layers.Dense(4, name="dense")
    graph, x = bare(lambda v: dense(ops.relu(dense(v))) + dense(v), 4)
    graph.weights |= {f"dense/bias_{k}": graph.weights["dense/bias"] + k for k in (1, 2)}
    biases = iter(["dense/bias", "dense/bias_1", "dense/bias_2"])
    for k, n in enumerate(graph.nodes):
        if n.op == "Linear":
            graph.nodes[k] = n.with_(inputs=(*n.inputs[:2], next(biases)))
    model = same_as_the_engine(graph, Plan(), x)
    (wrapper,) = [v for v in model.layers if isinstance(v, KerasQuantizationWrapper)]
    assert len(wrapper.own_biases) == 2 and len(wrapper._inbound_nodes) == 3


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_a_stored_result_may_have_a_scale_for_each_channel(axis):
    graph, x = bare(layers.Conv2D(3, 1, name="conv"), 3, 3, 2)
    (conv,) = (n for n in graph.nodes if n.op == "Conv2D")
    scale, zero = torch.tensor([0.125, 0.25, 0.5]), torch.zeros(3, dtype=torch.int32)
    grid = Grid(bits=4, qmin=-8, qmax=7, per="channel")
    stored = Stored(format="f", grid=grid, scale=scale, zero_point=zero, axis=axis)
    plan = Plan(tensors={conv.output: TensorPlan(name=conv.output, role="activation", stored=stored)})
    y = run(graph, [x], keep=[conv.output])[conv.output]
    s = stored.scale.reshape([3 if d == axis else 1 for d in range(4)])
    model = same_as_the_engine(graph, plan, x)
    torch.testing.assert_close(
        model.run_flat([x])[0], (torch.round(y / s).clamp(-8, 7) * s).permute(0, 2, 3, 1), rtol=0, atol=1e-6
    )
    (holder,) = [v for v in model.layers if isinstance(v, KerasActivationQuantizationHolder)]
    assert "/" not in holder.name and holder.name.endswith("_holder")


def test_an_input_that_is_an_output_passes_through():
    graph, x = bare(lambda v: [v, layers.Dense(2)(v)], 4)
    model = same_as_the_engine(graph, Plan(), x)
    assert torch.equal(model.run_flat([x])[0], x)


def test_an_output_that_is_a_constant_is_refused():
    graph, _ = bare(layers.Dense(2, name="head"), 4)
    graph.outputs = [*graph.outputs, "head/bias"]
    with pytest.raises(UnsupportedError, match="The output 'head/bias' of the model is a constant"):
        lower(graph, Plan())


def test_an_operator_of_another_framework_is_refused():
    graph, _ = bare(layers.ConvLSTM1D(2, 1, name="lstm"), 300, 4, 2)
    graph.nodes = [n.with_(attrs={**n.attrs, "target": "aten.lstm"}) if n.op == OPAQUE else n for n in graph.nodes]
    with pytest.raises(UnsupportedError, match="'aten.lstm' of 'lstm' has no Keras form"):
        lower(graph, Plan())


def test_settings_of_the_same_layer_class_stay_the_users():
    """A layer that became one of another class does not keep them."""
    graph, _ = bare(layers.Dense(2, kernel_regularizer="l2", kernel_initializer="ones", name="head"), 4)
    config = lower(graph, Plan()).get_layer("head").get_config()
    assert config["kernel_regularizer"] and config["kernel_initializer"]["class_name"] == "Ones"
    assert config["units"] == 2 and config["activation"] == "linear"


def test_a_step_of_training_is_made_once():
    model = lower(bare(layers.Dense(2), 4)[0], Plan())
    model.compile("sgd", "mse")
    first = model.make_train_function()
    assert model.make_train_function() is first
    assert model.make_train_function(force=True) is not first


@pytest.mark.parametrize("bn_fold, factor", [(1, 4), (2, 4), (-1, 1)])
def test_a_scale_starts_from_the_weight_that_it_rounds(bn_fold, factor):
    """The batch norm multiplies by 4; LSQ can begin at 2 mean|w| / sqrt(greatest code)."""
    norm = layers.BatchNormalization(epsilon=0.0, name="bn")
    model = keras_sequential((3, 3, 2), layers.Conv2D(3, 1, use_bias=False, name="conv"), norm)
    kernel = np.linspace(-1, 0.75, 6, dtype="float32").reshape(1, 1, 2, 3)
    model.get_layer("conv").kernel.assign(kernel)
    norm.moving_variance.assign([1 / 16] * 3)
    result = chipfit.quantize(model, [np.ones((2, 3, 3, 2), "float32")], platform="ort_cpu", progress=False)
    made = lower(result.graph, result.plan, Training("lsq(from_mean=True)", bn_fold=bn_fold))
    (q,) = (v.weights_quantizers["kernel"] for v in made.layers if isinstance(v, KerasQuantizationWrapper))
    want = factor * 2 * np.abs(kernel).mean((0, 1, 2)) / q.grid.qmax**0.5
    np.testing.assert_allclose(numbers(q.numbers()[0]).ravel(), want, rtol=1e-5)


def test_configurations_of_quantizers_describe_their_numbers_as_mct_names_them():
    image = keras.Input((6, 6, 2))
    model = keras.Model(image, layers.Conv2D(3, 3, name="conv")(image))
    kernel = np.zeros((3, 3, 2, 3), "float32")
    kernel[0, 0, 0] = 127 / 128, 127 / 64, -127 / 32  # 127 steps of symmetric grids, whose thresholds are 128 steps
    model.get_layer("conv").set_weights([kernel, np.zeros(3, "float32")])
    made = chipfit.quantize(model, np.ones((2, 6, 6, 2), "float32"), platform="ort_cpu", progress=False).model
    quantizer = made.get_layer("conv").weights_quantizers["kernel"]
    found = quantizer.get_config()
    np.testing.assert_allclose(found["threshold"], [1, 2, 4], rtol=1e-6)
    assert (found["num_bits"], found["per_channel"], found["channel_axis"]) == (8, True, 3)
    assert quantizer.threshold == found["threshold"] and not hasattr(quantizer, "min_range")
    assert type(quantizer).from_config(found).num_bits == 8
    holder = next(v for v in made.layers if isinstance(v, KerasActivationQuantizationHolder))
    given = holder.get_config()["activation_holder_quantizer"]["config"]  # of the input, which is 1 everywhere
    np.testing.assert_allclose([given["min_range"], given["max_range"]], [[0], [1]], rtol=1e-6)
