"""Target platform models with a framework's layers attached: `TargetPlatformCapabilities`, and filters of layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import field
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from chipfit.errors import ModelingError
from chipfit.graph.config import call_settings, module_settings, plain
from chipfit.graph.ir import Node
from chipfit.mct.target_platform.configs import OpQuantizationConfig, QuantizationConfigOptions
from chipfit.mct.target_platform.layers import member_of, name_of, normalize_name
from chipfit.mct.target_platform.model import OperatorGroup, TargetPlatformModel
from chipfit.platform.filters import AttributeFilter, Member, has_nan
from chipfit.platform.match import sets_of
from chipfit.platform.schema import Platform
from chipfit.validation import allowed, arguments, record

__all__ = ["LayerFilterParams", "OperationsSetToLayers", "OperationsToLayers", "TargetPlatformCapabilities"]
__all__ += ["FrameworkQuantizationCapabilities", "get_current_tpc"]
__all__ += ["AttributeFilter", "Contains", "DefaultDict", "Eq", "Greater", "GreaterEq", "NotEq", "Smaller", "SmallerEq"]

_CURRENT: ContextVar[TargetPlatformCapabilities | None] = ContextVar("target_platform_capabilities", default=None)


def get_current_tpc() -> TargetPlatformCapabilities:
    """Return the capabilities whose `with` block is open.

    Raises:
        ModelingError: no block is open.
    """
    tpc = _CURRENT.get()
    if tpc is None:
        hint = "call it inside `with TargetPlatformCapabilities(...):`"
        raise ModelingError("Target platform capabilities are not initialized.", hint=hint)
    return tpc


def _condition(attr: str, test: Any, value: Any) -> AttributeFilter:
    if not isinstance(attr, str) or has_nan(plain(value)):
        allowed = "an attribute's name, and any value except nan, which equals nothing and has no order"
        raise ModelingError("Invalid comparison of an attribute", got=f"{attr!r}, {value!r}"[:120], allowed=allowed)
    return AttributeFilter(attr=attr, test=test, value=value)


def _filter(name: str, test: str, doc: str) -> Any:
    def make(attr: str, value: Any) -> AttributeFilter:
        return _condition(attr, test, value)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"Return a filter of layers whose attribute has a value {doc} `value`; join filters with `&`, `|`."
    return make


Eq = _filter("Eq", "eq", "equal to")
NotEq = _filter("NotEq", "ne", "other than")
Greater = _filter("Greater", "gt", "above")
GreaterEq = _filter("GreaterEq", "ge", "at or above")
Smaller = _filter("Smaller", "lt", "below")
SmallerEq = _filter("SmallerEq", "le", "at or below")
Contains = _filter("Contains", "contains", "that contains")


_Known = Annotated[Mapping[Any, Any], BeforeValidator(lambda v: {} if v is None else v), AfterValidator(dict)]


@record(ModelingError, frozen=True)
class DefaultDict:
    """A read-only mapping with a default value."""

    known_dict: _Known = field(default_factory=dict)
    default_value: Any = None

    def get(self, key: Any) -> Any:
        """Return the value of a key, else the default."""
        return self.known_dict.get(key, self.default_value)

    def keys(self) -> Iterable[Any]:
        """Return the keys with a value of their own."""
        return self.known_dict.keys()

    def __hash__(self) -> int:
        return hash(len(self.known_dict))


Condition = Annotated[AttributeFilter, allowed("filters such as Eq, NotEq and Greater, joined by & and |")]


class LayerFilterParams:
    """A layer with conditions on its attributes.

    Args:
        layer: class, function or name, see `OperationsSetToLayers`.
        conditions: filters, all of which must match.
        kwargs: attribute = value; a missing attribute counts as None.
    """

    @arguments(ModelingError)
    def __init__(self, layer: Any, *conditions: Condition, **kwargs: Any) -> None:
        self.layer, self.conditions, self.kwargs = layer, conditions, {k: plain(v) for k, v in kwargs.items()}
        self._tests = [*(_condition(k, "is", v) for k, v in self.kwargs.items()), *conditions]

    @property
    def member(self) -> Member:
        """The filter as data."""
        tests = self._tests
        where = tests[0] if len(tests) == 1 else AttributeFilter(all_=tuple(tests)) if tests else None
        return member_of(self.layer).model_copy(update={"where": where})

    def match(self, node: Any) -> bool:
        """Return whether a node of a graph, a layer object, or a call `(function, keyword arguments)` matches."""
        if isinstance(node, Node):
            return matches(self.member, node)
        kind, config = describe(node)
        name = normalize_name(getattr(kind, "__name__", str(kind)))
        same = kind is self.layer or (isinstance(self.layer, str) and normalize_name(self.layer) == name)
        where = self.member.where
        return same and (where is None or where.match(config))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerFilterParams) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        words = [f"{k}={v}" for k, v in self.kwargs.items()] + [repr(c) for c in self.conditions]
        return f"{name_of(self.layer)}({', '.join(words)})"


def members_of(layers: Iterable[Any]) -> tuple[Member, ...]:
    """Return members of an operator set for classes, functions, names and LayerFilterParams.

    Raises:
        ModelingError: a layer is not a known operator; lists similar names.
    """
    return tuple(x.member if isinstance(x, LayerFilterParams) else member_of(x) for x in layers)


def matches(member: Member, node: Node) -> bool:
    """Return whether a node belongs to a member of an operator set."""
    return member.match(node.op, node.layer_type, node.config)


def _identity(node: Any) -> tuple[Any, str, str, dict[str, Any]]:
    """Return class or function (of a node: name), operator, name and attributes of a node, layer object or call."""
    if isinstance(node, Node):
        return node.layer_type, node.op, node.layer_type, node.config
    kind, config = describe(node)
    name = getattr(kind, "__name__", str(kind))
    known = [config.get("activation") if name == "Activation" else kind, *getattr(kind, "__mro__", ())[1:]]
    for like in known:
        try:
            return kind, next(op for op in member_of(like).op), name, config
        except (ModelingError, StopIteration):  # a class without an operator of its own
            continue
    return kind, "", name, config


def describe(layer: Any) -> tuple[Any, dict[str, Any]]:
    """Return class or function of a layer object or call, and its attributes for filters."""
    if isinstance(layer, tuple) and len(layer) == 2 and callable(layer[0]):
        return layer[0], call_settings(layer[0], layer[1])
    if hasattr(layer, "get_config"):
        return type(layer), {k: plain(v) for k, v in layer.get_config().items()}
    return type(layer), module_settings(layer)


class OperationsSetToLayers:
    """The layers of one operator set.

    Args:
        op_set_name: name of a set of the model.
        layers: classes, functions, names, or LayerFilterParams.
        attr_mapping: generic weight attribute -> DefaultDict of layer -> the framework's name of that attribute.
    """

    @arguments(ModelingError)
    def __init__(
        self,
        op_set_name: str,
        layers: Annotated[Sequence[Any], Field(min_length=1)],
        attr_mapping: Mapping[str, DefaultDict] | None = None,
    ) -> None:
        self.name, self.layers, self.attr_mapping = op_set_name, list(layers), dict(attr_mapping or {})
        self.members = tuple(dict.fromkeys(members_of(layers)))
        tpc = _CURRENT.get()
        if tpc is not None:
            tpc._add(self)

    def __repr__(self) -> str:
        return f"OperationsSetToLayers({self.name!r}, [{', '.join(map(name_of, self.layers))}])"


class OperationsToLayers:
    """The layers of all operator sets: a list of `OperationsSetToLayers`."""

    def __init__(self, op_sets_to_layers: Iterable[OperationsSetToLayers] | None = None) -> None:
        self.op_sets_to_layers: list[OperationsSetToLayers] = []
        for o in op_sets_to_layers or ():
            self.add(o)

    @arguments(ModelingError)
    def add(self, entry: OperationsSetToLayers) -> None:
        """Append the layers of one set.

        Raises:
            ModelingError: the set or a layer was added before, or `entry` is not an OperationsSetToLayers.
        """
        if entry.name in [other.name for other in self.op_sets_to_layers]:
            raise ModelingError(f"Layers of operator set '{entry.name}' are defined twice")
        set_of = {member: o.name for o in self.op_sets_to_layers for member in o.members}
        for layer in entry.layers:
            (member,) = members_of([layer])
            if member in set_of:  # this layer, or one with its name
                got = f"'{set_of[member]}' and '{entry.name}'"
                raise ModelingError(f"Found layer {name_of(layer)} in more than one OperatorsSet", got=got)
        self.op_sets_to_layers.append(entry)

    def get_layers_by_op(self, op: OperatorGroup) -> list[Any] | None:
        """Return the layers of a set, or of all sets of a concatenation; None if none are attached."""
        named = {o.name: o.layers for o in self.op_sets_to_layers}
        if op.name in named:
            return named[op.name]
        return [layer for m in op.members for layer in named.get(m.name, ())] or None


class TargetPlatformCapabilities:
    """A target platform model with a framework's layers attached.

    Args:
        tp_model: the model of the hardware.
        name: of these capabilities.
        version: of the platform.
        op_sets_to_layers: the layers; or create `OperationsSetToLayers` inside `with capabilities:`.
        platform: the `Platform` that the capabilities were read from, if any; `to_platform` returns it.

    Raises:
        ModelingError: the model has no such set; see also `OperationsToLayers.add`.
    """

    @arguments(ModelingError)
    def __init__(
        self,
        tp_model: TargetPlatformModel,
        name: str = "base",
        version: str | None = None,
        *,
        op_sets_to_layers: OperationsToLayers | None = None,
        platform: Platform | None = None,
    ) -> None:
        self.tp_model, self.name, self.version = tp_model, name, version
        self.op_sets_to_layers = OperationsToLayers()
        self.source = platform
        self._token: Any = None
        for o in (op_sets_to_layers or OperationsToLayers()).op_sets_to_layers:
            self._add(o)

    def _add(self, entry: OperationsSetToLayers) -> None:
        if not self.tp_model.is_opset_in_model(entry.name):
            known = ", ".join(o.name for o in self.tp_model.operator_set) or "none"
            model = "the target platform model that is associated with the target platform capabilities"
            what = f"is not defined in {model}"
            raise ModelingError(f"{entry.name} {what}", allowed=known)
        self.op_sets_to_layers.add(entry)

    def __enter__(self) -> TargetPlatformCapabilities:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _CURRENT.reset(self._token)
        self._token = None

    # ---- queries

    @property
    def _entries(self) -> list[OperationsSetToLayers]:
        return self.op_sets_to_layers.op_sets_to_layers

    def get_layers_by_opset_name(self, opset_name: str) -> list[Any] | None:
        """Return the layers of a set; None for an unknown set."""
        op = self.tp_model.get_opset_by_name(opset_name)
        return None if op is None else self.op_sets_to_layers.get_layers_by_op(op)

    def get_layers_by_opset(self, op: OperatorGroup) -> list[Any] | None:
        """Return the layers of a set."""
        return self.op_sets_to_layers.get_layers_by_op(op)

    def get_fusing_patterns(self) -> list[list[Any]]:
        """Return all fused sequences of layers, in the order of the model."""
        patterns: list[list[Any]] = []
        for f in self.tp_model.fusing_patterns:
            steps = [self.get_layers_by_opset(g) or [] for g in f.operator_groups_list]
            patterns += [list(p) for p in itertools.product(*steps)]
        return patterns

    def get_default_op_qc(self) -> OpQuantizationConfig:
        """Return the configuration of layers that belong to no set."""
        return self.tp_model.get_default_op_quantization_config()

    def get_qco_by_node(self, node: Any) -> QuantizationConfigOptions:
        """Return the options of a node, a layer object, or a call; filters take precedence over plain layers.

        An attribute mapping renames weight attributes to the framework's names.

        Raises:
            ModelingError: `node` is None.
        """
        if node is None:
            allowed = "a layer object, a call (function, keyword arguments), or a node of a graph"
            raise ModelingError("There are no options for no node", got=None, allowed=allowed)
        attached = {o.name: o for o in self._entries}
        sets = self.tp_model.members({name: o.members for name, o in attached.items()})
        kind, op, name, config = _identity(node)
        held = sets_of(sets, op, name, config, filtered=True) or sets_of(sets, op, name, config)
        own = next((s for s in sets if f"@{s}" in held), None)
        if own is None:
            return self.tp_model.default_qco
        options = self.tp_model.get_config_options_by_operators_set(own) or self.tp_model.default_qco
        mapping = attached[own].attr_mapping if own in attached else {}
        if not mapping:
            return options
        names = {a: a for c in options.quantization_config_list for a in c.attr_weights_configs_mapping}
        for attribute, d in mapping.items():  # layers from a file are names
            named = (v for k, v in d.known_dict.items() if k is kind or name_of(k) == name_of(kind))
            names[attribute] = next(named, d.default_value) or attribute
        return options.clone_and_map_weights_attr_keys(names)

    def get_info(self) -> dict[str, Any]:
        """Return a description for printing."""
        return {
            "Capabilities": self.name,
            "Version": self.version,
            **self.tp_model.get_info(),
            "Layers": {o.name: [name_of(x) for x in o.layers] for o in self._entries},
        }

    def show(self) -> None:
        """Print the tables of the platform that the capabilities describe."""
        from rich import print as rich_print

        from chipfit.platform.show import show

        rich_print(show(self.to_platform()))

    def to_platform(self) -> Platform:
        """Return the chip as a `Platform`, the record of platform files."""
        return self.source or self.tp_model.to_platform({o.name: o.members for o in self._entries})

    def _key(self) -> tuple[Any, ...]:
        layers = tuple((o.name, o.members, tuple(o.attr_mapping)) for o in self._entries)
        return self.tp_model, self.name, self.version, layers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TargetPlatformCapabilities) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tp_model!r}, name={self.name!r}, version={self.version!r})"


FrameworkQuantizationCapabilities = TargetPlatformCapabilities  #: its later name
