"""Rules that change how single layers are quantized: filters choose layers, actions say what is different about them.

Every rule is checked when it is made, and becomes an entry of `overrides`: see `chipfit.decide.overrides.CHOICES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from chipfit.decide.overrides import check_choices
from chipfit.errors import ConfigError, UnknownNameError
from chipfit.facade.core.error_method import QuantizationErrorMethod
from chipfit.facade.pydantic_messages import Name, allowed, arguments, by_name, check_value, record
from chipfit.facade.target_platform.capabilities import matches, members_of
from chipfit.facade.target_platform.configs import QuantizationMethod, Signedness
from chipfit.graph.ir import Node
from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, finish_scale, from_min_max
from chipfit.ranges.search import Sample

__all__ = ["ACTIONS", "Action", "ChangeQuantizationParamFunction", "EditRule", "ReplaceLayer"]
__all__ += ["NodeFilter", "NodeNameFilter", "NodeNameScopeFilter", "NodeTypeFilter", "filters_of", "to_overrides"]
__all__ += ["ChangeCandidatesActivationQuantConfigAttr", "ChangeCandidatesActivationQuantizationMethod"]
__all__ += ["ChangeCandidatesWeightsQuantConfigAttr", "ChangeCandidatesWeightsQuantizationMethod"]
__all__ += ["ChangeFinalActivationQuantConfigAttr", "ChangeFinalActivationQuantizationMethod"]
__all__ += ["ChangeFinalWeightsQuantConfigAttr", "ChangeFinalWeightsQuantizationMethod"]

# ---------------------------------------------------------------- filters


class NodeFilter:
    """Chooses layers. Filters are joined by `&` and `|` and negated by `~`, nested at will."""

    def match(self, node: Node) -> bool:
        """Whether the layer is meant."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """What is looked for, for messages."""
        return str(self)

    def __and__(self, other: NodeFilter) -> NodeFilter:
        return _joined(all, "&", self, other)

    def __or__(self, other: NodeFilter) -> NodeFilter:
        return _joined(any, "|", self, other)

    def __invert__(self) -> NodeFilter:
        return _Joined(lambda found: not all(found), "~", (self,))


@dataclass(frozen=True)
class NodeTypeFilter(NodeFilter):
    """Layers of a type.

    Args:
        node_type: a class or function of a framework, a `LayerFilterParams`, or the name of an operator.

    Raises:
        ModelingError: it stands for no known operator.
    """

    node_type: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "_member", members_of([self.node_type])[0])

    def match(self, node: Node) -> bool:
        return matches(self._member, node)  # type: ignore[attr-defined]  # of __post_init__

    @property
    def name(self) -> str:
        return getattr(self.node_type, "__name__", str(self.node_type))


@record(ConfigError, frozen=True)
class NodeNameFilter(NodeFilter):
    """The layer of a name: of a module ("layer1.0.conv1", or with underscores), of a Keras layer, or of a node."""

    node_name: Name

    def match(self, node: Node) -> bool:
        return self.node_name in _names(node)

    @property
    def name(self) -> str:
        return self.node_name


@record(ConfigError, frozen=True)
class NodeNameScopeFilter(NodeFilter):
    """Layers whose name contains a text."""

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
    """One filter or several as a list.

    Raises:
        ConfigError: none, or something that is no filter.
    """
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    some = Annotated[list[Filter], Field(min_length=1)]
    return check_value(some, found, ConfigError, "a rule", "filters")  # type: ignore[no-any-return]  # as `some` says


# ---------------------------------------------------------------- actions

#: names that the weights of linear operators go by
KERNELS = ("kernel", "kernel_attr", "weight", "depthwise_kernel")

# what an attribute may be, and which choice of `overrides` it becomes
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


ACTIONS: list[type[Action]] = []  #: every action that a rule may have


class Action:
    """What is different about the layers of a rule."""

    final = False  #: applied after everything else, so that it wins

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

    def __init__(self, **kwargs: Any) -> None:
        if not kwargs:
            raise ConfigError(f"{type(self).__name__} changes nothing", allowed=", ".join([*self.table, "l_p_value"]))
        kwargs = dict(kwargs)
        p = kwargs.pop("l_p_value", None)
        method = kwargs.get(self.error_method)
        if p is not None and getattr(method, "name", "") != "LP":
            got = f"{self.error_method}={method}"
            hint = f"set {self.error_method} as well"
            raise ConfigError("l_p_value is the exponent of the error method LP", got=got, hint=hint)
        choices = {}
        for attr, value in kwargs.items():
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


class ChangeCandidatesWeightsQuantConfigAttr(_ByAttributes):
    """Other settings for the weights: weights_n_bits, enable_weights_quantization, weights_quantization_method,
    weights_error_method, weights_per_channel_threshold, l_p_value.

    Raises:
        UnknownNameError: another name. ConfigError: a value of the wrong kind.
    """

    table, error_method = _WEIGHTS, "weights_error_method"

    def __init__(self, attr_name: str = "kernel", **kwargs: Any) -> None:
        if attr_name not in KERNELS:
            raise ConfigError("Only the settings of kernels can be changed", got=repr(attr_name), allowed="kernel")
        super().__init__(**kwargs)


class ChangeFinalWeightsQuantConfigAttr(ChangeCandidatesWeightsQuantConfigAttr):
    """The same, after bit widths are chosen: wins over all other rules about the layer's weights."""

    final = True


