"""Rules that change how single layers are quantized: filters select layers, actions change them.

Every rule is validated on construction and becomes an entry of `overrides`: see `chipfit.decide.overrides.CHOICES`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from chipfit.decide.overrides import INPUT, check_choices
from chipfit.errors import ChipfitError, ConfigError, UnknownNameError, UnsupportedError, first_line
from chipfit.frameworks import framework_of, part
from chipfit.graph.config import module_settings
from chipfit.graph.ir import Node
from chipfit.graph.placement import device_of
from chipfit.mct.target_platform.capabilities import matches, members_of
from chipfit.mct.target_platform.configs import QuantizationMethod, Signedness
from chipfit.mct.target_platform.layers import layer_table, member_of
from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, finish_scale, from_min_max
from chipfit.ranges.search import Sample
from chipfit.validation import Name, allowed, arguments, by_name, check_value, record

__all__ = ["ACTIONS", "Action", "ChangeQuantizationParamFunction", "EditRule", "ReplaceLayer"]
__all__ += ["NodeFilter", "NodeNameFilter", "NodeNameScopeFilter", "NodeTypeFilter", "filters_of", "to_overrides"]
__all__ += ["ChangeCandidatesActivationQuantConfigAttr", "ChangeCandidatesActivationQuantizationMethod"]
__all__ += ["ChangeCandidatesWeightsQuantConfigAttr", "ChangeCandidatesWeightsQuantizationMethod"]
__all__ += ["ChangeFinalActivationQuantConfigAttr", "ChangeFinalActivationQuantizationMethod"]
__all__ += ["ChangeFinalWeightsQuantConfigAttr", "ChangeFinalWeightsQuantizationMethod"]


class QuantizationErrorMethod(Enum):
    """The error between a tensor and its quantized values that a range search minimizes."""

    NOCLIPPING = 0  #: the whole observed range
    MSE = 1  #: mean squared error
    MAE = 2  #: mean absolute error
    KL = 4  #: Kullback-Leibler divergence
    LP = 5  #: mean |error|^p
    HMSE = 6  #: squared error weighted by the Hessian; also for weights without gradient tuning

    def rule(self, p: float = 2.0) -> str:
        """Return the name of the range rule; `p` is the exponent of LP. The threshold without clipping is max|x|."""
        rules = {"NOCLIPPING": "no_clipping(expand=False)", "LP": f"lp(p={p})"}
        return rules.get(self.name, self.name.lower())


# ---------------------------------------------------------------- filters


class NodeFilter:
    """A selection of layers. Combine filters with `&`, `|` and `~`."""

    of_inputs: ClassVar[bool] = False  #: whether it may select inputs of the model as well

    def match(self, node: Node) -> bool:
        """Return whether the filter selects a layer."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The text that messages show."""
        return str(self)

    def __and__(self, other: NodeFilter) -> NodeFilter:
        return _joined(all, "&", self, other)

    def __or__(self, other: NodeFilter) -> NodeFilter:
        return _joined(any, "|", self, other)

    def __invert__(self) -> NodeFilter:
        return _Joined(lambda matches: not all(matches), "~", (self,))


@dataclass(frozen=True)
class NodeTypeFilter(NodeFilter):
    """A filter of layers of a type.

    Args:
        node_type: a class or function of a framework, a `LayerFilterParams`, or the name of an operator.

    Raises:
        ModelingError: node_type is not a known layer or operator.
    """

    node_type: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "_member", members_of([self.node_type])[0])

    of_inputs = True

    def match(self, node: Node) -> bool:
        if node.op == INPUT:
            return self.name in layer_table()["inputs"]
        return matches(self._member, node)  # type: ignore[attr-defined]  # of __post_init__

    @property
    def name(self) -> str:
        return getattr(self.node_type, "__name__", str(self.node_type))


@record(ConfigError, frozen=True)
class NodeNameFilter(NodeFilter):
    """A filter of one layer by its name: module ("layer1.0.conv1", or with underscores), Keras layer, or node.

    "conv1_bn" is the layer "conv1" with the batch norm that is folded into it.
    """

    node_name: Name
    of_inputs: ClassVar[bool] = True

    def match(self, node: Node) -> bool:
        return self.node_name in _names(node)

    def match_folded(self, node: Node, into: Node) -> bool:
        return self.match(node) or (node.op == "BatchNorm" and self.node_name.removesuffix("_bn") in _names(into))

    @property
    def name(self) -> str:
        return self.node_name


