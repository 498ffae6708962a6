"""Keras's own records of a model: the symbolic calls that it consists of, and the settings of layers and calls."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras

from chipfit.graph.builder import Origin
from chipfit.graph.config import plain


def functional(model: Any) -> Any:
    """Return the Functional model whose recorded calls `model` computes, or None if it has a `call` of its own."""
    if isinstance(model, keras.Sequential):
        return model._functional
    recorded = hasattr(model, "_inputs_struct") and not any("call" in vars(c) for c in users_classes(model))
    return model if recorded else None


def users_classes(x: Any) -> Iterator[type]:
    """Yield the user's classes that a layer is an instance of, the most derived first."""
    for c in type(x).__mro__:
        if c.__module__.partition(".")[0] == "keras":
            return
        yield c


def keras_class(operation: Any) -> str:
    """Return the Keras class that computes an operation, or "" if a user's class overrides `call`."""
    if any("call" in vars(c) or "__call__" in vars(c) for c in users_classes(operation)):
        return ""
    return next((c.__name__ for c in type(operation).__mro__ if c.__module__.partition(".")[0] == "keras"), "")


def calls_before(outputs: Sequence[Any], known: Mapping[int, Any]) -> list[Any]:
    """Return the records of the calls that lead to `outputs`, each after the calls that it depends on.

    Args:
        known: ids of symbolic tensors at which the search ends.
    """
    order: list[Any] = []
    done: set[int] = set()
    stack = [(kt, False) for kt in reversed(outputs)]
    while stack:
        kt, ready = stack.pop()
        if id(kt) in known:
            continue
        operation, index, _ = kt._keras_history
        node = operation._inbound_nodes[index]
        if id(node) in done:
            continue
        if ready:
            done.add(id(node))
            order.append(node)
        else:
            stack.append((kt, True))
            stack += [(i, False) for i in reversed(node.input_tensors)]
    return order


@contextmanager
def unrecorded(owner: Any) -> Iterator[None]:
    """Restore afterwards the records of calls in the user's layers, which every symbolic call changes."""
    layers = owner._flatten_layers() if isinstance(owner, keras.Layer) else []
    before = [(layer, list(layer._inbound_nodes), list(layer._outbound_nodes)) for layer in layers]
    try:
        yield
    finally:
        for layer, inbound, outbound in before:
            layer._inbound_nodes[:], layer._outbound_nodes[:] = inbound, outbound


def origin_of(operation: Any, args: Any, kwargs: Any, prefix: str, within: Origin | None) -> tuple[Origin, str]:
    """Return the layer that a call belongs to, and the name of its nodes.

    Args:
        prefix: path of the surrounding layers.
        within: the layer that operations outside any inner layer belong to; None if each stands for itself.
    """
    kind, path = type(operation).__name__, f"{prefix}{operation.name}"
    if isinstance(operation, keras.Layer):
        return Origin(path, kind, _unmarked(plain(_config(operation)))), path
    function = _function_name(kind)
    if within is not None:
        return Origin(within.path, within.kind or function, within.config), f"{prefix}{function}"
    return Origin(path, function, _unmarked(plain(_settings(operation, args, kwargs)))), path


def _config(layer: Any) -> dict[str, Any]:
    try:
        return layer.get_config()
    except Exception:  # custom layers without a configuration may raise anything
        return {}


def _settings(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return constant arguments and constructor settings of a keras.ops operation."""
    try:
        call = inspect.signature(operation.call).bind(*args, **kwargs).arguments
    except TypeError:
        call = dict(kwargs)
    own = {k: v for k, v in vars(operation).items() if not k.startswith("_") and k != "name"}
    constant = (type(None), bool, int, float, str, tuple, list)
    return {k: v for k, v in {**own, **call}.items() if isinstance(v, constant)}


def _unmarked(x: Any) -> Any:
    """Remove the "$" by which Keras marks some keys; saved results reserve it."""
    if isinstance(x, dict):
        return {k.lstrip("$"): _unmarked(v) for k, v in x.items()}
    return tuple(_unmarked(v) for v in x) if isinstance(x, tuple) else x


@cache
def _function_name(kind: str) -> str:
    """Return the function of keras.ops that Keras records as a class: "Argmax" is `argmax`, "GetItem" `get_item`."""
    return next((f for f in dir(keras.ops) if f.replace("_", "") == kind.lower()), kind.lower())
