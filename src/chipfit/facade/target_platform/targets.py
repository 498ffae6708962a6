"""The built-in chips as modelled values: `imx500`, `tflite` and `qnnpack` in every released version, and any platform file.

Facts: Sony Model Compression Toolkit's released target tables; where those leave the weights of a convolution in float, give an
operator another one's constants, or cannot be built at all, the chip's own specification is followed instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from chipfit.errors import ModelingError, RuntimeUnavailable, UnknownNameError
from chipfit.facade.target_platform.capabilities import (
    DefaultDict,
    LayerFilterParams,
    OperationsSetToLayers,
    OperationsToLayers,
    TargetPlatformCapabilities,
)
from chipfit.facade.target_platform.configs import (
    BIAS_ATTR,
    KERNEL_ATTR,
    POSITIONAL_ATTR,
    AttributeQuantizationConfig,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    Signedness,
)
from chipfit.facade.target_platform.from_platform import from_platform
from chipfit.facade.target_platform.model import Fusing, OperatorSetConcat, OperatorsSet, TargetPlatformModel
from chipfit.platform import load as platforms

FRAMEWORKS = {"pytorch": "torch", "tensorflow": "keras", "keras": "keras"}  #: names of frameworks -> the package
FILE = "file"  #: version that means chipfit's own platform file, where a modelled chip has the same name

_POT, _SYM, _UNI = QuantizationMethod.POWER_OF_TWO, QuantizationMethod.SYMMETRIC, QuantizationMethod.UNIFORM
_FLOAT = AttributeQuantizationConfig()


def get_target_platform_capabilities(
    fw_name: str, target_platform_name: str = "default", target_platform_version: str | None = None
) -> TargetPlatformCapabilities:
    """A built-in chip for a framework, as values to read, print (`.show()`) and edit.

    Args:
        fw_name: "pytorch", "keras" or "tensorflow".
        target_platform_name: "default" (imx500), "imx500", "tflite", "qnnpack", or any platform of `chipfit platforms list`.
        target_platform_version: of a modelled chip "v1", "v1_pot" ...; "file" for chipfit's platform file of that name; of other
            platforms a revision. The first version, and the newest revision, when omitted.

    Raises:
        ModelingError: unknown framework, platform or version, with the known ones; also an AssertionError and a ValueError.
        RuntimeUnavailable: the framework is not installed.
    """
    if fw_name not in FRAMEWORKS:
        raise _unknown("framework", fw_name, list(FRAMEWORKS))
    name, version = target_platform_name, target_platform_version
    if name in MODELS and version != FILE:
        versions = MODELS[name]
        if version not in (None, *versions):
            raise _unknown(f"version of '{name}'", version, [*versions, FILE])
        return _attach(versions[version or "v1"](), FRAMEWORKS[fw_name], version or "v1")
    if name not in platforms.names():
        raise _unknown("platform", name, sorted({*MODELS, *platforms.names()}))
    try:
        return from_platform(platforms.load(name, None if version == FILE else version))
    except UnknownNameError as e:
        raise ModelingError(e.what, allowed=e.allowed) from None


def _unknown(what: str, name: Any, known: list[str]) -> ModelingError:
    e = UnknownNameError(what, str(name), known)
    return ModelingError(e.what, allowed=", ".join(known) if len(known) < 10 else e.allowed)


# ---------------------------------------------------------------- layers

#: operator set -> layers of PyTorch; of Keras. "name?key=value" is a filter.
_LAYERS: dict[str, tuple[str, str]] = {
    "Conv": (
        "nn.Conv1d nn.Conv2d nn.Conv3d functional.conv1d functional.conv2d functional.conv3d",
        "layers.Conv1D layers.Conv2D layers.Conv3D layers.DepthwiseConv1D layers.DepthwiseConv2D layers.SeparableConv2D ops.conv ops.depthwise_conv",
    ),
    "ConvTranspose": (
        "nn.ConvTranspose1d nn.ConvTranspose2d nn.ConvTranspose3d functional.conv_transpose2d",
        "layers.Conv1DTranspose layers.Conv2DTranspose layers.Conv3DTranspose ops.conv_transpose",
    ),
    "FullyConnected": ("nn.Linear functional.linear", "layers.Dense"),
    "BatchNorm": (
        "nn.BatchNorm1d nn.BatchNorm2d nn.BatchNorm3d functional.batch_norm",
        "layers.BatchNormalization ops.batch_normalization",
    ),
    "AnyReLU": (
        "torch.relu nn.ReLU nn.ReLU6 nn.LeakyReLU functional.relu functional.relu6 functional.leaky_relu nn.Hardtanh?min_val=0 "
        "functional.hardtanh?min_val=0",
        "ops.relu ops.relu6 ops.leaky_relu layers.ReLU layers.LeakyReLU layers.Activation?activation=relu "
        "layers.Activation?activation=relu6 layers.Activation?activation=leaky_relu",
    ),
    "Relu": (
        "torch.relu nn.ReLU nn.ReLU6 functional.relu functional.relu6",
        "ops.relu ops.relu6 layers.ReLU?max_value=None layers.ReLU?max_value=6 "
        "layers.Activation?activation=relu layers.Activation?activation=relu6",
    ),
    "Elu": ("nn.ELU functional.elu", "layers.ELU ops.elu layers.Activation?activation=elu"),
    "PReLU": ("nn.PReLU functional.prelu", "layers.PReLU"),
    "Swish": (
        "nn.SiLU functional.silu nn.Hardswish functional.hardswish",
        "ops.silu layers.Activation?activation=silu ops.hard_silu layers.Activation?activation=hard_silu",
    ),
    "Sigmoid": ("nn.Sigmoid torch.sigmoid functional.sigmoid", "ops.sigmoid layers.Activation?activation=sigmoid"),
    "Tanh": ("nn.Tanh torch.tanh functional.tanh", "ops.tanh layers.Activation?activation=tanh"),
    "Gelu": ("nn.GELU functional.gelu", "ops.gelu layers.Activation?activation=gelu"),
    "HardSigmoid": (
        "nn.Hardsigmoid functional.hardsigmoid",
        "ops.hard_sigmoid layers.Activation?activation=hard_sigmoid",
    ),
    "Softmax": (
        "nn.Softmax torch.softmax functional.softmax",
        "layers.Softmax ops.softmax layers.Activation?activation=softmax",
    ),
    "LogSoftmax": (
        "nn.LogSoftmax torch.log_softmax functional.log_softmax",
        "ops.log_softmax layers.Activation?activation=log_softmax",
    ),
    "L2Normalization": ("functional.normalize", "layers.UnitNormalization ops.normalize"),
    "Add": ("operator.add torch.add", "layers.Add ops.add"),
    "Sub": ("operator.sub torch.sub torch.subtract", "layers.Subtract ops.subtract"),
    "Mul": ("operator.mul torch.mul torch.multiply", "layers.Multiply ops.multiply"),
    "Div": ("operator.truediv torch.div torch.divide", "ops.divide ops.true_divide"),
    "MinMax": (
        "torch.minimum torch.maximum torch.min torch.max",
        "layers.Minimum layers.Maximum ops.minimum ops.maximum",
    ),
    "Concat": ("torch.cat torch.concat torch.stack", "layers.Concatenate ops.concatenate ops.stack"),
    "MaxPool": (
        "nn.MaxPool1d nn.MaxPool2d functional.max_pool1d functional.max_pool2d",
        "layers.MaxPooling1D layers.MaxPooling2D ops.max_pool",
    ),
    "AvgPool": (
        "nn.AvgPool1d nn.AvgPool2d functional.avg_pool1d functional.avg_pool2d",
        "layers.AveragePooling1D layers.AveragePooling2D ops.average_pool",
    ),
    "Resize": ("functional.interpolate nn.Upsample", "layers.UpSampling2D layers.Resizing"),
    "Move": (
        "nn.Dropout nn.Flatten nn.Unflatten functional.dropout torch.flatten torch.split torch.chunk torch.unbind operator.getitem torch.reshape "
        "torch.unsqueeze torch.squeeze torch.permute torch.transpose torch.Tensor.view functional.pad nn.ZeroPad2d nn.PixelShuffle "
        "functional.pixel_shuffle",
        "layers.Dropout layers.Flatten layers.Reshape layers.Permute layers.Cropping2D layers.ZeroPadding2D ops.split ops.reshape "
        "ops.transpose ops.squeeze ops.expand_dims ops.unstack ops.pad ops.take",
    ),
    "Other": (
        "torch.argmax torch.gather torch.topk torch.equal torch.Tensor.size",
        "ops.argmax ops.shape ops.equal ops.cast ops.top_k",
    ),
}
_NO_QUANTIZATION = ("Move", "Other", "MaxPool")

#: generic weight attribute -> its name in a framework
_ATTRS = {"torch": {KERNEL_ATTR: "weight", BIAS_ATTR: "bias"}, "keras": {KERNEL_ATTR: "kernel", BIAS_ATTR: "bias"}}


def _attach(parts: _Parts, package: str, version: str) -> TargetPlatformCapabilities:
    """The framework's layers attached to a modelled chip."""
    find = _finder(package)
    entries = []
    for op_set in parts.model.operator_set:
        words = [
            w
            for n in parts.layers.get(op_set.name, (op_set.name,))
            if n in _LAYERS
            for w in _LAYERS[n][package == "keras"].split()
        ]
        if words:
            attrs = {k: DefaultDict({}, v) for k, v in _ATTRS[package].items()} | {
                POSITIONAL_ATTR: DefaultDict({}, POSITIONAL_ATTR)
            }
            entries.append(OperationsSetToLayers(op_set.name, [find(w) for w in words], attrs))
    return TargetPlatformCapabilities(
        parts.model, parts.model.name, version, op_sets_to_layers=OperationsToLayers(entries)
    )


