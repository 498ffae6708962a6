"""The documents' examples, which `frameworks/keras/test_backends.py` runs in a process with TensorFlow's backend."""

import keras
import numpy as np
from keras.layers import (
    Activation,
    Add,
    BatchNormalization,
    Conv2D,
    Conv2DTranspose,
    Cropping2D,
    Dense,
    DepthwiseConv2D,
    Dropout,
    Flatten,
    MaxPooling2D,
    PReLU,
    ReLU,
    Reshape,
    ZeroPadding2D,
)

import chipfit as mct
from chipfit import DefaultDict, FrameworkInfo
from tests.documents.test_000_hardware_representation import default_hardware_model, four_bits_of_add


def test_the_examples_of_layers_quantize_a_network_of_tensorflow():
    """The example of a framework model with its layers and functions of TensorFlow."""
    import tensorflow as tf

    hwm = mct.hardware_representation
    Filter = hwm.LayerFilterParams
    default_hwm_keras = hwm.FrameworkHardwareModel(default_hardware_model(), name="default_hwm_keras")
    with default_hwm_keras:
        hwm.OperationsSetToLayers(
            "NoQuantization",
            [
                Reshape,
                tf.reshape,
                Flatten,
                Cropping2D,
                ZeroPadding2D,
                Dropout,
                MaxPooling2D,
                tf.split,
                tf.quantization.fake_quant_with_min_max_vars,
                BatchNormalization,
            ],
        )
        hwm.OperationsSetToLayers("Conv", [Conv2D, DepthwiseConv2D, tf.nn.conv2d, tf.nn.depthwise_conv2d])
        hwm.OperationsSetToLayers("FullyConnected", [Dense])
        hwm.OperationsSetToLayers("ConvTranspose", [Conv2DTranspose, tf.nn.conv2d_transpose])
        hwm.OperationsSetToLayers(
            "AnyReLU",
            [tf.nn.relu, tf.nn.relu6, Filter(ReLU, negative_slope=0.0), Filter(Activation, activation="relu")],
        )
        hwm.OperationsSetToLayers("Add", [tf.add, Add])
        hwm.OperationsSetToLayers("PReLU", [PReLU])
        hwm.OperationsSetToLayers("Swish", [tf.nn.swish, Filter(Activation, activation="swish")])
        hwm.OperationsSetToLayers("Sigmoid", [tf.nn.sigmoid, Filter(Activation, activation="sigmoid")])
        hwm.OperationsSetToLayers("Tanh", [tf.nn.tanh, Filter(Activation, activation="tanh")])

    x = keras.Input((8, 8, 3))
    a = ReLU(name="relu")(BatchNormalization()(Conv2D(4, 3, padding="same", name="conv")(x)))
    b = Activation("swish", name="swish")(DepthwiseConv2D(3, padding="same", name="depthwise")(a))
    y = Dense(5, activation="sigmoid", name="dense")(Flatten()(MaxPooling2D()(Add(name="add")([a, b]))))
    data = lambda: iter([[np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype("float32")]])
    net = keras.Model(x, y)
    _, info = mct.keras_post_training_quantization(net, data, target_platform_capabilities=default_hwm_keras)
    result = info.result
    fused = [tuple(result.graph.node(n).op for n in g) for g in result.plan.groups]
    assert fused == [("Conv2D", "Relu"), ("DepthwiseConv2D", "Swish"), ("Linear", "Sigmoid")], fused
    weights = {
        t.layer: (t.grid.bits, t.scale.numel(), t.grid.pot)
        for t in result.plan.tensors.values()
        if t.role == "weight" and t.quantized
    }
    assert weights == {"conv": (8, 4, True), "depthwise": (8, 4, True), "dense": (8, 5, True)}, weights
    for name, bits in (("conv", 2), ("dense", 4)):
        assert result.edit({name: {"bits": bits}}).plan[f"{name}/kernel"].grid.bits == bits

    chip = four_bits_of_add([tf.add, Add])
    x = keras.Input((6,))
    y = keras.ops.tanh(Add()([x, Dense(6)(x)]) * 2.0)
    result = mct.quantize(keras.Model(x, y), [np.ones((4, 6), "float32") / 3], chip, progress=False)
    found = {n.op: result.plan[n.output].grid.bits for n in result.graph.nodes}
    assert found == {"Linear": 8, "Add": 4, "Mul": 8, "Tanh": 8}, found
    for call in ((tf.add, {}), Add()):
        assert chip.get_qco_by_node(call).base_config.activation_n_bits == 4


def test_the_examples_select_layers_of_a_keras_network():
    import tensorflow as tf

    kernel_ops = [tf.keras.layers.Conv2D]
    kernel_channels_mapping = DefaultDict({tf.keras.layers.Conv2D: (3, 2)})
    activation_ops = [tf.keras.layers.ReLU]
    no_quantization_ops = [tf.keras.layers.Reshape]
    activation_min_max_mapping = {"softmax": (0, 1)}
    layer_min_max_mapping = {tf.keras.layers.Softmax: (0, 1)}
    infos = [
        FrameworkInfo(kernel_ops, [], [], kernel_channels_mapping, {}, {}),
        FrameworkInfo(kernel_ops, activation_ops, [], kernel_channels_mapping, {}, {}),
        FrameworkInfo(kernel_ops, activation_ops, no_quantization_ops, kernel_channels_mapping, {}, {}),
        FrameworkInfo(
            kernel_ops, activation_ops, no_quantization_ops, kernel_channels_mapping, activation_min_max_mapping, {}
        ),
        FrameworkInfo(
            kernel_ops,
            [*activation_ops, tf.keras.layers.Activation],
            no_quantization_ops,
            kernel_channels_mapping,
            activation_min_max_mapping,
            layer_min_max_mapping,
        ),
    ]
    layers = keras.layers
    x = keras.Input((8, 8, 3))
    y = layers.ReLU(name="relu")(layers.Conv2D(4, 3, name="conv")(x))
    y = layers.Activation("softmax", name="out")(layers.Dense(5, name="fc")(layers.Reshape((144,))(y)))
    net = keras.Model(x, y)
    data = lambda: iter([[np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype("float32")]])
    wanted = [{"conv"}, *[{"conv", "relu"}] * 3, {"conv", "relu", "out"}]
    for info, layers in zip(infos, wanted):
        _, found = mct.keras_post_training_quantization(net, data, fw_info=info)
        plan = found.result.plan
        stored = {
            t.layer for t in plan.tensors.values() if t.quantized and t.op not in ("Input", "Reshape", "Transpose")
        }
        assert stored == layers, (stored, layers)
    assert "out" not in found.result.stats
