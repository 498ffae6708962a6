"""Trainable quantizers for single layers that run a training algorithm of chipfit."""

from typing import Any

from chipfit.errors import ConfigError
from chipfit.frameworks import part
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.mct.target_platform.configs import QuantizationMethod
from chipfit.mct.trainable import base
from chipfit.mct.trainable.configs import stored_of
from chipfit.plan.training import algorithm_of, refusal
from chipfit.quantizers import inferable

__all__ = ["KerasActivationQuantizer", "KerasWeightsQuantizer", "PytorchActivationQuantizer", "PytorchWeightsQuantizer"]


class _ByAlgorithm:
    """The shared part of quantizers that run a training algorithm, given by registered name or instance."""

    def _start(self: Any, shape: Any, name: str, layer: Any) -> Any:
        role = self.quantization_target.role
        self._stored = stored_of(self.quantization_config, None if shape is None else tuple(shape))
        algorithm = algorithm_of(self.algorithm)
        if algorithm is None or (why := refusal(algorithm, self._stored.grid, role)):
            raise ConfigError(f"{self.algorithm} cannot train this {role}", got=why if algorithm else None)
        own = algorithm.for_tensor(self._stored, role, tuple(shape or ()))
        return self._stored, own, layer.weight_of(name) if role == "weight" else None

    def __call__(self: Any, inputs: Any, training: bool) -> Any:
        return self.quantizer(inputs)

    def get_config(self: Any) -> dict[str, Any]:
        return {**super().get_config(), "algorithm": self.algorithm}  # type: ignore[misc]

    def convert2inferable(self: Any) -> Any:
        numbers, classes = self._numbers_and_classes()
        scale, zero = (p.detach().cpu().reshape(self._stored.scale.shape) for p in numbers)
        grid = self.quantizer.trained_grid()
        stored = self._stored.with_(scale=scale.float(), zero_point=zero.round().int(), grid=grid)
        return inferable.inferable_for(stored, self.quantization_target.role, classes)


class _Pytorch(_ByAlgorithm, base.BasePytorchTrainableQuantizer):
    def initialize_quantization(self, tensor_shape: Any, name: str, layer: Any) -> None:
        self.quantizer = FakeQuantizer(name, *self._start(tensor_shape, name, layer))
        layer.add_module(f"{name}_quantizer", self.quantizer)
        for key, variable in self.quantizer.named_parameters():
            self.add_quantizer_variable(key, variable, base.VariableGroup.QPARAMS)

    def _numbers_and_classes(self) -> tuple[Any, Any]:
        return self.quantizer.numbers(), inferable.CLASSES


class _Keras(_ByAlgorithm, base.BaseKerasTrainableQuantizer):
    def initialize_quantization(self, tensor_shape: Any, name: str, layer: Any) -> None:
        given = *self._start(tensor_shape, name, layer), len(tensor_shape or ())
        self.quantizer = keras_layers().KerasQuantizer.for_layer(*given, name=f"{name}_quantizer")
        setattr(layer, f"{name}_quantizer", self.quantizer)
        for variable in self.quantizer.weights:
            self.add_quantizer_variable(variable.name, variable, base.VariableGroup.QPARAMS)

    def _numbers_and_classes(self) -> tuple[Any, Any]:
        numbers = map(part("keras", "backend").to_torch, self.quantizer.numbers())
        return numbers, part("keras", "inferable").CLASSES


def _class(parent: Any, target: base.QuantizationTarget, name: str) -> Any:
    def init(self: Any, quantization_config: Any, algorithm: Any = "lsq") -> None:
        parent.__init__(self, quantization_config)
        self.algorithm = algorithm

    init.__annotations__["quantization_config"] = base.CONFIGS[target].__name__
    about = {
        "__init__": init,
        "__module__": __name__,
        "__doc__": f"A quantizer of {target.value.lower()} that runs a training algorithm.",
    }
    return base.mark_quantizer(target, list(QuantizationMethod), "algorithm")(type(name, (parent,), about))


KerasActivationQuantizer = _class(_Keras, base.QuantizationTarget.Activation, "KerasActivationQuantizer")
KerasWeightsQuantizer = _class(_Keras, base.QuantizationTarget.Weights, "KerasWeightsQuantizer")
PytorchActivationQuantizer = _class(_Pytorch, base.QuantizationTarget.Activation, "PytorchActivationQuantizer")
PytorchWeightsQuantizer = _class(_Pytorch, base.QuantizationTarget.Weights, "PytorchWeightsQuantizer")


def keras_layers() -> Any:
    """Return the module of wrappers and holders for Keras, which then saves and loads the quantizers of this one."""
    module = part("keras", "layers")
    for cls in (KerasActivationQuantizer, KerasWeightsQuantizer):
        module.registered(cls)
    return module
