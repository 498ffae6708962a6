"""Keras's own records: which symbolic calls a model consists of, and what a layer or a call was set to."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras

from chipfit.graph.builder import Origin
from chipfit.graph.config import plain


def functional(model: Any) -> Any:
    """The Functional model whose recorded calls are what `model` computes; None for one with its own `call`."""
    if isinstance(model, keras.Sequential):
        return model._functional
    recorded = hasattr(model, "_inputs_struct") and not any("call" in vars(c) for c in users_classes(model))
    return model if recorded else None


def users_classes(x: Any) -> Iterator[type]:
    """The user's part of the class of a layer, from the most special on."""
    for c in type(x).__mro__:
        if c.__module__.partition(".")[0] == "keras":
            return
        yield c


def keras_class(operation: Any) -> str:
    """The class of Keras that an operation computes as; "" for one that the user has written or changed."""
    if any("call" in vars(c) or "__call__" in vars(c) for c in users_classes(operation)):
        return ""
    return next((c.__name__ for c in type(operation).__mro__ if c.__module__.partition(".")[0] == "keras"), "")


def calls_before(outputs: Sequence[Any], known: Mapping[int, Any]) -> list[Any]:
    """The records of the calls that lead to `outputs`, each after those that it depends on.

    Args:
        known: ids of symbolic tensors behind which nothing is looked for.
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
    """Keras records every symbolic call in the layers called; afterwards the user's layers are as they were."""
    layers = owner._flatten_layers() if isinstance(owner, keras.Layer) else []
    before = [(layer, list(layer._inbound_nodes), list(layer._outbound_nodes)) for layer in layers]
    try:
        yield
    finally:
        for layer, inbound, outbound in before:
            layer._inbound_nodes[:], layer._outbound_nodes[:] = inbound, outbound


def origin_of(operation: Any, args: Any, kwargs: Any, prefix: str, within: Origin | None) -> tuple[Origin, str]:
    """The layer that a call belongs to, and the name of its nodes.

    Args:
        prefix: path of the layers around, to put before its name.
        within: the layer that operations outside any inner layer belong to; None where each is its own.
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
    except Exception:  # custom layers without one raise what they like
        return {}


def _settings(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Constant arguments and constructor settings of a keras.ops operation."""
    try:
        call = inspect.signature(operation.call).bind(*args, **kwargs).arguments
    except TypeError:
        call = dict(kwargs)
    own = {k: v for k, v in vars(operation).items() if not k.startswith("_") and k != "name"}
    constant = (type(None), bool, int, float, str, tuple, list)
    return {k: v for k, v in {**own, **call}.items() if isinstance(v, constant)}


def _unmarked(x: Any) -> Any:
    """Without the "$" by which Keras marks some keys, which saved results keep for themselves."""
    if isinstance(x, dict):
        return {k.lstrip("$"): _unmarked(v) for k, v in x.items()}
    return tuple(_unmarked(v) for v in x) if isinstance(x, tuple) else x


@cache
def _function_name(kind: str) -> str:
    """The function of keras.ops that Keras records as this class: "Argmax" is `argmax`, "GetItem" `get_item`."""
    return next((f for f in dir(keras.ops) if f.replace("_", "") == kind.lower()), kind.lower())
