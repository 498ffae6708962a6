"""The default chip, described with the first generation's classes: power-of-two activations; kernels of 8, 4 or 2 bits.

python examples/hardware_models/default_hwm.py
"""

from __future__ import annotations

from chipfit.hardware_representation import (
    Fusing,
    HardwareModel,
    OperatorSetConcat,
    OperatorsSet,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
)


def get_default_hardware_model() -> HardwareModel:
    """Operator sets with their options, and what runs as one kernel; no framework is needed to say it."""
    eight = OpQuantizationConfig(
        activation_quantization_method=QuantizationMethod.POWER_OF_TWO,
        weights_quantization_method=QuantizationMethod.SYMMETRIC,
        activation_n_bits=8,
        weights_n_bits=8,
        weights_per_channel_threshold=True,
        enable_weights_quantization=True,
        enable_activation_quantization=True,
    ).clone_and_edit(supported_input_activation_n_bits=8, simd_size=32)
    four = eight.clone_and_edit(weights_n_bits=4, simd_size=64)
    two = eight.clone_and_edit(weights_n_bits=2, simd_size=128)
    kernels = QuantizationConfigOptions([eight, four, two], base_config=eight)
    result_only = eight.clone_and_edit(enable_weights_quantization=False)
    nothing = QuantizationConfigOptions([result_only.clone_and_edit(enable_activation_quantization=False)])

    with HardwareModel(QuantizationConfigOptions([result_only]), name="imx500_v1") as model:
        model.set_simd_padding(is_simd_padding=True)
        OperatorsSet("NoQuantization", nothing)
        conv, transposed, dense = (OperatorsSet(n, kernels) for n in ("Conv", "ConvTranspose", "FullyConnected"))
        relu = OperatorsSet("AnyReLU")
        arithmetic = OperatorSetConcat(*(OperatorsSet(n) for n in ("Add", "Sub", "Mul", "Div")))
        prelu, swish, sigmoid, tanh = (OperatorsSet(n) for n in ("PReLU", "Swish", "Sigmoid", "Tanh"))

        Fusing([OperatorSetConcat(conv, transposed), OperatorSetConcat(relu, swish, prelu, sigmoid, tanh)])
        Fusing([dense, OperatorSetConcat(relu, swish, sigmoid)])
        Fusing([arithmetic, relu])
    return model


if __name__ == "__main__":
    get_default_hardware_model().show()