@record(ConfigError, frozen=True)
class NodeNameScopeFilter(NodeFilter):
    """A filter of layers whose name contains a text."""

    node_name_scope: Name

    def match(self, node: Node) -> bool:
        return any(self.node_name_scope in n for n in _names(node))

    @property
    def name(self) -> str:
        return self.node_name_scope


@dataclass(frozen=True)
class _Joined(NodeFilter):
    join: Callable[[Iterable[bool]], bool]
    sign: str
    parts: tuple[NodeFilter, ...]

    def match(self, node: Node) -> bool:
        return self.join(p.match(node) for p in self.parts)

    def __repr__(self) -> str:
        if len(self.parts) == 1:
            return f"{self.sign}{self.parts[0]!r}"
        return "(" + f" {self.sign} ".join(map(repr, self.parts)) + ")"


def _joined(join: Callable[[Iterable[bool]], bool], sign: str, a: NodeFilter, b: Any) -> NodeFilter:
    return _Joined(join, sign, (a, b)) if isinstance(b, NodeFilter) else NotImplemented


def _names(node: Node) -> tuple[str, ...]:
    return node.layer, node.name, node.layer.replace(".", "_")


Filter = Annotated[InstanceOf[NodeFilter], allowed("NodeTypeFilter, NodeNameFilter, NodeNameScopeFilter")]


def filters_of(given: Any) -> list[NodeFilter]:
    """Return one filter or several as a list.

    Raises:
        ConfigError: there is no filter, or something else than filters.
    """
    filters = list(given) if isinstance(given, (list, tuple)) else [given]
    some = Annotated[list[Filter], Field(min_length=1)]
    return check_value(some, filters, ConfigError, "a rule", "filters")  # type: ignore[no-any-return]  # as `some` says


# ---------------------------------------------------------------- actions

#: names of the main weight of a layer; None stands for it, too
KERNELS = (None, "kernel", "kernel_attr", "weight", "depthwise_kernel")


def check_kernel(attribute: Any) -> None:
    """Check that an attribute is the main weight of a layer, the only one whose settings can be changed.

    Raises:
        ConfigError: it is another one.
    """
    if attribute not in KERNELS:
        allowed = ", ".join(k for k in KERNELS if k is not None)
        raise ConfigError("Only settings of kernels can be changed", got=repr(attribute), allowed=allowed)


# types of attributes; validators convert a value to that of `overrides`
Width = Annotated[int, Field(ge=1), allowed("a number of bits, at least 1")]
_Enabled = Annotated[bool, AfterValidator(lambda on: None if on else "float")]
_PerChannel = Annotated[bool, AfterValidator(lambda on: "channel" if on else "tensor")]
_Method = Annotated[QuantizationMethod, by_name(QuantizationMethod), AfterValidator(lambda method: method.word)]
ErrorMethod = Annotated[QuantizationErrorMethod, by_name(QuantizationErrorMethod)]
_SIGNS = (Signedness.SIGNED, Signedness.UNSIGNED)
_Signed = Annotated[
    bool,
    BeforeValidator(lambda sign: sign is Signedness.SIGNED if sign in _SIGNS else sign),
    allowed("Signedness.SIGNED, Signedness.UNSIGNED"),
]
_Attributes = Mapping[str, tuple[str, Any]]


ACTIONS: list[type[Action]] = []  #: every action


class Action:
    """A change to the layers of a rule."""

    final = False  #: applied last, so that it takes precedence
    bias_correction: bool | None = None  #: of the layer; None: as all layers

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            ACTIONS.append(cls)

    def __init__(self, choices: Mapping[str, Any]) -> None:
        self.choices = dict(choices)  #: a table of `overrides`
        if self.choices:
            check_choices(type(self).__name__, self.choices)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.choices.items())})"


