"""Conditions on the attributes of an operator: the `where` of a rule.

    where: {stride: {min: 1, max: 3}, groups: 1, mode: [nearest], padding: [same, valid]}

A plain value must be equal, a list holds the allowed values, a table tests with `eq`, `in`, `min`, `max`, `multiple`.
An attribute with one entry per axis satisfies a test if every entry does. A word that names another attribute stands
for its value: `groups: [1, in_channels]`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from chipfit.operators.table import OPS

#: test -> (whether it holds, its words in messages)
TESTS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "eq": (lambda v, bound: v == bound, ""),
    "in": (lambda v, bound: v in bound, ""),
    "min": (lambda v, bound: v >= bound, "at least "),
    "max": (lambda v, bound: v <= bound, "at most "),
    "multiple": (lambda v, bound: v % bound == 0, "a multiple of "),
}


def _spatial(a: Mapping[str, Any], which: str) -> tuple[int, ...] | None:
    shape = a.get(which)
    return tuple(shape[2:]) if shape is not None and len(shape) > 2 and None not in shape[2:] else None


def _kernel(a: Mapping[str, Any]) -> tuple[int, ...] | None:
    return a["kernel"] if "kernel" in a else _spatial(a, "in_shape")  # a global pool covers its whole input


def _dilated(a: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the extent of the dilated kernel along each axis."""
    kernel = a["kernel"]
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel, a.get("dilation", (1,) * len(kernel)), strict=True))


def _padding(a: Mapping[str, Any]) -> str | None:
    """Return "valid" for none, "same" if the output has ceil(input / stride) entries per axis, else "explicit"."""
    if not any(p for pair in a["padding"] for p in pair):
        return "valid"
    before, after = _spatial(a, "in_shape"), _spatial(a, "out_shape")
    if before is None or after is None:
        return None
    return "same" if all(o == -(-i // s) for i, o, s in zip(before, after, a["stride"], strict=True)) else "explicit"


def _reduced(a: Mapping[str, Any]) -> int | None:
    shape = a.get("in_shape")
    sizes = _spatial(a, "in_shape") if "axes" not in a or shape is None else tuple(shape[i] for i in a["axes"])
    return None if sizes is None or None in sizes else math.prod(sizes)


def _depth_reduced(a: Mapping[str, Any]) -> int:
    """Return the least side of an image whose channels are reduced, channels included; 1 for anything else."""
    shape = a["in_shape"]
    return min(shape[1:]) if len(shape) == 4 and 1 in {i % 4 for i in a["axes"]} else 1


def _upscale(a: Mapping[str, Any]) -> float | None:
    """Return the factor by which all sides of an image grow; 0 if they differ, or if it shrinks."""
    before, after, corner = _spatial(a, "in_shape"), _spatial(a, "out_shape"), int(a["align_corners"])
    if before is None or after is None:
        return None
    if before == after or {*before} == {1}:
        return 1
    factors = {(o - corner) / max(1, i - corner) for i, o in zip(before, after, strict=True)}
    return factors.pop() if len(factors) == 1 and min(factors) >= 1 else 0


#: attribute of platform files -> how it follows from a node's own attributes, `in_shape` and `out_shape`
DERIVED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "slope": lambda a: a["negative_slope"],
    "batch": lambda a: a["in_shape"][0],
    "rank": lambda a: len(a["in_shape"]),
    "depth": lambda a: a["in_shape"][1],
    "kernel": _kernel,
    "filter_width": lambda a: a["kernel"][-1],
    "out_size": lambda a: _spatial(a, "out_shape"),
    "dilated_h": lambda a: _dilated(a)[0],
    "dilated_hw": lambda a: math.prod(_dilated(a)),
    "reduced": _reduced,
    "depth_reduced": _depth_reduced,
    "upscale": _upscale,
    "padding": _padding,
    "group_width": lambda a: max(a["in_shape"][1], a["out_shape"][1]) / a["groups"],
    "axis": lambda a: "depth" if a["axis"] % len(a["in_shape"]) == 1 else "other",
    "dims_above_1": lambda a: sum(n != 1 for n in a["in_shape"][1:]),
}
#: attributes that matching adds from the graph, and one that only a fused kernel has
_GIVEN = (
    "in_shape out_shape channels in_channels static_shape const_weights weights weight_elements masked own_states "
    "fused_activation"
)
#: every attribute that a `where` may name
ATTRIBUTES = frozenset({a for op in OPS.values() for a in op.attrs} | set(DERIVED) | set(_GIVEN.split()))


def value(key: str, attrs: Mapping[str, Any]) -> Any:
    """Return an attribute as platform files define it; None if it is not known of this node."""
    try:
        return DERIVED[key](attrs) if key in DERIVED else attrs.get(key)
    except (KeyError, TypeError, IndexError, ZeroDivisionError):  # an attribute that it follows from is not known
        return None


def evaluate(where: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Test a node against a `where`.

    Args:
        where: predicates by attribute.
        attrs: the node's attributes and facts.

    Returns:
        The reason why it fails, or "", and the attributes that are not known, whose conditions count as satisfied.
    """
    unknown: list[str] = []
    for key, want in where.items():
        got = value(key, attrs)
        violated = None if got is None else _violated(want, got, attrs)
        if violated:
            return f"{key} {violated} (got {_words(got)})", tuple(unknown)
        if violated is None:
            unknown.append(key)
    return "", tuple(unknown)


def _violated(want: Any, got: Any, attrs: Mapping[str, Any]) -> str | None:
    """Return the part of a condition that is violated; "" if it holds, None if it cannot be tested."""
    entries = got if isinstance(got, (tuple, list)) else (got,)
    if want == "equal_xy":
        return "equal in x and y" if len(set(entries)) > 1 else ""
    tests = want if isinstance(want, dict) else {"in": want} if isinstance(want, (list, tuple)) else {"eq": want}
    for test, raw in tests.items():
        bound = [attrs.get(b, b) if isinstance(b, str) else b for b in raw] if test == "in" else raw
        bound = attrs.get(bound, bound) if isinstance(bound, str) else bound
        holds, words = TESTS[test]
        try:
            if not all(holds(v, bound) for v in entries):
                return words + (_words(bound, " or " if test == "in" else " x ") or "nothing")
        except TypeError:  # a symbolic size against a number
            return None
    return ""


def _words(v: Any, between: str = " x ") -> str:
    if isinstance(v, (tuple, list)):
        return between.join(map(str, v))
    return str(v).lower() if isinstance(v, bool) else str(v)
