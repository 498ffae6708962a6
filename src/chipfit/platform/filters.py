"""Filters on the attributes of a user's layer, and members of operator sets, as data: stored, compared and printed.

    Greater("filters", 2) & (Eq("activation", "relu") | Eq("activation", None))

A missing attribute satisfies no filter, not even NotEq; None is a value like any other, but is neither greater nor
smaller than anything.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chipfit.graph.config import plain

_SIGNS = {"eq": "=", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "contains": "contains", "is": "="}
_HOLDS = {name: getattr(operator, name) for name in ("gt", "ge", "lt", "le", "contains")}


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal to a user: lists are tuples, and 2 is (2, 2)."""
    a, b = plain(a), plain(b)
    for one, many in ((a, b), (b, a)):
        if isinstance(many, tuple) and many and isinstance(one, (int, float)) and not isinstance(one, bool):
            return all(isinstance(m, (int, float)) and m == one for m in many)
    return a is b if isinstance(a, bool) or isinstance(b, bool) else bool(a == b)


def has_nan(value: Any) -> bool:
    """Return whether a value is nan, or a list or table that contains nan."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return any(map(has_nan, parts))
    return isinstance(value, float) and value != value


class AttributeFilter(BaseModel):
    """A condition on one attribute, or several joined by `&` and `|`, nested at will."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    attr: str | None = None
    test: Literal["eq", "ne", "gt", "ge", "lt", "le", "contains", "is"] = Field(
        "eq", description="is: equal, where a missing attribute is None"
    )
    value: Any = None
    any_: tuple[AttributeFilter, ...] | None = Field(None, alias="any")
    all_: tuple[AttributeFilter, ...] | None = Field(None, alias="all")

    @model_validator(mode="before")
    @classmethod
    def _as_data(cls, given: Any) -> Any:
        return {**given, "value": plain(given["value"])} if isinstance(given, dict) and "value" in given else given

    @model_validator(mode="after")
    def _one_kind(self) -> AttributeFilter:
        if sum(x is not None for x in (self.attr, self.any_, self.all_)) != 1:
            raise ValueError("a filter must have exactly one of attr, any, all")
        if has_nan(self.value):
            raise ValueError("a filter cannot compare with nan, which is equal to nothing and has no order")
        return self

    def match(self, config: Mapping[str, Any]) -> bool:
        """Return whether a layer's configuration satisfies the filter."""
        if self.any_ is not None:
            return any(f.match(config) for f in self.any_)
        if self.all_ is not None:
            return all(f.match(config) for f in self.all_)
        assert self.attr is not None  # the validator demands one of the three
        if self.test == "is":
            return equal(config.get(self.attr), self.value)
        if self.attr not in config:
            return False
        have, want = plain(config[self.attr]), plain(self.value)
        if self.test in ("eq", "ne"):
            return equal(have, want) == (self.test == "eq")
        try:
            return bool(_HOLDS[self.test](have, want))
        except TypeError:  # None, or things without order
            return False

    def __and__(self, other: AttributeFilter) -> AttributeFilter:
        return _join("all", self, other)

    def __or__(self, other: AttributeFilter) -> AttributeFilter:
        return _join("any", self, other)

    def __repr__(self) -> str:
        if self.any_ is not None:
            return " | ".join(map(repr, self.any_))
        if self.all_ is not None:
            return " & ".join(f"({f!r})" if f.any_ else repr(f) for f in self.all_)
        return f"{self.attr} {_SIGNS[self.test]} {self.value}"

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(repr(self))


def _join(kind: str, a: AttributeFilter, b: Any) -> AttributeFilter:
    if not isinstance(b, AttributeFilter):
        return NotImplemented
    parts = [*(getattr(a, f"{kind}_") or (a,)), *(getattr(b, f"{kind}_") or (b,))]
    return AttributeFilter.model_validate({kind: parts})


class Member(BaseModel):
    """A member of an operator set: layers by canonical operator and, if need be, by the user's class and attributes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: tuple[str, ...] = Field((), description="canonical operators; none: any")
    type: str | None = Field(None, description="class of the user's layer, or name of the function")
    name: str | None = Field(
        None, description="as type, where other layers with these operators belong too unless another set names them"
    )
    where: AttributeFilter | None = Field(None, description="condition on attributes that the user's framework knows")

    def match(self, op: str, layer_type: str, config: Mapping[str, Any]) -> bool:
        """Return whether a node with this canonical operator, layer class and configuration belongs to the set."""
        return (
            (not self.op or op in self.op)
            and (self.type is None or self.type == layer_type)
            and (self.where is None or self.where.match(config))
        )

    def nearness(self, layer_type: str) -> int:
        """Return how closely it names a layer: 0 by the layer's name, 1 by its operator, 2 by another layer's name."""
        return 0 if layer_type in (self.type, self.name) else 1 if self.name is None else 2

    @property
    def bare(self) -> bool:
        """True if canonical operators alone define it."""
        return self.type is None and self.name is None and self.where is None
