"""Opaque operators: what has no canonical name stays a call of the framework's own, chosen from an allow-list."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chipfit.engine.types import constant_of
from chipfit.errors import GraphError
from chipfit.files import package_data
from chipfit.graph.ir import Ref
from chipfit.registry import lookup

_DATA = package_data("chipfit.engine", "operators.yaml")
#: functions of Python's numbers, which compute shapes
_PYTHON: dict[str, Callable[..., Any]] = {
    f"{home}.{name}": getattr(module, name)
    for home, module in (("operator", operator), ("math", math))
    for name in _DATA["python"][home].split()
}
_SYMBOLIC = _DATA["python"]["torch"].split()
#: namespace of torch's operators -> the names that may be called
_LISTED = {namespace: frozenset(names.split()) for namespace, names in _DATA["operators"].items()}


def torch_operator(target: str, *, in_place: bool = False) -> torch._ops.OpOverload | None:
    """The operator of "namespace.name.overload" where `operators.yaml` lists it; None where not.

    Args:
        in_place: also the form of a listed operator that writes to its operand, "name_".
    """
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    listed = _LISTED.get(namespace, frozenset())
    if name not in listed and not (in_place and name.endswith("_") and name[:-1] in listed):
        return None
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return None
    found: torch._ops.OpOverload = getattr(packet, overload or "default")
    return found if in_place or not found._schema.is_mutable else None


def resolve_target(target: str) -> Callable[..., Any]:
    """The callable of an opaque node, from an allow-list.

    Listed are torch's operators of `operators.yaml`, functions of Python's numbers, and torch's functions of symbolic
    integers; no other name reaches an attribute of anything. A target "name:..." belongs to a framework: what is
    registered as "opaque" under that name makes the callable.

    Raises:
        GraphError: the name is outside the list or this torch does not have it.
        UnknownNameError: there is no such framework.
    """
    if target in _PYTHON:
        return _PYTHON[target]
    framework, colon, _ = target.partition(":")
    if colon:
        made: Callable[..., Any] = lookup("opaque", framework)(target)
        return made
    module, _, name = target.partition(".")
    found = getattr(torch, name, None) if module == "torch" and name in _SYMBOLIC else torch_operator(target)
    if found is None:
        raise _not_listed(target)
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
        if torch_operator(str(target)) is not target:
            raise _not_listed(str(target))
        return str(target)
    for name, f in _PYTHON.items():
        if f is target:
            return name
    name = getattr(target, "__name__", "")
    if name in _SYMBOLIC and getattr(torch, name) is target:
        return f"torch.{name}"
    raise _not_listed(str(target))


def _not_listed(target: str) -> GraphError:
    allowed = "what chipfit/engine/operators.yaml lists and this torch has, and functions of `operator` and `math`"
    hint = "write the layer with other operators, or quantize the model without it"
    return GraphError(f"'{target}' is not an operator that a graph can hold", allowed=allowed, hint=hint)


def fill(template: Any, inputs: Sequence[Any]) -> Any:
    """The argument template of an opaque node with every Ref replaced by the input that it stands for."""
    if isinstance(template, Ref):
        return inputs[template.index]
    if isinstance(template, (list, tuple)):
        return [fill(t, inputs) for t in template]
    if isinstance(template, dict):
        if set(template) == {"torch"}:
            return constant_of(template["torch"])
        if set(template) == {"index"}:  # of x[1:, ..., 3]: [start, stop, step], "...", or what stands there itself
            keys = fill(template["index"], inputs)
            return tuple(slice(*k) if isinstance(k, list) else ... if k == "..." else k for k in keys)
        return {k: fill(v, inputs) for k, v in template.items()}
    return template