class _ByAttributes(Action):
    """An action that changes fields of a layer's configuration, by MCT's names."""

    table: _Attributes = {}
    error_method: str
    #: options of all layers together, which a rule about one layer cannot change
    general: frozenset[str] = frozenset()

    def __init__(self, **kwargs: Any) -> None:
        if not kwargs:
            allowed = ", ".join([*self.table, "l_p_value"])
            raise ConfigError(f"{type(self).__name__} requires an attribute to change", allowed=allowed)
        p = kwargs.pop("l_p_value", None)
        method = kwargs.get(self.error_method)
        if p is not None and getattr(method, "name", "") != "LP":
            hint = f"set {self.error_method} as well"
            raise ConfigError("l_p_value requires the error method LP", got=f"{self.error_method}={method}", hint=hint)
        choices = {}
        if general := [attr for attr in kwargs if attr in self.general]:
            why = "QuantizationConfig has them for all layers together"
            warnings.warn(f"Attributes without effect on single layers: {', '.join(general)}; {why}", stacklevel=2)
        for attr, value in kwargs.items():
            if attr in general:
                continue
            if attr not in self.table:
                raise UnknownNameError(f"attribute of {type(self).__name__}", attr, [*self.table, "l_p_value"])
            choice, kind = self.table[attr]
            converted = check_value(kind, value, ConfigError, type(self).__name__, attr)
            choices[choice] = converted.rule(p or 2.0) if attr == self.error_method else converted
        super().__init__(choices)


_WEIGHTS: _Attributes = {
    "weights_n_bits": ("bits", Width),
    "enable_weights_quantization": ("bits", _Enabled),
    "weights_quantization_method": ("weight_method", _Method),
    "weights_error_method": ("weight_rule", ErrorMethod),
    "weights_per_channel_threshold": ("per", _PerChannel),
}
_ACTIVATIONS: _Attributes = {
    "activation_n_bits": ("activation_bits", Width),
    "enable_activation_quantization": ("activation_bits", _Enabled),
    "activation_quantization_method": ("method", _Method),
    "activation_error_method": ("rule", ErrorMethod),
    "signedness": ("signed", _Signed),
    "z_threshold": ("z_threshold", float),
}


_GENERAL = {"min_threshold", "weights_second_moment_correction", "simd_size"}
_GENERAL |= {"activation_channel_equalization", "input_scaling", "concat_threshold_update"}
_GENERAL |= {"shift_negative_activation_correction", "shift_negative_ratio", "shift_negative_threshold_recalculation"}


_BIAS_CORRECTION = "weights_bias_correction"


class ChangeCandidatesWeightsQuantConfigAttr(_ByAttributes):
    """Change settings of the weights: weights_n_bits, enable_weights_quantization, weights_quantization_method,
    weights_error_method, weights_per_channel_threshold, l_p_value, weights_bias_correction (False: not of this layer).

    Raises:
        UnknownNameError: there is no such attribute.
        ConfigError: a value has the wrong type.
    """

    table, error_method, general = _WEIGHTS, "weights_error_method", frozenset(_GENERAL)

    def __init__(self, attr_name: str | None = None, **kwargs: Any) -> None:
        check_kernel(attr_name)
        own = kwargs.pop(_BIAS_CORRECTION, None)
        if own is not None:
            self.bias_correction = check_value(bool, own, ConfigError, type(self).__name__, _BIAS_CORRECTION)
        if kwargs or own is None:
            super().__init__(**kwargs)
        else:
            Action.__init__(self, {})


class ChangeFinalWeightsQuantConfigAttr(ChangeCandidatesWeightsQuantConfigAttr):
    """Change settings of the weights; takes precedence over all other rules about the layer's weights."""

    final = True


class ChangeCandidatesActivationQuantConfigAttr(_ByAttributes):
    """Change settings of the result: activation_n_bits, enable_activation_quantization, activation_quantization_method,
    activation_error_method, signedness, z_threshold, l_p_value.

    Raises:
        UnknownNameError: there is no such attribute.
        ConfigError: a value has the wrong type.
    """

    table, error_method, general = _ACTIVATIONS, "activation_error_method", frozenset(_GENERAL)


class ChangeFinalActivationQuantConfigAttr(ChangeCandidatesActivationQuantConfigAttr):
    """Change settings of the result; takes precedence over all other rules about the layer's result."""

    final = True


class ChangeCandidatesWeightsQuantizationMethod(ChangeCandidatesWeightsQuantConfigAttr):
    """Change the QuantizationMethod of the weights, to one that the chip's own method includes.

    Args:
        attr_name: of the weight; a method alone may be the first argument.
        weights_quantization_method: the method.
    """

    def __init__(
        self,
        attr_name: str | QuantizationMethod | None = None,
        weights_quantization_method: QuantizationMethod | None = None,
    ) -> None:
        if isinstance(attr_name, QuantizationMethod):
            attr_name, weights_quantization_method = None, attr_name
        super().__init__(attr_name, weights_quantization_method=weights_quantization_method)


