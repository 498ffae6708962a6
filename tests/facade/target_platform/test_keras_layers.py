"""Keras layers, keras.ops and raw TensorFlow functions in operator sets and filters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chipfit.errors import ModelingError
from chipfit.target_platform import (
    Contains,
    Eq,
    Greater,
    GreaterEq,
    LayerFilterParams,
    NotEq,
    OperationsSetToLayers,
    OperatorsSet,
    Smaller,
    TargetPlatformCapabilities,
    TargetPlatformModel,
    get_target_platform_capabilities,
)

keras = pytest.importorskip("keras")
layers = keras.layers


def capabilities(*names):
    default = get_target_platform_capabilities("pytorch").tp_model.default_qco
    return TargetPlatformCapabilities(TargetPlatformModel(default, operator_set=[OperatorsSet(n) for n in names]))


def test_10_a_layer_is_in_one_set():
    twice = [(layers.Conv2D, "Found layer Conv2D in more than one OperatorsSet")]
    twice += [
        (
            LayerFilterParams(layers.Activation, activation="relu"),
            "Found layer Activation(activation=relu) in more than one OperatorsSet",
        )
    ]
    for layer, text in twice:
        with capabilities("a", "b"):
            OperationsSetToLayers("a", [layer])
            with pytest.raises(ModelingError) as e:
                OperationsSetToLayers("b", [layer])
        assert text in str(e.value)


def test_15_all_conditions_of_a_filter_hold():
    f = LayerFilterParams(
        layers.Conv2D, Greater("filters", 2), Smaller("filters", 4), activation="softmax", kernel_size=(3, 4), filters=3
    )
    assert f.match(layers.Conv2D(3, (3, 4), activation="softmax"))
    assert not f.match(layers.Conv2D(2, (3, 4), activation="softmax"))
    assert not f.match(layers.Conv2DTranspose(3, (3, 4), activation="softmax"))


def test_16_alternatives():
    f = LayerFilterParams(layers.ReLU, GreaterEq("max_value", 0.5) | Smaller("max_value", 0.2))
    assert [f.match(layers.ReLU(v)) for v in (0.1, 0.5, 0.3)] == [True, True, False]
    unbounded = LayerFilterParams(layers.ReLU, Eq("max_value", None) | Eq("max_value", 6))
    assert [unbounded.match(layers.ReLU(v)) for v in (None, 6, 8)] == [True, True, False]


def test_17_names():
    f = LayerFilterParams(layers.Conv2D, Contains("name", "conv"))
    assert [f.match(layers.Conv2D(1, 1, name=n)) for n in ("conv", "layer_conv_0", "CONVOLUTION")] == [
        True,
        True,
        False,
    ]


def test_bounded_and_unbounded_relu_are_told_apart():
    unbounded, bounded = (
        LayerFilterParams(layers.ReLU, max_value=None),
        LayerFilterParams(layers.ReLU, NotEq("max_value", None)),
    )
    assert [(unbounded.match(x), bounded.match(x)) for x in (layers.ReLU(), layers.ReLU(6))] == [
        (True, False),
        (False, True),
    ]


def test_built_in_chips_know_keras_layers():
    for name in ("imx500", "tflite", "qnnpack"):
        tpc = get_target_platform_capabilities("keras", name)
        for layer in (layers.Conv2D(2, 3), layers.DepthwiseConv2D(3), layers.Conv2DTranspose(2, 3), layers.Dense(3)):
            base = tpc.get_qco_by_node(layer).base
            assert base.attr_weights_configs_mapping["kernel"].enable_weights_quantization, (name, layer)


def test_functions_of_tensorflow_are_known_by_name():
    """In a process of its own: TensorFlow is never imported by chipfit."""
    pytest.importorskip("tensorflow")
    script = """
import sys
from chipfit.target_platform import *
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
import tensorflow as tf
from keras.layers import Activation, Add, ReLU
from chipfit.errors import ModelingError
add = OperationsSetToLayers("Add", [tf.add, Add])
assert {m.op for m in add.members} == {("Add",)}, add.members
flat, named = LayerFilterParams(ReLU, negative_slope=0.0), LayerFilterParams(Activation, activation="relu")
relu = OperationsSetToLayers("ReLU", [tf.nn.relu, tf.nn.relu6, flat, named])
assert [m.op[0] for m in relu.members] == ["Relu", "Relu6", "Relu", "Relu"], relu.members
others = {tf.reshape: "Reshape", tf.split: "Split", tf.concat: "Concat", tf.nn.conv2d: "Conv2D", tf.multiply: "Mul"}
others |= {tf.nn.sigmoid: "Sigmoid", tf.nn.softmax: "Softmax", tf.transpose: "Transpose"}
for function, op in others.items():
    assert OperationsSetToLayers("set", [function]).members[0].op[0] == op, function
