"""Target platform models: operator sets, their options, and fusions.

Parts created inside `with model:` are added to it; parts created outside are arguments of the constructor.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainValidator

from chipfit.errors import ModelingError, UnknownNameError
from chipfit.mct.target_platform.configs import Flag, OpQuantizationConfig, QuantizationConfigOptions
from chipfit.mct.target_platform.layers import members_of_set
from chipfit.mct.target_platform.to_platform import build_platform
from chipfit.platform.filters import Member
from chipfit.platform.schema import Math, Platform
from chipfit.validation import Name, arguments, record

__all__ = ["Fusing", "OperatorSetConcat", "OperatorSetGroup", "OperatorsSet", "TargetPlatformModel"]
__all__ += ["get_default_quantization_config_options"]

_CURRENT: ContextVar[TargetPlatformModel | None] = ContextVar("target_platform_model", default=None)


def get_default_quantization_config_options() -> QuantizationConfigOptions:
    """Return the default options of the model whose `with` block is open.

    Raises:
        ModelingError: no block is open.
    """
    model = _CURRENT.get()
    if model is None:
        hint = "call it inside `with TargetPlatformModel(...):`"
        raise ModelingError("Target platform model is not initialized.", hint=hint)
    return model.default_qco


class OperatorGroup:
    """A step of a fusion: an operator set, or a concatenation of several."""

    name: str
    qc_options: QuantizationConfigOptions | None

    @property
    def members(self) -> tuple[OperatorsSet, ...]:
        """The sets of the group; an operator set is a group of itself."""
        return (self,)  # type: ignore[return-value]  # overridden by concatenations

    def get_info(self) -> dict[str, Any]:
        """Return a description for printing."""
        return {"name": self.name}


@record(ModelingError, frozen=True)
class OperatorsSet(OperatorGroup):
    """Operators under one label.

    Args:
        name: unique in its model.
        qc_options: their options; the model's default when omitted.
    """

    name: Name
    qc_options: QuantizationConfigOptions | None = None

    def __post_init__(self) -> None:
        _add_to_open_model(self)


def _of_name(given: Any) -> Any:
    """Return the group of a name in the open model; without an open model, a set of that name.

    Raises:
        ModelingError: the open model has no such group; lists similar names.
    """
    model = _CURRENT.get()
    if not isinstance(given, str) or model is None:
        return OperatorsSet(given) if isinstance(given, str) else given
    known = {o.name: o for o in model.operator_set}
    if given not in known:
        near = UnknownNameError("operator set", given, known)
        raise ModelingError(near.what, where=f"model '{model.name}'", **near.choices)
    return known[given]


Group = Annotated[OperatorGroup, BeforeValidator(_of_name)]


@dataclass(frozen=True, init=False)
class OperatorSetConcat(OperatorGroup):
    """A concatenation of operator sets, as one step of a fusion.

    Args:
        opsets: sets, concatenations, or their names.
        name: the names of the sets joined by "_" when omitted.
    """

    op_set_list: tuple[OperatorsSet, ...]
    name: str
    qc_options: QuantizationConfigOptions | None = None  #: those of a set that a copy of a model has in its place

    @arguments(ModelingError)
    def __init__(self, *opsets: Group, name: str | None = None) -> None:
        if not opsets:
            raise ModelingError("OperatorSetConcat requires at least one OperatorsSet", got="none")
        object.__setattr__(self, "op_set_list", tuple(m for o in opsets for m in o.members))
        object.__setattr__(self, "name", name or "_".join(o.name for o in opsets))
        _add_to_open_model(self)

    @property
    def members(self) -> tuple[OperatorsSet, ...]:
        """The sets of the concatenation."""
        return self.op_set_list

    def get_info(self) -> dict[str, Any]:
        """Return a description for printing."""
        return {"name": self.name, "sets": [m.name for m in self.members]}


OperatorSetGroup = OperatorSetConcat  #: its later name


@record(ModelingError, frozen=True)
class Fusing:
    """A fusion of operators: tensors between them are not quantized.

    Args:
        operator_groups_list: two or more groups or their names, in execution order.
        name: the groups' names joined by "_" when omitted.
    """

    operator_groups_list: Annotated[Sequence[Group], AfterValidator(tuple)]
    name: str | None = None

    def __post_init__(self) -> None:
        groups = self.operator_groups_list
        if len(groups) < 2:
            what = "Fusing can not be created for a single operators group"
            raise ModelingError(what, got=len(groups), allowed="two or more")
        object.__setattr__(self, "name", self.name or "_".join(g.name for g in groups))
        _add_to_open_model(self)

    def contains(self, other: Fusing) -> bool:
        """Return whether the groups of `other` are consecutive groups here; a set matches its concatenations."""
        mine, theirs = self.operator_groups_list, other.operator_groups_list
        starts = range(len(mine) - len(theirs) + 1)
        return any(all(a == b or b in a.members for a, b in zip(mine[i:], theirs, strict=False)) for i in starts)

    def get_info(self) -> dict[str | None, str]:
        """Return {name: "a -> b"} for printing."""
        return {self.name: " -> ".join(g.name for g in self.operator_groups_list)}


#: converts values of a dictionary, or a generator, to a list
_LISTED = BeforeValidator(lambda v: list(v) if isinstance(v, (ValuesView, Iterator)) else v)


def _arithmetic(given: Any) -> Math:
    return Math.model_validate({} if given is None else given)


class TargetPlatformModel:
    """A model of hardware: operator sets with their options, and fusions. Immutable once complete.

    Args:
        default_qco: options of operators without a set or whose set has no options; exactly one option.
        add_metadata: write the platform and chipfit's version to exported files.
        name: of the model.
        operator_set, fusing_patterns: the parts; or create them inside `with model:`.
        math: the chip's arithmetic, with the keys of a platform file; required for any claim of exactness.
        is_simd_padding: weights are padded in memory to whole instructions; see `set_simd_padding`.

    Raises:
        ModelingError: more than one default option, or two sets with one name.
    """

    @arguments(ModelingError)
    def __init__(
        self,
        default_qco: QuantizationConfigOptions,
        add_metadata: Flag = False,
        name: str = "default_tp_model",
        *,
        operator_set: Annotated[Sequence[OperatorGroup] | None, _LISTED] = None,
        fusing_patterns: Annotated[Sequence[Fusing] | None, _LISTED] = None,
        math: Annotated[Math | Mapping[str, Any] | None, PlainValidator(_arithmetic)] = None,
        is_simd_padding: Flag = False,
    ) -> None:
        if len(default_qco.quantization_config_list) != 1:
            got = len(default_qco.quantization_config_list)
            raise ModelingError("Default QuantizationConfigOptions must contain only one option", got=got)
        self._frozen = False
        self.default_qco, self.add_metadata, self.name = default_qco, add_metadata, name
        self.math, self.is_simd_padding = _arithmetic(math), is_simd_padding
        self.operator_set: tuple[OperatorGroup, ...] = tuple(operator_set or ())
        self.fusing_patterns: tuple[Fusing, ...] = tuple(fusing_patterns or ())
        self._token: Any = None
        if operator_set is not None or fusing_patterns is not None:
            self._finish()

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise ModelingError("Immutable class. Can't edit attributes.", got=name, hint="create a new model")
        object.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._frozen:
            self._freeze()

    def __enter__(self) -> TargetPlatformModel:
        if self._frozen:
            raise ModelingError(f"Model '{self.name}' can not be reinitialized", hint="create a new one")
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        _CURRENT.reset(self._token)
        self._token = None
        if kind is None:
            self._finish()

    def _add(self, part: OperatorGroup | Fusing) -> None:
        if isinstance(part, Fusing):
            self.fusing_patterns += (part,)
        elif isinstance(part, OperatorsSet) or part not in self.operator_set:  # concatenations may be repeated
            self.operator_set += (part,)

    def set_simd_padding(self, is_simd_padding: bool) -> None:
        """Set whether weights are padded in memory to a multiple of their operator's `simd_size`."""
        self.is_simd_padding = bool(is_simd_padding)

    def _finish(self) -> None:
        self.fusing_patterns = tuple(self._with_own_sets(f) for f in self.fusing_patterns)
        inner = [m for f in self.fusing_patterns for g in f.operator_groups_list for m in (g, *g.members)]
        concatenations = {g.name: g for g in inner if g.members != (g,)}
        # a copy of a model may hold a plain set in place of a concatenation
        others = (g for g in self.operator_set if g.name not in concatenations)
        self.operator_set = (*others, *concatenations.values())
        inner += [m for g in self.operator_set for m in g.members]
        for g in inner:  # a set that only a fusing or a concatenation mentions belongs to the model too
            if g not in self.operator_set:
                self.operator_set += (g,)
        named = [o.name for o in self.operator_set]
        twice = next((n for n in named if named.count(n) > 1), None)
        if twice is not None:
            got = f"two named '{twice}'"
            raise ModelingError("Operator Sets must have unique names", where=f"model '{self.name}'", got=got)
        self._freeze()

    def _freeze(self) -> None:
        options = [self.default_qco, *(o.qc_options for o in self.operator_set if o.qc_options is not None)]
        for c in (c for o in options for c in (*o.quantization_config_list, o.base)):
            c.freeze()
        vars(self)["_frozen"] = True

    def _with_own_sets(self, fusing: Fusing) -> Fusing:
        """Return the fusion with the model's own set in place of each set of that name, whatever its options."""
        own = {o.name: o for o in self.operator_set}

        def own_group(group: OperatorGroup) -> OperatorGroup:
            known = own.get(group.name, group)
            if isinstance(group, OperatorsSet):
                return known
            clone = copy.copy(group)
            object.__setattr__(clone, "op_set_list", tuple(map(own_group, group.members)))
            object.__setattr__(clone, "qc_options", known.qc_options)
            return clone

        clone = copy.copy(fusing)
        object.__setattr__(clone, "operator_groups_list", tuple(map(own_group, fusing.operator_groups_list)))
        return clone

    # ---- queries

    def get_config_options_by_operators_set(self, operators_set_name: str) -> QuantizationConfigOptions | None:
        """Return the options of a set; the default for a set without options or an unknown name.

        A concatenation has no options (None): those of its sets apply.
        """
        found = self.get_opset_by_name(operators_set_name)
        if isinstance(found, OperatorSetConcat):
            return found.qc_options
        return self.default_qco if found is None or found.qc_options is None else found.qc_options

    def get_default_op_quantization_config(self) -> OpQuantizationConfig:
        """Return the configuration of the default options."""
        return self.default_qco.base

    def is_opset_in_model(self, opset_name: str) -> bool:
        """Return whether a set of this name exists."""
        return self.get_opset_by_name(opset_name) is not None

    def get_opset_by_name(self, opset_name: str) -> OperatorGroup | None:
        """Return the set of this name, or None."""
        return next((o for o in self.operator_set if o.name == opset_name), None)

    def to_platform(self, attached: Mapping[str, tuple[Member, ...]] | None = None) -> Platform:
        """Return the chip as a `Platform`, the record of platform files.

        Args:
            attached: operator set -> its members; all other sets are known by their names.
        """
        return build_platform(self, attached or {})

    def members(self, attached: Mapping[str, tuple[Member, ...]]) -> dict[str, tuple[Member, ...]]:
        """Return operator set -> its members. Members keep layer names only where another set has the same operator.

        Args:
            attached: see `to_platform`.

        Raises:
            ModelingError: a set has no layers attached, and its name is not a known operator.
        """
        sets = {o.name: attached.get(o.name) or members_of_set(o.name) for o in self.operator_set if o.members == (o,)}
        owners = defaultdict[str, set[str]](set)
        for name, members in sets.items():
            for op in (op for m in members if m.type is None for op in m.op):
                owners[op].add(name)

        def without_needless_name(m: Member) -> Member:
            return m if any(len(owners[op]) > 1 for op in m.op) else m.model_copy(update={"name": None})

        return {name: tuple(dict.fromkeys(map(without_needless_name, members))) for name, members in sets.items()}

    def get_info(self) -> dict[str, Any]:
        """Return a description for printing."""
        return {
            "Model name": self.name,
            "Operators sets": [o.get_info() for o in self.operator_set],
            "Fusing patterns": [f.get_info() for f in self.fusing_patterns],
        }

    def show(self) -> None:
        """Print the model."""
        from rich import print as rich_print

        rich_print(self.get_info())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TargetPlatformModel) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        sizes = f"{len(self.operator_set)} operator sets, {len(self.fusing_patterns)} fusings"
        return f"{type(self).__name__}({self.name!r}, {sizes})"


def _add_to_open_model(part: OperatorGroup | Fusing) -> None:
    """Add a part to the model whose `with` block is open, if there is one."""
    model = _CURRENT.get()
    if model is not None:
        model._add(part)
