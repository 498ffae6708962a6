"""Opaque operators: what has no canonical name stays a call of the framework's own, chosen from an allow-list."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chipfit.errors import GraphError
from chipfit.graph.ir import Ref
from chipfit.registry import lookup

_PYTHON: dict[str, Callable[..., Any]] = {
    f"{m.__name__.lstrip('_')}.{n}": getattr(m, n) for m in (operator, math) for n in dir(m) if not n.startswith("_")
}
_SYMBOLIC = ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_sqrt", "sym_ite", "sym_sum")


def resolve_target(target: str) -> Callable[..., Any]:
    """The callable of an opaque node, from an allow-list.

    Listed are ATen operators, the functions of `operator` and `math`, and torch's functions of symbolic integers. A
    target "name:..." belongs to a framework: what is registered as "opaque" under that name makes the callable.

    Raises:
        GraphError: the name is outside the list or this torch does not have it.
        UnknownNameError: there is no such framework.
    """
    if target in _PYTHON:
        return _PYTHON[target]
    framework, colon, _ = target.partition(":")
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    found: Callable[..., Any] | None = None
    if colon:
        found = lookup("opaque", framework)(target)
    elif namespace == "torch" and rest in _SYMBOLIC:
        found = getattr(torch, rest, None)
    elif namespace in ("aten", "prims", "torchvision", "quantized_decomposed"):
        found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload or "default", None)
    if found is None:
        raise GraphError(
            f"Operator '{target}' is not known to this version of torch", allowed="aten.*, operator.*, math.*"
        )
    return found


def repeatable(target: str) -> bool:
    """Whether a call gives the same for the same operands: known of ATen, not of what belongs to a framework."""
    return ":" not in target and torch.Tag.nondeterministic_seeded not in getattr(resolve_target(target), "tags", ())


def target_name(target: Any) -> str:
    """The inverse of `resolve_target`.

    Raises:
        GraphError: the callable is not in the list.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    for name, f in _PYTHON.items():
        if f is target:
            return name
    if getattr(target, "__name__", "") in _SYMBOLIC:
        return f"torch.{target.__name__}"
    raise GraphError(f"'{target}' is not an operator that a graph can hold", allowed="aten.*, operator.*, math.*")


def fill(template: Any, inputs: Sequence[Any]) -> Any:
    """The argument template of an opaque node with every Ref replaced by the input that it stands for."""
    if isinstance(template, Ref):
        return inputs[template.index]
    if isinstance(template, (list, tuple)):
        return [fill(t, inputs) for t in template]
    if isinstance(template, dict):
        if set(template) == {"torch"}:
            return _constant(template["torch"])
        return {k: fill(v, inputs) for k, v in template.items()}
    return template


def _constant(text: str) -> Any:
    """dtype, device, layout or memory format from its name."""
    kind, _, name = text.partition(":")
    return torch.device(name) if kind == "device" else getattr(torch, text)