def _finder(package: str) -> Callable[[str], Any]:
    try:
        framework = importlib.import_module(package)
    except ImportError as e:
        extra = "torch" if package == "torch" else "'chipfit[keras]'"
        raise RuntimeUnavailable(f"{package} is not installed", hint=f"pip install {extra}") from e
    homes = {"operator": importlib.import_module("operator"), package: framework}
    if package == "torch":
        homes |= {"nn": framework.nn, "functional": framework.nn.functional}
    else:
        homes |= {"layers": framework.layers, "ops": framework.ops}

    def find(word: str) -> Any:
        path, _, condition = word.partition("?")
        first, *rest = path.split(".")
        thing = homes[first]
        for name in rest:
            thing = getattr(thing, name)
        if not condition:
            return thing
        key, _, value = condition.partition("=")
        return LayerFilterParams(
            thing, **{key: None if value == "None" else int(value) if value.lstrip("-").isdigit() else value}
        )

    return find


# ---------------------------------------------------------------- chips


class _Parts:
    """A model, and the rows of `_LAYERS` that belong to each of its sets where the set's own name is not one of them."""

    def __init__(self, model: TargetPlatformModel, **layers: tuple[str, ...]) -> None:
        self.model, self.layers = model, layers


def _config(
    method: QuantizationMethod,
    kernel: AttributeQuantizationConfig = _FLOAT,
    bias: AttributeQuantizationConfig = _FLOAT,
    **more: Any,
) -> OpQuantizationConfig:
    """8-bit activations by `method`, the kernel and the bias as given."""
    return OpQuantizationConfig(
        **{
            "default_weight_attr_config": _FLOAT,
            "attr_weights_configs_mapping": {KERNEL_ATTR: kernel, BIAS_ATTR: bias},
            "activation_quantization_method": method,
            "activation_n_bits": 8,
            "supported_input_activation_n_bits": 8,
            "enable_activation_quantization": True,
            "simd_size": None,
            **more,
        }
    )