class ChangeCandidatesActivationQuantConfigAttr(_ByAttributes):
    """Other settings for the result: activation_n_bits, enable_activation_quantization, activation_quantization_method,
    activation_error_method, signedness, z_threshold, l_p_value.

    Raises:
        UnknownNameError: another name. ConfigError: a value of the wrong kind.
    """

    table, error_method = _ACTIVATIONS, "activation_error_method"


class ChangeFinalActivationQuantConfigAttr(ChangeCandidatesActivationQuantConfigAttr):
    """The same, after bit widths are chosen: wins over all other rules about the layer's result."""

    final = True


class ChangeCandidatesWeightsQuantizationMethod(ChangeCandidatesWeightsQuantConfigAttr):
    """Another QuantizationMethod for the weights, one that the chip's own holds."""

    def __init__(self, weights_quantization_method: QuantizationMethod) -> None:
        super().__init__(weights_quantization_method=weights_quantization_method)


class ChangeFinalWeightsQuantizationMethod(ChangeCandidatesWeightsQuantizationMethod):
    """The same, after bit widths are chosen."""

    final = True


class ChangeCandidatesActivationQuantizationMethod(ChangeCandidatesActivationQuantConfigAttr):
    """Another QuantizationMethod for the result, one that the chip's own holds."""

    def __init__(self, activation_quantization_method: QuantizationMethod) -> None:
        super().__init__(activation_quantization_method=activation_quantization_method)


class ChangeFinalActivationQuantizationMethod(ChangeCandidatesActivationQuantizationMethod):
    """The same, after bit widths are chosen."""

    final = True


_Rule = Annotated[str | Callable[..., Any], allowed("a function, or the name of a range rule")]


class ChangeQuantizationParamFunction(Action):
    """Another way to find ranges.

    Args:
        activation_quantization_params_fn, weights_quantization_params_fn: the name of a range rule, or a function
            `(sample, grid)` that returns `QParams`, {"threshold": t} or {"range_min": a, "range_max": b}; t, a and b
            are numbers, or tensors with one entry for each channel. `sample` is a `chipfit.ranges.search.Sample`
            (values, counts, extremes), `grid` the codes.

    Raises:
        UnknownNameError: no range rule of that name.
        ConfigError: neither a name nor a function.
    """

    @arguments(ConfigError)
    def __init__(
        self,
        activation_quantization_params_fn: _Rule | None = None,
        weights_quantization_params_fn: _Rule | None = None,
    ) -> None:
        given = {"rule": activation_quantization_params_fn, "weight_rule": weights_quantization_params_fn}
        given = {k: v if isinstance(v, str) else _ByFunction(v) for k, v in given.items() if v is not None}
        if not given:
            raise ConfigError("ChangeQuantizationParamFunction needs a function, or the name of a range rule")
        super().__init__(given)


@dataclass(frozen=True)
class _ByFunction:
    """A user's function as a range rule."""

    function: Callable[[Sample, Grid], Any]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        found = self.function(sample, grid)
        if isinstance(found, QParams):
            return found
        try:
            if "threshold" in found:
                t = _per_channel(found["threshold"], sample)
                if grid.zero != 0:  # no threshold, but a range that is as wide
                    return from_min_max(torch.where(sample.low < 0, -t, 0.0), t, grid)
                scale = finish_scale(t / (-grid.qmin or grid.qmax + 1), grid)
                return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))
            low, high = (_per_channel(found[end], sample) for end in ("range_min", "range_max"))
            return from_min_max(low, high, grid)
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"The function '{self.__name__}' returned no range",
                got=repr(found),
                allowed='QParams, {"threshold": t}, or {"range_min": a, "range_max": b}; '
                "numbers, or tensors with one entry per channel",
            ) from None


def _per_channel(value: Any, sample: Sample) -> torch.Tensor:
    t = torch.as_tensor(value, dtype=torch.float64).reshape(-1).expand(len(sample.low))
    if not bool(t.isfinite().all()):
        raise ValueError
    return t


class ReplaceLayer(Action):
    """Another layer in place of each one; it is calibrated as if it had been there from the start.

    Args:
        layer_type: class of the new layer.
        get_params_and_weights_fn: `(weights, **attributes)` of the old layer, a table of tensors and its constructor
            arguments, to the pair of the new one's.

    Raises:
        ConfigError: no class, or no function.
    """

    @arguments(ConfigError)
    def __init__(
        self, layer_type: type, get_params_and_weights_fn: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> None:
        super().__init__({})
        self.layer_type, self.get_params_and_weights_fn = layer_type, get_params_and_weights_fn


@record(ConfigError, frozen=True)
class EditRule:
    """What is different about some layers.

    Args:
        filter: which layers; it must mean at least one.
        action: what is different about them.

    Raises:
        ConfigError: no filter, or no action.
    """

    filter: Filter
    action: Annotated[Action, allowed(", ".join(c.__name__ for c in ACTIONS))]


def to_overrides(rules: Iterable[EditRule]) -> list[tuple[NodeFilter, dict[str, Any]]]:
    """Rules as overrides, final ones last; those that replace layers are none."""
    ordered = sorted(rules, key=lambda r: r.action.final)
    return [(r.filter, r.action.choices) for r in ordered if r.action.choices]
