"""Keras layers, keras.ops and raw TensorFlow functions in operator sets and filters."""

import os
import subprocess
import sys

import pytest

from chipfit import target_platform as tp
from tests.build import quantized, randn
from tests.mct.target_platform.chips import chip

keras = pytest.importorskip("keras")
layers = keras.layers


CONV = {"activation": "softmax", "kernel_size": (3, 4)}
BOUNDED = tp.LayerFilterParams(layers.ReLU, tp.NotEq("max_value", None))


@pytest.mark.parametrize(
    "chosen, things, matches",
    [
        (
            tp.LayerFilterParams(layers.Conv2D, tp.Greater("filters", 2), tp.Smaller("filters", 4), **CONV, filters=3),
            [layers.Conv2D(3, **CONV), layers.Conv2D(2, **CONV), layers.Conv2DTranspose(3, **CONV)],
            [True, False, False],
        ),
        (BOUNDED, [layers.ReLU(), layers.ReLU(6)], [False, True]),
    ],
    ids=range(2),
)
def test_a_filter_matches_layers_by_their_attributes(chosen, things, matches):
    assert [chosen.match(thing) for thing in things] == matches


def test_built_in_chips_quantize_kernels_of_keras_layers():
    for name in ("imx500", "tflite", "qnnpack"):
        tpc = tp.get_target_platform_capabilities("keras", name)
        for layer in (layers.Conv2D(2, 3), layers.DepthwiseConv2D(3), layers.Conv2DTranspose(2, 3), layers.Dense(3)):
            base = tpc.get_qco_by_node(layer).base
            assert base.attr_weights_configs_mapping["kernel"].enable_weights_quantization, (name, layer)


FUNCTIONS = {"add": "Add", "relu": "Relu", "relu6": "Relu6", "reshape": "Reshape", "concat": "Concat"}
FUNCTIONS |= {"multiply": "Mul", "conv2d_v2": "Conv2D", "softmax_v2": "Softmax", "transpose_v2": "Transpose"}


@pytest.mark.parametrize("name, op", FUNCTIONS.items())
def test_functions_of_tensorflow_are_recognized_by_name(name, op):
    function = lambda x: x
    function.__name__, function.__module__ = name, "tensorflow.python.ops.math_ops"
    assert tp.OperationsSetToLayers("set", [function]).members[0].op[0] == op


@pytest.mark.slow
def test_functions_of_tensorflow_are_known_without_importing_it():
    """The functions themselves, in a process of its own."""
    pytest.importorskip("tensorflow")
    script = """
import sys
from chipfit.target_platform import *
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
import tensorflow as tf
from keras.layers import Activation, Add, ReLU
add = OperationsSetToLayers("Add", [tf.add, Add])
assert {m.op for m in add.members} == {("Add",)}, add.members
flat, named = LayerFilterParams(ReLU, negative_slope=0.0), LayerFilterParams(Activation, activation="relu")
relu = OperationsSetToLayers("ReLU", [tf.nn.relu, tf.nn.relu6, flat, named])
assert [m.op[0] for m in relu.members] == ["Relu", "Relu6", "Relu", "Relu"], relu.members
others = {tf.reshape: "Reshape", tf.split: "Split", tf.concat: "Concat", tf.nn.conv2d: "Conv2D", tf.multiply: "Mul"}
others |= {tf.nn.sigmoid: "Sigmoid", tf.nn.softmax: "Softmax", tf.transpose: "Transpose"}
for function, op in others.items():
    assert OperationsSetToLayers("set", [function]).members[0].op[0] == op, function
"""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_users_function_receives_kernels_and_axes_in_the_layout_of_keras():
    """Expected thresholds are the maxima of the layers' own kernels along the axis of kernel_channels_mapping."""
    import numpy as np

    import chipfit
    from chipfit import DefaultDict, FrameworkInfo
    from chipfit.target_platform import QuantizationMethod

    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 3))
    y = layers.Conv2D(5, (3, 2), use_bias=False, name="conv")(x)
    y = layers.DepthwiseConv2D(3, use_bias=False, name="depthwise")(y)
    y = layers.Conv2DTranspose(4, 2, strides=2, use_bias=False, name="up")(y)
    y = layers.Dense(7, use_bias=False, name="dense")(layers.Flatten()(y))
    model = keras.Model(x, y)
    known = {layers.Conv2D: (3, 2), layers.DepthwiseConv2D: (2, 2), layers.Conv2DTranspose: (2, 3)}
    axes = DefaultDict(known | {layers.Dense: (1, 0)})
    seen = {}

    def halves(w, bits, signed, parameters, per_channel, axis):
        own = next(k for k in model.layers if k.weights and tuple(k.kernel.shape) == tuple(w.shape))
        seen[own.name] = (axis, parameters["threshold"].numpy())
        assert (w.numpy() == keras.ops.convert_to_numpy(own.kernel)).all()
        return (w * 2).round() / 2

    info = FrameworkInfo(list(axes.keys()), [], [], {}, {QuantizationMethod.SYMMETRIC: halves}, axes)
    chip = tp.get_target_platform_capabilities("keras", "imx500")
    data = [np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype("float32")]
    rules = {"overrides": info.overrides(), "progress": False, "weight_rule": "no_clipping"}
    result = info.apply(chipfit.quantize(model, data, chip, **rules))
    assert {name: axis for name, (axis, _) in seen.items()} == {"conv": 3, "depthwise": 2, "up": 2, "dense": 1}
    for name, (axis, threshold) in seen.items():
        kernel = keras.ops.convert_to_numpy(model.get_layer(name).kernel)
        lows, highs = (f(kernel, axis=tuple(d for d in range(kernel.ndim) if d != axis)) for f in (np.min, np.max))
        np.testing.assert_allclose(threshold, np.maximum(-lows, highs * 128 / 127), rtol=1e-6)
        assert info.kernel_channels_mapping.get(type(model.get_layer(name)))[0] == axis
        now = keras.ops.convert_to_numpy(result.model.get_layer(name).layer.kernel)
        assert (now == np.round(kernel * 2) / 2).all()