def _weights(method: QuantizationMethod, bits: int = 8, per_channel: bool = True) -> AttributeQuantizationConfig:
    return AttributeQuantizationConfig(method, bits, per_channel, True)


def _imx500(
    version: str,
    *,
    kernel: QuantizationMethod = _SYM,
    lut: bool = False,
    metadata: bool = False,
    constants: bool = False,
    wide: bool = False,
) -> Callable[[], _Parts]:
    """Sony IMX500: power-of-two activations, convolutions and dense layers with 8, 4 or 2 bits a weight.

    Args:
        version: part of the model's name.
        kernel: method of the weights.
        lut: look-up tables for 4 and 2 bits.
        metadata: written into exported files.
        constants: constant operands of arithmetic are quantized, and concatenations take 16 bits.
        wide: 16-bit activations are a choice, and moved values keep their scale.
    """

    def build() -> _Parts:
        inputs = (8, 16) if constants else 8
        plain = _config(_POT, simd_size=32, supported_input_activation_n_bits=inputs if wide else 8)
        table = QuantizationMethod.LUT_SYM_QUANTIZER
        choices = [
            plain.clone_and_edit(
                attr_to_edit={KERNEL_ATTR: _fields(_weights(table if lut and bits < 8 else kernel, bits))},
                simd_size=simd,
            )
            for bits, simd in ((8, 32), (4, 64), (2, 128))
        ]
        sixteen: dict[str, Any] = {"activation_n_bits": 16, "signedness": Signedness.SIGNED}
        both = lambda configs: configs + [c.clone_and_edit(**sixteen) for c in configs] if wide else configs  # noqa: E731 -- one line, used here
        weighted = QuantizationConfigOptions(both(choices), choices[0])
        elementwise = QuantizationConfigOptions(both([plain]), plain)
        constant = plain.clone_and_edit(
            attr_weights_configs_mapping={POSITIONAL_ATTR: _weights(_POT)}, supported_input_activation_n_bits=inputs
        )
        arithmetic = QuantizationConfigOptions(both([constant]), constant) if constants else elementwise
        quiet = plain.clone_and_edit(enable_activation_quantization=False, supported_input_activation_n_bits=inputs)
        sets = {
            name: OperatorsSet(name, options)
            for name, options in {
                "NoQuantization": QuantizationConfigOptions([quiet]),
                **(
                    {
                        "QuantizationPreserving": QuantizationConfigOptions(
                            [quiet.clone_and_edit(quantization_preserving=True)]
                        )
                    }
                    if wide
                    else {}
                ),
                "Conv": weighted,
                "ConvTranspose": weighted,
                "FullyConnected": weighted,
                "AnyReLU": elementwise,
                **dict.fromkeys(("Add", "Sub", "Mul", "Div"), arithmetic),
                "PReLU": elementwise,
                "Swish": elementwise,
                "Sigmoid": elementwise,
                "Tanh": elementwise,
                **({"Concat": QuantizationConfigOptions(both([constant]), constant)} if constants else {}),
                **(
                    {"Gelu": elementwise, "HardSigmoid": elementwise, "MinMax": elementwise, "BatchNorm": elementwise}
                    if wide
                    else {}
                ),
            }.items()
        }
        relu = sets["AnyReLU"]
        after_conv = [
            sets[n]
            for n in ("AnyReLU", "Swish", "PReLU", "Sigmoid", "Tanh", *(("Gelu", "HardSigmoid") if wide else ()))
        ]
        after_dense = [
            sets[n] for n in ("AnyReLU", "Swish", "Sigmoid", *(("Tanh", "Gelu", "HardSigmoid") if wide else ()))
        ]
        fusings = [
            Fusing([OperatorSetConcat(sets["Conv"], sets["ConvTranspose"]), OperatorSetConcat(*after_conv)]),
            Fusing([sets["FullyConnected"], OperatorSetConcat(*after_dense)]),
            Fusing([OperatorSetConcat(*(sets[n] for n in ("Add", "Sub", "Mul", "Div"))), relu]),
        ]
        model = TargetPlatformModel(
            QuantizationConfigOptions([plain]),
            metadata,
            f"imx500_{version}",
            operator_set=sets.values(),
            fusing_patterns=fusings,
        )
        if wide:
            return _Parts(model, NoQuantization=("Other",), QuantizationPreserving=("Move", "MaxPool"))
        return _Parts(model, NoQuantization=_NO_QUANTIZATION)

    return build


