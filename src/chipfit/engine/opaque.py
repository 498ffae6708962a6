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

_PYTHON = {
    f"{m.__name__.lstrip('_')}.{n}": getattr(m, n) for m in (operator, math) for n in dir(m) if not n.startswith("_")
}
_SYMBOLIC = ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_sqrt", "sym_ite", "sym_sum")


def resolve_target(target: str) -> Callable[..., Any]:
    """The callable of an opaque node, from an allow-list: ATen operators, `operator`, `math`, torch's symbolic integers.

    A target "name:..." belongs to a framework; what that registers as "opaque" under its name makes the callable.

    Raises:
        GraphError: the name is outside the list or this torch does not have it.
        UnknownNameError: there is no such framework.
    """
    if target in _PYTHON:
        return _PYTHON[target]
    framework, colon, _ = target.partition(":")
    if colon:
        return lookup("opaque", framework)(target)
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    try:
        if namespace == "torch" and rest in _SYMBOLIC:
            return getattr(torch, rest)
        if namespace in ("aten", "prims", "torchvision", "quantized_decomposed"):
            return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except AttributeError:  # another version's
        pass
    raise GraphError(f"Operator '{target}' is not known to this version of torch", allowed="aten.*, operator.*, math.*")


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
