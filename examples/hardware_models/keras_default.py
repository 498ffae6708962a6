"""The default chip with the layers and functions of Keras attached to its operator sets.

python examples/hardware_models/keras_default.py
"""

from __future__ import annotations

import keras
from default_hwm import get_default_hardware_model
from keras import layers, ops

from chipfit.hardware_representation import FrameworkHardwareModel, LayerFilterParams, OperationsSetToLayers


def activation(*names: str) -> list[LayerFilterParams]:
    """`Activation` layers with one of these functions."""
    return [LayerFilterParams(layers.Activation, activation=name) for name in names]


def get_keras_hardware_model() -> FrameworkHardwareModel:
    """What each operator set is in Keras."""
    moved = [layers.Dropout, layers.Flatten, layers.Reshape, layers.Permute, layers.Cropping2D, layers.ZeroPadding2D]
    moved += [ops.split, ops.reshape, ops.transpose, ops.squeeze, ops.expand_dims, ops.unstack, ops.pad, ops.take]
    picked = [layers.MaxPooling1D, layers.MaxPooling2D, ops.max_pool]
    others = [ops.argmax, ops.shape, ops.equal, ops.cast, ops.top_k]
    convolutions = [layers.Conv1D, layers.Conv2D, layers.Conv3D, ops.conv, ops.depthwise_conv]
    convolutions += [layers.DepthwiseConv1D, layers.DepthwiseConv2D, layers.SeparableConv2D]
    transposed = [layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose, ops.conv_transpose]
    relus = [ops.relu, ops.relu6, ops.leaky_relu, layers.ReLU, layers.LeakyReLU]

    with FrameworkHardwareModel(get_default_hardware_model(), name="imx500_v1") as chip:
        OperationsSetToLayers("NoQuantization", [*moved, *picked, *others])
        OperationsSetToLayers("Conv", convolutions)
        OperationsSetToLayers("ConvTranspose", transposed)
        OperationsSetToLayers("FullyConnected", [layers.Dense])
        OperationsSetToLayers("AnyReLU", [*relus, *activation("relu", "relu6", "leaky_relu")])
        OperationsSetToLayers("Add", [layers.Add, ops.add])
        OperationsSetToLayers("Sub", [layers.Subtract, ops.subtract])
        OperationsSetToLayers("Mul", [layers.Multiply, ops.multiply])
        OperationsSetToLayers("Div", [ops.divide, ops.true_divide])
        OperationsSetToLayers("PReLU", [layers.PReLU])
        OperationsSetToLayers("Swish", [ops.silu, ops.hard_silu, *activation("silu", "hard_silu")])
        OperationsSetToLayers("Sigmoid", [ops.sigmoid, *activation("sigmoid")])
        OperationsSetToLayers("Tanh", [ops.tanh, *activation("tanh")])
    return chip


if __name__ == "__main__":
    chip = get_keras_hardware_model()
    dense = chip.get_qco_by_node(keras.layers.Dense(4))
    print([c.weights_n_bits for c in dense.quantization_config_list])
    chip.show()
