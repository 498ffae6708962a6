"""Opaque operators: operators without a canonical name remain calls of the framework, from an allow-list."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chipfit.engine.operand_checks import LARGEST, checked
from chipfit.engine.pairs import on_pairs
from chipfit.engine.types import constant_of
from chipfit.errors import GraphError, OutOfBoundsError
from chipfit.files import package_data
from chipfit.graph.ir import Ref
from chipfit.registry import lookup

_DATA = package_data("chipfit.engine", "operators.yaml")
#: Python functions of numbers, which compute shapes
_PYTHON: dict[str, Callable[..., Any]] = {
    f"{home}.{name}": getattr(module, name)
    for home, module in (("operator", operator), ("math", math))
    for name in _DATA["python"][home].split()
}
#: those whose result can be far larger than their operands
_GROWING = tuple(f"operator.{name}" for name in "add mul pow lshift".split())
_SYMBOLIC = _DATA["python"]["torch"].split()
#: operators that a file may name -> operators that run in their place
REPLACED: dict[str, str] = _DATA["replaced"]
#: namespace of torch's operators -> allowed names
OPERATORS = {namespace: frozenset(names.split()) for namespace, names in _DATA["operators"].items()}


def torch_operator(target: str, *, in_place: bool = False) -> torch._ops.OpOverload | None:
    """Return the operator of "namespace.name.overload" if `operators.yaml` lists it; else None.

    Args:
        in_place: allow the in-place variant "name_" of a listed operator too.
    """
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    listed = OPERATORS.get(namespace, frozenset())
    if name not in listed and not (in_place and name.endswith("_") and name[:-1] in listed):
        return None
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return None
    found: torch._ops.OpOverload = getattr(packet, overload or "default")
    return found if in_place or not found._schema.is_mutable else None


def resolve_target(target: str) -> Callable[..., Any]:
    """Return the callable of an opaque node, from an allow-list.

    Allowed are torch's operators in `operators.yaml`, Python functions of numbers, and torch's functions of symbolic
    integers; no other attribute can be reached. A target "name:..." belongs to a framework, whose adapter creates the
    callable. Operators that torch does not check itself are checked before each call; see `engine.operand_checks`.

    Raises:
        GraphError: the name is not allowed, or this version of torch does not have it.
        UnknownNameError: the framework does not exist.
    """
    if target in _PYTHON:
        return _growing(target) if target in _GROWING else _PYTHON[target]
    framework, colon, _ = target.partition(":")
    if colon:
        function: Callable[..., Any] = lookup("framework", framework)().opaque(target)
        return function
    module, _, name = target.partition(".")
    if module == "torch" and name in _SYMBOLIC and hasattr(torch, name):
        symbolic: Callable[..., Any] = getattr(torch, name)
        return symbolic
    op = listed(target)
    return checked(op, on_pairs(op))


def listed(target: str, *, in_place: bool = False) -> torch._ops.OpOverload:
    """Return the operator that a file names: itself, or the one that `operators.yaml` lists in its place.

    Raises:
        GraphError: it is not listed, or this version of torch does not have it.
    """
    found = torch_operator(REPLACED.get(target.removesuffix(".default"), target), in_place=in_place)
    if found is None:
        raise _not_listed(target)
    return found


@functools.cache
def _growing(target: str) -> Callable[..., Any]:
    """Return a function of Python's that refuses sequences, and integers beyond 64 bits."""
    function = _PYTHON[target]
    least_bits = {"operator.pow": lambda a, b: a.bit_length() * b, "operator.lshift": lambda a, b: a.bit_length() + b}

    def call(a: Any, b: Any) -> Any:
        whole = type(a) is int and type(b) is int
        large = whole and target in least_bits and least_bits[target](a, b) > 2 * LARGEST.bit_length()
        out = None if large or isinstance(a, (str, list, tuple, dict)) else function(a, b)
        if out is None or (type(out) is int and abs(out) > LARGEST):
            got = f"{type(a).__name__} {a!r:.40}, {b!r:.40}"
            raise OutOfBoundsError(f"'{target}' computes sizes, which are integers of 64 bits", got=got)
        return out

    call.__name__ = call.__qualname__ = target.partition(".")[2]
    return call


def repeatable(target: str) -> bool:
    """Return whether a call is known to be deterministic, which ATen declares and other frameworks do not."""
    if ":" in target:
        return False
    found = torch_operator(target) or resolve_target(target)
    return torch.Tag.nondeterministic_seeded not in getattr(found, "tags", ())


def draws(target: str) -> bool:
    """Return whether a call of ATen draws other numbers each time."""
    return ":" not in target and not repeatable(target)


def target_name(target: Any) -> str:
    """Return the name of a callable, the inverse of `resolve_target`.

    Raises:
        GraphError: the callable is not allowed.
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


class Template:
    """The arguments of an opaque node while it is read: a call returns them as JSON data, with a Ref for each value.

    Args:
        operand: function that returns the name of the value or weight that an argument stands for, or None.
        constant: function that returns another argument as JSON data.
    """

    def __init__(self, operand: Callable[[Any], str | None], constant: Callable[[Any], Any]) -> None:
        self._operand, self._constant = operand, constant
        self.inputs: list[str] = []  #: names of the values, in the order of their first use

    def ref(self, name: str) -> Ref:
        """Return the reference to a value or weight."""
        if name not in self.inputs:
            self.inputs.append(name)
        return Ref(self.inputs.index(name))

    def __call__(self, x: Any) -> Any:
        if (name := self._operand(x)) is not None:
            return self.ref(name)
        if isinstance(x, tuple) and any(isinstance(k, slice) or k is ... for k in x):
            ends = [[k.start, k.stop, k.step] if isinstance(k, slice) else "..." if k is ... else k for k in x]
            return {"index": self(ends)}
        if isinstance(x, (tuple, list)):
            return [self(v) for v in x]
        return {k: self(v) for k, v in x.items()} if isinstance(x, Mapping) else self._constant(x)


def fill(template: Any, inputs: Sequence[Any]) -> Any:
    """Return the argument template of an opaque node with every Ref replaced by its input."""
    if isinstance(template, Ref):
        return inputs[template.index]
    if isinstance(template, (list, tuple)):
        return [fill(t, inputs) for t in template]
    if isinstance(template, dict):
        if set(template) == {"torch"}:
            return constant_of(template["torch"])
        if set(template) == {"index"}:  # x[1:, ..., 3]: [start, stop, step], "...", or the index itself
            keys = fill(template["index"], inputs)
            return tuple(slice(*k) if isinstance(k, list) else ... if k == "..." else k for k in keys)
        return {k: fill(v, inputs) for k, v in template.items()}
    return template
