"""Base classes of trainable quantizers that users write, and the decorator that declares their purpose."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Self, TypeVar

from chipfit.errors import ConfigError, UnsupportedError, check_known
from chipfit.mct.target_platform.configs import QuantizationMethod
from chipfit.mct.trainable.configs import TrainableQuantizerActivationConfig, TrainableQuantizerWeightsConfig
from chipfit.mct.trainable.user_quantizers import UserQuantizers
from chipfit.quantizers.inferable import BaseInferableQuantizer

__all__ = ["QuantizationTarget", "VariableGroup", "mark_quantizer"]
__all__ += ["BaseKerasTrainableQuantizer", "BasePytorchTrainableQuantizer", "BaseTrainableQuantizer"]

T = TypeVar("T", bound=type)


class QuantizationTarget(Enum):
    """The kind of tensor that a quantizer quantizes."""

    Activation = "Activation"
    Weights = "Weights"

    @property
    def role(self) -> str:
        """The role of such a tensor in a plan."""
        return "weight" if self is QuantizationTarget.Weights else "activation"


class VariableGroup(Enum):
    """The purpose of a variable of a quantizer."""

    WEIGHTS = "weights"  #: modifies the weights
    QPARAMS = "qparams"  #: determines the quantization grid


#: every class decorated by `mark_quantizer`
MARKED_QUANTIZERS: list[Any] = []
CONFIGS: dict[QuantizationTarget, Any] = {
    QuantizationTarget.Weights: TrainableQuantizerWeightsConfig,
    QuantizationTarget.Activation: TrainableQuantizerActivationConfig,
}


def mark_quantizer(
    quantization_target: QuantizationTarget | None = None,
    quantization_method: Sequence[QuantizationMethod] | None = None,
    identifier: Any = None,
) -> Callable[[T], T]:
    """Return a class decorator that declares a quantizer's target, its quantization methods and its identifier.

    Raises:
        ConfigError: the target or a method is invalid.
    """
    if not isinstance(quantization_target, QuantizationTarget):
        allowed = ", ".join(map(str, QuantizationTarget))
        raise ConfigError("quantization_target must be a QuantizationTarget", got=quantization_target, allowed=allowed)
    methods = list(quantization_method or ())
    if not methods or not all(isinstance(m, QuantizationMethod) for m in methods):
        raise ConfigError("quantization_method must list methods", got=methods, allowed="a list of QuantizationMethod")

    def mark(cls: T) -> T:
        cls.quantization_target, cls.quantization_method = quantization_target, methods  # type: ignore[attr-defined]
        cls.identifier = identifier  # type: ignore[attr-defined]
        MARKED_QUANTIZERS.append(cls)
        return cls

    return mark


class NotConvertible(UnsupportedError, NotImplementedError):
    """A trainable quantizer does not define its conversion to an inferable one."""


class BaseTrainableQuantizer(BaseInferableQuantizer, ABC):
    """The framework-independent base of trainable quantizers: validation and trainable variables.

    A subclass defines `initialize_quantization` and `__call__`, and `convert2inferable` for what is to be deployed.

    Args:
        quantization_config: initial quantization parameters. In a subclass the first argument, annotated with its
            class; further arguments have defaults.

    Raises:
        ConfigError: the class is improperly defined, or the configuration has another target or method.
    """

    quantization_target: QuantizationTarget
    quantization_method: list[QuantizationMethod]
    identifier: Any
    framework: str  #: framework of the models that it supports
    _trainable_flag: str  #: attribute of a variable: whether it is trained

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "quantization_target" not in vars(cls):
            what = "Quantizer class inheriting from 'BaseTrainableQuantizer' is improperly defined. "
            what += "Ensure it includes the '@mark_quantizer' decorator and is correctly applied"
            raise ConfigError(what, where=cls.__name__, hint="@mark_quantizer(quantization_target=..., ...)")
        return super().__new__(cls)

    def __init__(self, quantization_config: Any) -> None:
        self._validate(quantization_config)
        self.quantization_config, self.enabled = quantization_config, quantization_config.field_ending("_quantization")
        #: the supported tensors, for messages
        self.fits = f"{self.quantization_target.role}s of {self.framework}"
        self._variables: dict[str, tuple[Any, VariableGroup]] = {}

    def _validate(self, config: Any) -> None:
        cls = type(self)
        owner = cls.__name__
        wanted, role = CONFIGS[cls.quantization_target], cls.quantization_target.role
        first, *others = inspect.signature(cls).parameters.values()
        note = first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
        if note.rpartition(".")[2] != wanted.__name__ or any(p.default is p.empty for p in others):
            allowed = f"first a {wanted.__name__}, annotated, then arguments with defaults"
            got = str(inspect.signature(cls))[:200]
            raise ConfigError(f"{owner} is improperly defined: its constructor's arguments", got=got, allowed=allowed)
        if not isinstance(config, wanted):
            other = next((t.role for t, c in CONFIGS.items() if isinstance(config, c)), type(config).__name__)
            what = f"Expected {role} quantization configuration; received {other} quantization instead"
            raise ConfigError(what, where=owner)
        if (method := config.field_ending("_method")) not in cls.quantization_method:
            expected = ", ".join(map(repr, cls.quantization_method))
            what = f"Quantization method mismatch. Expected methods: [{expected}], received: {method}"
            raise ConfigError(what, where=owner)

    # ---- methods of a subclass

    @abstractmethod
    def initialize_quantization(self, tensor_shape: Any, name: str, layer: Any) -> Any:
        """Create the variables on a layer, and register them with `add_quantizer_variable`.

        Args:
            tensor_shape: shape of the tensor; None, or with None entries, if unknown.
            name: prefix for the names of variables.
            layer: the module or layer that holds the quantizer.
        """

    @abstractmethod
    def __call__(self, inputs: Any, training: bool) -> Any:
        """Return the fake-quantized tensor.

        Args:
            inputs: float values [*dims].
            training: whether this is a training step.
        """

    def convert2inferable(self) -> BaseInferableQuantizer:
        """Return the inferable quantizer with the current parameters.

        Raises:
            NotConvertible: the subclass does not define it; also a NotImplementedError.
        """
        what = f"{type(self).__name__} does not define its inferable quantizer"
        raise NotConvertible(what, hint="define convert2inferable(self) to deploy what was trained")

    @property
    def converts(self) -> bool:
        """True if the subclass defines `convert2inferable`."""
        return type(self).convert2inferable is not BaseTrainableQuantizer.convert2inferable

    # ---- variables

    def add_quantizer_variable(self, name: str, variable: Any, group: VariableGroup = VariableGroup.WEIGHTS) -> None:
        """Register a variable under a name."""
        self._variables[name] = variable, group

    def get_quantizer_variable(self, name: str) -> Any:
        """Return a variable by its name.

        Raises:
            UnknownNameError: there is no such variable.
        """
        check_known(f"variable of {type(self).__name__}", name, self._variables)
        return self._variables[name][0]

    def get_trainable_variables(self, group: VariableGroup) -> list[Any]:
        """Return the trainable variables of a group."""
        return [v for v, g in self._variables.values() if g is group and getattr(v, self._trainable_flag)]

    def freeze_quant_params(self) -> None:
        """Stop training the variables that determine the grid."""
        for v, group in self._variables.values():
            if group is VariableGroup.QPARAMS:
                setattr(v, self._trainable_flag, False)

    # ---- saving, and use in a whole model

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments as data; a subclass with more arguments adds them."""
        return {"quantization_config": self.quantization_config.get_config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        given = dict(config)
        return cls(CONFIGS[cls.quantization_target].from_config(given.pop("quantization_config")), **given)

    @classmethod
    def hosted(cls, **options: Any) -> UserQuantizers:
        """Return the class as an algorithm of `chipfit.plan.training.Training`.

        Args:
            options: of the constructor.
        """
        return UserQuantizers((cls,), options)

    def as_algorithm(self, shape: Sequence[int | None], role: str) -> UserQuantizers:
        """Return this quantizer instance as the algorithm of one tensor, a "weight" or an "activation"."""
        return UserQuantizers.of(self, shape, role)


class BasePytorchTrainableQuantizer(BaseTrainableQuantizer):
    """The base of trainable quantizers for PyTorch; variables are parameters of the layer that holds the quantizer."""

    framework, _trainable_flag = "torch", "requires_grad"


class BaseKerasTrainableQuantizer(BaseTrainableQuantizer):
    """The base of trainable quantizers for Keras on any backend; `layer.add_weight` creates the variables."""

    framework, _trainable_flag = "keras", "trainable"
