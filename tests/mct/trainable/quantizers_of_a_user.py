"""Configurations of trainable quantizers, and quantizer classes as a user writes them."""

import numpy as np
import torch
from torch import nn

from chipfit import trainable_infrastructure as ti
from chipfit.constants import MIN_THRESHOLD, SIGNED, THRESHOLD
from chipfit.target_platform import QuantizationMethod
from chipfit.trainable_infrastructure import pytorch_inferable_quantizers as iq


def weights(method=QuantizationMethod.SYMMETRIC, bits=8, params=None, axis=3, per_channel=True, **more):
    params = {THRESHOLD: 2.0} if params is None else params
    return ti.TrainableQuantizerWeightsConfig(method, bits, params, True, axis, per_channel, MIN_THRESHOLD, **more)


def activation(method=QuantizationMethod.UNIFORM, bits=8, params=None):
    return ti.TrainableQuantizerActivationConfig(method, bits, params or {THRESHOLD: 2.0}, True, MIN_THRESHOLD)


class _Ours(ti.BasePytorchTrainableQuantizer):
    """Straight-through rounding with a trained threshold, written from the document alone."""

    def initialize_quantization(self, tensor_shape, name, layer):
        start = np.asarray(self.start, "float32")
        layer.register_parameter(f"{name}_threshold", nn.Parameter(torch.from_numpy(start)))
        self.add_quantizer_variable("threshold", layer.get_parameter(f"{name}_threshold"), ti.VariableGroup.QPARAMS)

    def __call__(self, inputs, training):
        step = self.get_quantizer_variable("threshold").abs() / self.levels
        x = inputs / step
        clipped = torch.clamp(x, -self.levels if self.signed else 0, self.levels - 1)
        return (clipped + (torch.round(clipped) - clipped).detach()) * step


@ti.mark_quantizer(
    quantization_target=ti.QuantizationTarget.Weights,
    quantization_method=[QuantizationMethod.SYMMETRIC],
    identifier="ours",
)
class OurWeights(_Ours):
    def __init__(self, quantization_config: ti.TrainableQuantizerWeightsConfig, gain: float = 1.0):
        super().__init__(quantization_config)
        c = quantization_config
        self.start = np.asarray(c.weights_quantization_params[THRESHOLD]) * gain
        self.signed, self.levels = True, 2 ** (c.weights_n_bits - 1)

    def convert2inferable(self):
        c = self.quantization_config
        return iq.WeightsSymmetricInferableQuantizer(
            num_bits=c.weights_n_bits,
            threshold=self.get_quantizer_variable("threshold").abs().flatten().tolist(),
            per_channel=c.weights_per_channel_threshold,
            channel_axis=c.weights_channels_axis,
        )


@ti.mark_quantizer(
    quantization_target=ti.QuantizationTarget.Activation,
    quantization_method=[QuantizationMethod.SYMMETRIC],
    identifier="ours",
)
class OurActivations(_Ours):
    def __init__(self, quantization_config: ti.TrainableQuantizerActivationConfig):
        super().__init__(quantization_config)
        c = quantization_config
        self.start, self.signed = c.activation_quantization_params[THRESHOLD], c.activation_quantization_params[SIGNED]
        self.levels = 2 ** (c.activation_n_bits - self.signed)

    def convert2inferable(self):
        t = [self.get_quantizer_variable("threshold").abs().item()]
        return iq.ActivationSymmetricInferableQuantizer(self.quantization_config.activation_n_bits, t, self.signed)