from chipfit import DefaultDict, FrameworkInfo
kernel_ops = [tf.keras.layers.Conv2D]
axes = DefaultDict({tf.keras.layers.Conv2D: (3, 2)})
activation_ops, no_quantization_ops = [tf.keras.layers.ReLU], [tf.keras.layers.Reshape]
info = FrameworkInfo(
    kernel_ops, [], [], kernel_channels_mapping=axes, activation_min_max_mapping={}, layer_min_max_mapping={}
)
info = FrameworkInfo(kernel_ops, activation_ops, no_quantization_ops, kernel_channels_mapping=axes,
                     activation_min_max_mapping={"softmax": (0, 1)},
                     layer_min_max_mapping={tf.keras.layers.Softmax: (0, 1)})
from chipfit.graph.ir import Node
assert info.in_kernel_ops(Node("n", "Conv2D", (), (), layer_type="Conv2D"))
softmax = Node("n", "Softmax", (), (), layer_type="Activation", config={"activation": "softmax"})
assert info.known_range(softmax) == (0, 1)
assert info.known_range(Node("n", "Softmax", (), (), layer_type="Softmax")) == (0, 1)
try:
    OperationsSetToLayers("set", ["tf.ad"])
except ModelingError as e:
    assert "Add" in str(e) or "add" in str(e), e
else:
    raise SystemExit("an unknown function was accepted")
"""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_ones_own_function_gets_kernels_and_axes_as_keras_stores_them():
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
    axes = DefaultDict(
        {
            layers.Conv2D: (3, 2),
            layers.DepthwiseConv2D: (2, 2),
            layers.Conv2DTranspose: (2, 3),
            layers.Dense: (1, 0),
        }
    )
    seen = {}

    def halves(w, bits, signed, parameters, per_channel, axis):
        own = next(k for k in model.layers if k.weights and tuple(k.kernel.shape) == tuple(w.shape))
        seen[own.name] = (axis, parameters["threshold"].numpy())
        assert (w.numpy() == keras.ops.convert_to_numpy(own.kernel)).all()
        return (w * 2).round() / 2

    info = FrameworkInfo(list(axes.keys()), [], [], {}, {QuantizationMethod.SYMMETRIC: halves}, axes)
    chip = get_target_platform_capabilities("keras", "imx500")
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
    """The query of the call, of its node, and the plan say the same."""
    import numpy as np

    import chipfit
    from chipfit.target_platform import (
        AttributeQuantizationConfig,
        OpQuantizationConfig,
        QuantizationConfigOptions,
        QuantizationMethod,
    )

    ops = keras.ops
    calls = {
        "normalize": {"axis": -1, "order": 2},
        "clip": {"x_min": 0.0, "x_max": 3.0},
        "leaky_relu": {"negative_slope": 0.3},
        "max": {"axis": 1, "keepdims": True},
    }
    own = getattr(ops, function)
    x = keras.Input((4, 4, 3))
    model = keras.Model(x, ops.sin(own(ops.cos(x), **calls[function])))
    eight = OpQuantizationConfig(AttributeQuantizationConfig(), {}, QuantizationMethod.POWER_OF_TWO, 8, (4, 8), True)
    four = QuantizationConfigOptions([eight.clone_and_edit(activation_n_bits=4)])
    chip = TargetPlatformModel(QuantizationConfigOptions([eight]), operator_set=[OperatorsSet("four", four)])
    with TargetPlatformCapabilities(chip) as tpc:
        OperationsSetToLayers("four", [LayerFilterParams(own, **given)])
    assert tpc.get_qco_by_node((own, calls[function])).base.activation_n_bits == bits
    data = [np.random.default_rng(0).standard_normal((4, 4, 4, 3)).astype("float32")]
    result = chipfit.quantize(model, data, tpc, progress=False)
    steps = [n for n in result.graph.nodes if n.layer_type == function and n.config]
    assert {tpc.get_qco_by_node(n).base.activation_n_bits for n in steps} == {bits}
    assert result.plan.tensors[steps[-1].output].grid.bits == bits