@pytest.mark.parametrize(
    ("function", "given", "bits"),
    [
        ("normalize", {"order": 2}, 4),
        ("normalize", {"order": 3}, 8),
        ("clip", {"x_max": 3.0}, 4),
        ("clip", {"x_max": 2.0}, 8),
        ("leaky_relu", {"negative_slope": 0.3}, 4),
        ("max", {"keepdims": True}, 4),
        ("max", {"keepdims": False}, 8),
    ],
)
def test_filters_on_functions_of_keras_ops(function, given, bits):
    """The call, its node and the plan have the same options."""
    ops = keras.ops
    calls = {"normalize": {"axis": -1, "order": 2}, "clip": {"x_min": 0.0, "x_max": 3.0}}
    calls |= {"leaky_relu": {"negative_slope": 0.3}, "max": {"axis": 1, "keepdims": True}}
    own = getattr(ops, function)
    x = keras.Input((4, 4, 3))
    tpc = chip([tp.LayerFilterParams(own, **given)])
    assert tpc.get_qco_by_node((own, calls[function])).base.activation_n_bits == bits
    result = quantized(keras.Model(x, ops.sin(own(ops.cos(x), **calls[function]))), randn(4, 4, 4, 3), tpc)
    steps = [n for n in result.graph.nodes if n.layer_type == function and n.config]
    assert {tpc.get_qco_by_node(n).base.activation_n_bits for n in steps} == {bits}
    assert result.plan.tensors[steps[-1].output].grid.bits == bits


@pytest.mark.parametrize(
    "layer, variables", [(layers.BatchNormalization, ("gamma", "beta")), (layers.PReLU, ("alpha",))]
)
def test_weights_of_layers_without_a_kernel_are_quantized_by_their_names(layer, variables):
    """The model of a batch norm with quantized factors could not be built, and the names had no effect."""
    eight = tp.AttributeQuantizationConfig(weights_n_bits=8, enable_weights_quantization=True)
    base = {"enable_activation_quantization": False, "activation_n_bits": 8, "supported_input_activation_n_bits": 8}
    base |= {"activation_quantization_method": tp.QuantizationMethod.POWER_OF_TWO, "quantization_preserving": False}
    base |= {"fixed_scale": None, "fixed_zero_point": None, "simd_size": 1, "signedness": tp.Signedness.AUTO}
    base |= {"default_weight_attr_config": tp.AttributeQuantizationConfig()}
    plain = tp.OpQuantizationConfig(**base, attr_weights_configs_mapping={})
    own = tp.OpQuantizationConfig(**base, attr_weights_configs_mapping=dict.fromkeys(variables, eight))
    described = tp.TargetPlatformModel(tp.QuantizationConfigOptions([plain]))
    with described:
        tp.OperatorsSet("Own", tp.QuantizationConfigOptions([own]))
    capabilities = tp.TargetPlatformCapabilities(described)
    with capabilities:
        tp.OperationsSetToLayers("Own", [layer])
    made = layer(**{f"{v}_initializer": keras.initializers.RandomUniform(0.1, 0.9, seed=0) for v in variables})
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.ReLU(), made])
    result = quantized(model, randn(4, 6, 6, 3), capabilities)
    found = {name.rpartition("/")[2]: t for name, t in result.plan.tensors.items() if t.role != "activation"}
    assert {v for v, t in found.items() if t.quantized} == set(variables)
    rounded = {k: keras.ops.convert_to_numpy(v) for k, v in result.model.layers[-1].get_quantized_weights().items()}
    for v in variables:
        codes = rounded[v] / float(found[v].scale)
        assert abs(codes - codes.round()).max() < 1e-4
