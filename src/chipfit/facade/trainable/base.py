"""The base classes of quantizers that users write, and the decorator that says what they are for."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from chipfit.errors import ConfigError, UnknownNameError
from chipfit.facade.target_platform.configs import QuantizationMethod
from chipfit.facade.trainable.configs import TrainableQuantizerActivationConfig, TrainableQuantizerWeightsConfig
from chipfit.facade.trainable.user_quantizers import Hosted

__all__ = ["QuantizationTarget", "VariableGroup", "mark_quantizer"]
__all__ += ["BaseKerasTrainableQuantizer", "BasePytorchTrainableQuantizer", "BaseTrainableQuantizer"]

T = TypeVar("T", bound=type)


class QuantizationTarget(Enum):
    """What a quantizer rounds."""

    Activation = "Activation"
    Weights = "Weights"

    @property
    def role(self) -> str:
        return "weight" if self is QuantizationTarget.Weights else "activation"


class VariableGroup(Enum):
    """What a variable of a quantizer is."""

    WEIGHTS = "weights"  #: changes the weights
    QPARAMS = "qparams"  #: changes the grid


#: every class that `mark_quantizer` has seen
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
    """Class decorator: what a quantizer rounds, the methods whose grids it rounds to, and the name to choose it by.

    Raises:
        ConfigError: no target, or methods that are none.
    """
    if not isinstance(quantization_target, QuantizationTarget):
        allowed = ", ".join(map(str, QuantizationTarget))
        raise ConfigError("The target of a quantizer is not understood", got=quantization_target, allowed=allowed)
    methods = list(quantization_method or ())
    if not methods or not all(isinstance(m, QuantizationMethod) for m in methods):
        allowed = "a list of QuantizationMethod"
        raise ConfigError("The methods of a quantizer are not understood", got=methods, allowed=allowed)

    def mark(cls: T) -> T:
        cls.quantization_target, cls.quantization_method = quantization_target, methods  # type: ignore[attr-defined]
        cls.identifier = identifier  # type: ignore[attr-defined]
        MARKED_QUANTIZERS.append(cls)
        return cls

    return mark


class BaseTrainableQuantizer(ABC):
    """What both base classes do: check, and keep the variables that train.

    Args:
        quantization_config: where training starts. In a subclass it is the first argument, annotated with its class;
            whatever follows has a default.

    Raises:
        ConfigError: the class is improperly defined, or the configuration is of another target or method.
    """

    quantization_target: QuantizationTarget
    quantization_method: list[QuantizationMethod]
    identifier: Any
    framework: str  #: whose models it can be in
    _trains: str  #: attribute of a variable that says whether it trains

    def __init__(self, quantization_config: Any) -> None:
        self._validate(quantization_config)
        self.quantization_config, self.enabled = quantization_config, quantization_config.field_ending("_quantization")
        self.fits = f"{self.quantization_target.role}s of {self.framework}"  #: what a host must have
        self._variables: dict[str, tuple[Any, VariableGroup]] = {}

    def _validate(self, config: Any) -> None:
        cls = type(self)
        who = cls.__name__
        if "quantization_target" not in vars(cls):
            hint = "put @mark_quantizer(quantization_target=..., quantization_method=[...], identifier=...) over it"
            raise ConfigError(f"{who} is improperly defined: it says no target and no methods", hint=hint)
        wanted, role = CONFIGS[cls.quantization_target], cls.quantization_target.role
        first, *others = inspect.signature(cls).parameters.values()
        note = first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
        if note.rpartition(".")[2] != wanted.__name__ or any(p.default is p.empty for p in others):
            allowed = f"first a {wanted.__name__}, annotated, then arguments with defaults"
            got = str(inspect.signature(cls))[:200]
            raise ConfigError(f"{who} is improperly defined: its constructor's arguments", got=got, allowed=allowed)
        if not isinstance(config, wanted):
            other = next((t.role for t, c in CONFIGS.items() if isinstance(config, c)), type(config).__name__)
            what = f"Expected {role} quantization configuration; received {other} quantization configuration"
            raise ConfigError(what, where=who)
        if (method := config.field_ending("_method")) not in cls.quantization_method:
            expected = ", ".join(map(str, cls.quantization_method))
            what = f"Quantization method mismatch. Expected methods: [{expected}], received: {method}"
            raise ConfigError(what, where=who)

    # ---- what a subclass writes

    @abstractmethod
    def initialize_quantization(self, tensor_shape: Any, name: str, layer: Any) -> None:
        """Make what trains on a layer, and name it with `add_quantizer_variable`.

        Args:
            tensor_shape: of what is rounded; None where it is not known, or None in it.
            name: a prefix for the names of variables.
            layer: the module or layer that holds the quantizer.
        """

    @abstractmethod
    def __call__(self, inputs: Any, training: bool) -> Any:
        """The tensor, rounded. Args: inputs: reals [*dims]. training: whether this is a step of training."""

    @abstractmethod
    def convert2inferable(self) -> Any:
        """The inferable quantizer that rounds as this one does now."""

    # ---- variables

    def add_quantizer_variable(self, name: str, variable: Any, group: VariableGroup = VariableGroup.WEIGHTS) -> None:
        """Keep a variable under a name."""
        self._variables[name] = variable, group

    def get_quantizer_variable(self, name: str) -> Any:
        """A variable by its name.

        Raises:
            UnknownNameError: there is none.
        """
        if name not in self._variables:
            raise UnknownNameError(f"variable of {type(self).__name__}", name, self._variables)
        return self._variables[name][0]

    def get_trainable_variables(self, group: VariableGroup) -> list[Any]:
        """The variables of a group that train."""
        return [v for v, g in self._variables.values() if g is group and getattr(v, self._trains)]

    def freeze_quant_params(self) -> None:
        """Stop training the variables that change the grid."""
        for v, group in self._variables.values():
            if group is VariableGroup.QPARAMS:
                setattr(v, self._trains, False)

    # ---- saving, and the way into a whole model

    def get_config(self) -> dict[str, Any]:
        """What makes the quantizer again; a subclass with more arguments adds them."""
        return {"quantization_config": self.quantization_config.get_config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        given = dict(config)
        of = CONFIGS[cls.quantization_target]
        return cls(of.from_config(given.pop("quantization_config")), **given)

    @classmethod
    def hosted(cls, **options: Any) -> Hosted:
        """The class as an algorithm of `chipfit.plan.training.Training`. Args: options: of its constructor."""
        return Hosted((cls,), options)

    def as_algorithm(self, shape: Sequence[int | None], role: str) -> Hosted:
        """This very quantizer as the algorithm of one tensor, a "weight" or an "activation"."""
        return Hosted.of(self, shape, role)


class BasePytorchTrainableQuantizer(BaseTrainableQuantizer):
    """Base of trainable quantizers for PyTorch: variables are parameters of the layer that holds the quantizer."""

    framework, _trains = "torch", "requires_grad"


class BaseKerasTrainableQuantizer(BaseTrainableQuantizer):
    """Base of trainable quantizers for Keras, on any backend: variables are made by `layer.add_weight`."""

    framework, _trains = "keras", "trainable"