def _fields(a: AttributeQuantizationConfig) -> dict[str, Any]:
    return {name: getattr(a, name) for name in a.__dataclass_fields__}


def _tflite() -> _Parts:
    """TensorFlow Lite's 8-bit specification: affine activations, symmetric weights, per channel in convolutions, 32-bit biases."""
    plain = _config(_UNI)
    one = lambda **changes: QuantizationConfigOptions([plain.clone_and_edit(**changes)])  # noqa: E731 -- one line, used here
    preserving = one(quantization_preserving=True, enable_activation_quantization=False)
    conv = QuantizationConfigOptions([_config(_UNI, _weights(_SYM), _weights(_SYM, 32))])
    dense = QuantizationConfigOptions(
        [_config(_UNI, _weights(_SYM, per_channel=False), _weights(_SYM, 32, per_channel=False))]
    )
    fixed = {
        "L2Normalization": (1 / 128, 0),
        "LogSoftmax": (16 / 256, 127),
        "Tanh": (1 / 128, 0),
        "Softmax": (1 / 256, -128),
        "Sigmoid": (1 / 256, -128),
    }
    sets = {
        name: OperatorsSet(name, options)
        for name, options in {
            "PreserveQuantizationParams": preserving,
            "FullyConnected": dense,
            "Conv": conv,
            "ConvTranspose": conv,
            **{n: one(fixed_scale=scale, fixed_zero_point=zero) for n, (scale, zero) in fixed.items()},
            **dict.fromkeys(("Relu", "Elu", "BatchNorm", "Add"), None),
        }.items()
    }
    act, norm, add = sets["Relu"], sets["BatchNorm"], sets["Add"]
    kernels = OperatorSetConcat(sets["Conv"], sets["ConvTranspose"], sets["FullyConnected"])
    fusings = [
        Fusing([OperatorSetConcat(kernels, add), act]),
        Fusing([sets["Conv"], norm, act]),
        Fusing([norm, act]),
        Fusing([norm, add, act]),
    ]
    model = TargetPlatformModel(
        QuantizationConfigOptions([plain]),
        False,
        "tflite",
        operator_set=sets.values(),
        fusing_patterns=fusings,
        math=platforms.load("tflite_int8").math,
    )
    return _Parts(model, PreserveQuantizationParams=("Move", "Concat", "MaxPool", "AvgPool", "Resize", "MinMax"))