class ChangeFinalWeightsQuantizationMethod(ChangeCandidatesWeightsQuantizationMethod):
    """Change the QuantizationMethod of the weights; takes precedence over all other rules."""

    final = True


class ChangeCandidatesActivationQuantizationMethod(ChangeCandidatesActivationQuantConfigAttr):
    """Change the QuantizationMethod of the result, to one that the chip's own method includes."""

    def __init__(self, activation_quantization_method: QuantizationMethod) -> None:
        super().__init__(activation_quantization_method=activation_quantization_method)


class ChangeFinalActivationQuantizationMethod(ChangeCandidatesActivationQuantizationMethod):
    """Change the QuantizationMethod of the result; takes precedence over all other rules."""

    final = True


_Rule = Annotated[str | Callable[..., Any], allowed("a function, or the name of a range rule")]


class ChangeQuantizationParamFunction(Action):
    """Change the range rule.

    Args:
        attr_name: of the weight; only kernels have a range rule of their own.
        activation_quantization_params_fn, weights_quantization_params_fn: the name of a range rule, or a function
            `(sample, grid)` that returns `QParams`, {"threshold": t} or {"range_min": a, "range_max": b}; t, a and b
            are numbers, or tensors with one entry for each channel. `sample` is a `chipfit.ranges.search.Sample`
            (values, counts, extremes), `grid` the quantization grid.

    Raises:
        UnknownNameError: there is no range rule of that name.
        ConfigError: a value is neither a name nor a function.
    """

    @arguments(ConfigError)
    def __init__(
        self,
        attr_name: str | None = None,
        activation_quantization_params_fn: _Rule | None = None,
        weights_quantization_params_fn: _Rule | None = None,
    ) -> None:
        check_kernel(attr_name)
        given = {"rule": activation_quantization_params_fn, "weight_rule": weights_quantization_params_fn}
        given = {k: v if isinstance(v, str) else _ByFunction(v) for k, v in given.items() if v is not None}
        if not given:
            raise ConfigError("ChangeQuantizationParamFunction requires a function or the name of a range rule")
        super().__init__(given)


@dataclass(frozen=True)
class _ByFunction:
    """A range rule that calls a function of the user."""

    function: Callable[[Sample, Grid], Any]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        result = self.function(sample, grid)
        if isinstance(result, QParams):
            return result
        try:
            if "threshold" in result:
                t = _per_channel(result["threshold"], sample)
                if grid.zero != 0:  # an asymmetric grid: use the range [-t, t] or [0, t]
                    return from_min_max(torch.where(sample.low < 0, -t, 0.0), t, grid)
                scale = finish_scale(t / (-grid.qmin or grid.qmax + 1), grid)
                return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))
            low, high = (_per_channel(result[end], sample) for end in ("range_min", "range_max"))
            return from_min_max(low, high, grid)
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"Function '{self.__name__}' must return a range",
                got=repr(result),
                allowed='QParams, {"threshold": t}, or {"range_min": a, "range_max": b}; '
                "numbers, or tensors with one entry per channel",
            ) from None


def _per_channel(value: Any, sample: Sample) -> torch.Tensor:
    value = value.cpu() if isinstance(value, torch.Tensor) else value
    t = torch.as_tensor(value, dtype=torch.float64).reshape(-1).expand(len(sample.low))
    if not bool(t.isfinite().all()):
        raise ValueError
    return t