def _qnnpack() -> _Parts:
    """PyTorch's qnnpack: affine activations, symmetric weights per tensor, 32-bit biases."""
    plain = _config(_UNI)
    weighted = QuantizationConfigOptions(
        [_config(_UNI, _weights(_SYM, per_channel=False), _weights(_SYM, 32, per_channel=False))]
    )
    quiet = QuantizationConfigOptions(
        [plain.clone_and_edit(quantization_preserving=True, enable_activation_quantization=False)]
    )
    conv, norm = OperatorsSet("Conv", weighted), OperatorsSet("BatchNorm")
    relu, linear = OperatorsSet("Relu"), OperatorsSet("Linear", weighted)
    fusings = [Fusing([conv, norm, relu]), Fusing([conv, norm]), Fusing([conv, relu]), Fusing([linear, relu])]
    sets = [OperatorsSet("Preserving", quiet), conv, norm, relu, linear]
    model = TargetPlatformModel(
        QuantizationConfigOptions([plain]),
        False,
        "qnnpack",
        operator_set=sets,
        fusing_patterns=fusings,
        math=platforms.load("qnnpack").math,
    )
    return _Parts(model, Preserving=("Move", "MaxPool"), Conv=("Conv", "ConvTranspose"), Linear=("FullyConnected",))


#: name -> version -> the chip
MODELS: dict[str, dict[str, Callable[[], _Parts]]] = {
    "imx500": {
        "v1": _imx500("v1"),
        "v1_pot": _imx500("v1_pot", kernel=_POT),
        "v1_lut": _imx500("v1_lut", lut=True),
        "v2": _imx500("v2", metadata=True),
        "v2_lut": _imx500("v2_lut", metadata=True, lut=True),
        "v3": _imx500("v3", metadata=True, constants=True),
        "v3_lut": _imx500("v3_lut", metadata=True, constants=True, lut=True),
        "v4": _imx500("v4", metadata=True, constants=True, wide=True),
    },
    "tflite": {"v1": _tflite},
    "qnnpack": {"v1": _qnnpack},
}
MODELS["default"] = MODELS["imx500"]