class ReplaceLayer(Action):
    """Replace each layer by another one before calibration.

    Args:
        layer_type: class of the new layer.
        get_params_and_weights_fn: maps `(weights, **attributes)` of the old layer, a table of tensors and its
            constructor arguments, to the pair (weights, attributes) of the new one.

    Raises:
        ConfigError: layer_type is not a class, or get_params_and_weights_fn is not a function.
    """

    @arguments(ConfigError)
    def __init__(
        self, layer_type: type, get_params_and_weights_fn: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> None:
        super().__init__({})
        self.layer_type, self.get_params_and_weights_fn = layer_type, get_params_and_weights_fn


@record(ConfigError, frozen=True)
class EditRule:
    """A change to the layers that a filter selects.

    Args:
        filter: selects the layers, at least one.
        action: the change.

    Raises:
        ConfigError: filter or action have the wrong type.
    """

    filter: Filter
    action: Annotated[Action, allowed(", ".join(c.__name__ for c in ACTIONS))]


def to_overrides(rules: Iterable[EditRule]) -> list[tuple[NodeFilter, dict[str, Any]]]:
    """Return rules as overrides, final ones last, without those that replace layers."""
    ordered = sorted(rules, key=lambda r: r.action.final)
    return [(r.filter, r.action.choices) for r in ordered if r.action.choices]


# ---------------------------------------------------------------- replacement of layers before capture


def replace_layers(model: Any, rules: Iterable[EditRule]) -> Any:
    """Return a copy of `model` with replaced layers; return `model` itself if no rule replaces any.

    A rule's function receives weights as `{name: tensor}` on the CPU (of Keras layers as arrays), and the constructor
    arguments that the module keeps, or the configuration of the Keras layer. A new module is moved to the device of the
    model.

    Raises:
        UnknownNameError: a filter selects no module; lists similar names.
        ConfigError: a rule's function did not return weights and attributes that fit its layer type.
        UnsupportedError: the model is not a PyTorch module, nor a Functional or Sequential Keras model.
    """
    replacing = [(r.filter, r.action) for r in rules if isinstance(r.action, ReplaceLayer)]
    if not replacing:
        return model
    known = {"torch": _replaced_in_torch, "keras": _replaced_in_keras}
    replace = known.get(framework_of(model))
    if replace is None:
        raise UnsupportedError("ReplaceLayer supports PyTorch and Keras models only", got=type(model).__name__)
    for layer_filter, action in replacing:
        model = replace(model, layer_filter, action)
    return model


def _replaced_in_torch(model: torch.nn.Module, layer_filter: NodeFilter, action: ReplaceLayer) -> torch.nn.Module:
    """Return a copy of a model in which modules are replaced."""
    model, device = copy.deepcopy(model), device_of(model)
    named = model.named_modules(remove_duplicate=False)
    leaves = {name: m for name, m in named if name and not any(True for _ in m.children())}
    selected = [name for name, m in leaves.items() if layer_filter.match(_node(name, type(m), module_settings(m)))]
    if not selected:
        raise UnknownNameError("module for the filter", layer_filter.name, leaves)
    new: dict[int, torch.nn.Module] = {}  # by id: a module under two names is replaced once
    for name in selected:
        old = leaves[name]
        parent, _, own = name.rpartition(".")
        if id(old) not in new:
            new[id(old)] = _replacement(name, old, action, device)
        setattr(model.get_submodule(parent), own, new[id(old)])
    return model


def _replaced_in_keras(model: Any, layer_filter: NodeFilter, action: ReplaceLayer) -> Any:
    keras = part("keras", "replacing")
    seen, selected = set[str](), list[str]()

    def choose(layer: Any) -> tuple[Any, Mapping[str, Any]] | None:
        seen.add(layer.name)
        settings = layer.get_config()
        if not layer_filter.match(_node(layer.name, type(layer), settings)):
            return None
        selected.append(layer.name)
        weights, attributes = action.get_params_and_weights_fn(keras.weights_of(layer), **settings)
        return action.layer_type(**attributes), weights

    with _fitting(action, selected):
        model = keras.with_other_layers(model, choose)
    if not selected:
        raise UnknownNameError("layer for the filter", layer_filter.name, seen)
    return model


def _node(name: str, kind: type, settings: dict[str, Any]) -> Node:
    """Return a layer as the node that it becomes in the graph, for filters."""
    op = next(iter(member_of(kind).op), "")
    return Node(name.replace(".", "_"), op, (), (), {}, name, kind.__name__, "", settings)


@contextmanager
def _fitting(action: ReplaceLayer, names: Sequence[str]) -> Iterator[None]:
    """Report weights and attributes that do not fit the new layer, of the last of the names."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as e:
        if isinstance(e, ChipfitError):
            raise
        allowed = "get_params_and_weights_fn(weights, **attributes) returns (weights, attributes) that fit the layer"
        what = f"'{names[-1] if names else ''}' cannot become a {action.layer_type.__name__}"
        raise ConfigError(what, got=first_line(e), allowed=allowed) from e


def _replacement(name: str, old: torch.nn.Module, action: ReplaceLayer, device: torch.device) -> torch.nn.Module:
    given = {k: v.detach().cpu().clone() for k, v in old.state_dict().items()}
    with _fitting(action, [name]):
        weights, attributes = action.get_params_and_weights_fn(given, **module_settings(old))
        new = action.layer_type(**attributes)
        new.load_state_dict({k: torch.as_tensor(v) for k, v in weights.items()})
    return new.train(old.training).to(device)
