"""Translate a model to a Graph call by call: by a reader, else by opening the call, else as an opaque node."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
from typing import Any

import keras
import numpy as np
import torch
from keras.src.ops.node import Node
from keras.src.ops.numpy import BroadcastTo

import chipfit.frameworks.keras.recurrent  # noqa: F401 -- registers readers
from chipfit.engine.opaque import Template
from chipfit.errors import short_message
from chipfit.frameworks.keras.call import KerasCall, KerasGraphBuilder
from chipfit.frameworks.keras.formulas import FORMULAS
from chipfit.frameworks.keras.loading import target_of
from chipfit.frameworks.keras.read import ACTIVATED, READERS, UNTRACEABLE
from chipfit.frameworks.keras.tensorflow import functions_on_symbols
from chipfit.frameworks.reading import Unreadable
from chipfit.graph.builder import Origin
from chipfit.graph.config import plain
from chipfit.graph.ir import OPAQUE, Value

#: test of a layer of a user's class, which then is one node that calls it
_WHOLE: ContextVar[Callable[[Any], bool]] = ContextVar("whole", default=lambda _: False)


@contextmanager
def whole_layers(test: Callable[[Any], bool]) -> Iterator[None]:
    """Read the layers of users' classes that pass a test whole, instead of opening them into operators."""
    token = _WHOLE.set(test)
    try:
        yield
    finally:
        _WHOLE.reset(token)


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


def _unknown(shape: Any = (), *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Return a symbolic tensor of unknown origin; a result that depends on it cannot be traced."""
    return keras.KerasTensor(tuple(shape) if isinstance(shape, (list, tuple)) else (shape,), dtype or "float32")


class _SymbolicBackend:
    """The functions of a Keras backend, on symbolic tensors: those of keras.ops; random numbers are unknown."""

    def __init__(self, part: str = "") -> None:
        self.part, self.name, self._backend = part, keras.backend.backend(), keras.backend.backend()

    def __getattr__(self, name: str) -> Any:
        if name in ("numpy", "nn", "image", "core", "math", "linalg", "random"):
            return _SymbolicBackend(name)
        if self.part == "random":
            return _unknown
        function = getattr(getattr(keras.ops, self.part, None), name, None) or getattr(keras.ops, name)
        if name == "digitize":  # its bins are a list
            return lambda x, bins: function(x, np.asarray(bins, "float32"))
        if name not in ("zeros", "ones"):
            return function
        return lambda shape, *args, **kwargs: (_unknown if None in shape else function)(shape, *args, **kwargs)


@contextmanager
def on_symbols(owner: Any) -> Iterator[None]:
    """Let preprocessing layers, which compute with a backend of their own, be traced."""
    layers = owner._flatten_layers() if isinstance(owner, keras.Layer) else []
    own = [(vars(layer), layer.backend) for layer in layers if hasattr(vars(layer).get("backend"), "set_backend")]
    try:
        for settings, _ in own:
            settings["backend"] = _SymbolicBackend()
        yield
    finally:
        for settings, backend in own:
            settings["backend"] = backend


@contextmanager
def repeated_constants(given: Sequence[Any]) -> Iterator[None]:
    """Let constants be repeated for each sample of a traced layer's first input, whose number is not known.

    `broadcast_to`, `tile` and `repeat` of keras.ops compute with constants at once, and need numbers for that.
    """
    own = {name: getattr(keras.ops, name) for name in ("broadcast_to", "tile", "repeat")}
    like = next((x for x in given if isinstance(x, keras.KerasTensor) and x.shape and x.shape[0] is None), None)

    def for_each_sample(x: Any, shape: Sequence[Any]) -> Any:
        out = keras.KerasTensor((None, *shape[1:]), dtype=keras.backend.standardize_dtype(x.dtype))
        Node(BroadcastTo(out.shape), call_args=(x,), call_kwargs={"batch_of": like}, outputs=[out])
        return out

    def is_constant(x: Any) -> bool:
        return like is not None and not isinstance(x, keras.KerasTensor) and hasattr(x, "shape")

    def broadcast_to(x: Any, shape: Any) -> Any:
        shape = tuple(shape)
        per_sample = is_constant(x) and shape and shape[0] is None and None not in shape[1:]
        return for_each_sample(x, shape) if per_sample else own["broadcast_to"](x, shape)

    def tile(x: Any, repeats: Any) -> Any:
        times = tuple(repeats) if isinstance(repeats, (list, tuple)) else (repeats,)
        per_sample = is_constant(x) and len(times) == len(x.shape) and x.shape[:1] == (1,) and times[0] is None
        if not per_sample or None in times[1:]:
            return own["tile"](x, repeats)
        rest = own["tile"](x, (1, *times[1:])) if any(t != 1 for t in times[1:]) else x
        return for_each_sample(rest, rest.shape)

    def repeat(x: Any, repeats: Any, axis: int | None = None) -> Any:
        per_sample = is_constant(x) and repeats is None and axis == 0 and x.shape[:1] == (1,)
        return for_each_sample(x, x.shape) if per_sample else own["repeat"](x, repeats, axis)

    vars(keras.ops).update(broadcast_to=broadcast_to, tile=tile, repeat=repeat)
    try:
        yield
    finally:
        vars(keras.ops).update(own)


@contextmanager
def symbols_first() -> Iterator[None]:
    """Let symbolic tensors compute operators whose first operand is a variable, which knows numbers only."""
    names = ("__add__", "__sub__", "__mul__", "__truediv__", "__matmul__", "__pow__")
    own = {name: getattr(keras.Variable, name) for name in names}

    def giving_way(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda a, b: NotImplemented if isinstance(b, keras.KerasTensor) else f(a, b)

    for name, f in own.items():
        setattr(keras.Variable, name, giving_way(f))
    try:
        yield
    finally:
        for name, f in own.items():
            setattr(keras.Variable, name, f)


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


leaves = keras.tree.flatten


class Translator:
    """Appends the calls of a model to a Graph."""

    def __init__(self, refined: bool = False) -> None:
        self.builder = KerasGraphBuilder()
        self.refined = refined  #: whether all shapes are computed again, because the inputs have others than recorded
        self.notes: list[str] = []
        self.last_failure = ""  #: why the last trace failed
        #: value -> the mask that Keras keeps with it, and how to add the calls that compute it
        self.masks: dict[str, tuple[Any, Callable[[Sequence[Any]], list[Any]]]] = {}

    def add_calls(
        self, outputs: Sequence[Any], env: dict[int, Value], prefix: str, within: Origin | None = None
    ) -> list[Any]:
        """Add every call that `outputs` depend on, up to the symbolic tensors in `env`.

        Args:
            prefix: path of the surrounding layers, for the names of inner layers.
            within: the layer that operations outside any inner layer belong to; None in a Functional model, where each
                operation stands for itself.
        """

        def current(x: Any) -> Any:
            return env[id(x)] if isinstance(x, keras.KerasTensor) else x

        add = partial(self.add_calls, env=env, prefix=prefix, within=within)
        for node in calls_before(outputs, env):
            masks = {id(kt): keras.src.backend.get_keras_mask(kt) for kt in node.input_tensors}
            self.masks |= {env[i].name: (m, add) for i, m in masks.items() if m is not None}
            args = keras.tree.map_structure(current, node.arguments.args)
            given = keras.tree.map_structure(current, node.arguments.kwargs)
            results = self.call(node.operation, args, given, node.outputs, prefix, within)
            for kt, value in zip(node.outputs, results, strict=True):
                env[id(kt)] = value
                self.builder.references.append(kt)
        return [current(o) for o in outputs]

    def call(
        self, operation: Any, args: Any, kwargs: Any, outputs: Sequence[Any], prefix: str, within: Origin | None
    ) -> list[Value]:
        """Add one call; return a value for each symbolic output."""
        origin, name = origin_of(operation, args, kwargs, prefix, within)
        layer = isinstance(operation, keras.Layer)
        if layer:
            default = getattr(inspect.signature(operation.call).parameters.get("training"), "default", None)
            if kwargs.get("training") is True and default is not True:  # which Keras records, as of layers of images
                how = "is called with training=True; it was read with training=False, as `model.predict` calls it"
                self.notes.append(f"warning: layer '{name}' {how}")
            kwargs = {k: v for k, v in kwargs.items() if k != "training"}
        if self.refined or any(None in kt.shape[1:] for kt in outputs):
            outputs = _refined(operation, args, kwargs) or outputs
        given = {k: v for k, v in kwargs.items() if v is not None}
        if layer and any(True for _ in users_classes(operation)) and _WHOLE.get()(operation):
            return self._opaque(operation, args, given, outputs, origin, name)
        return (
            self._read(KerasCall(self.builder, operation, outputs, origin, name), args, given)
            or self._nested(operation, args, given, origin)
            or self._by_formula(operation, args, given, outputs, origin)
            or (self._opened(operation, operation.call, args, kwargs, outputs, origin) if layer else None)
            or self._opaque(operation, args, kwargs, outputs, origin, name)
        )

    def _read(self, call: KerasCall, args: Any, kwargs: Any) -> list[Value] | None:
        """Add a call by the reader of its class; return None if there is none that can."""
        group = "layer" if isinstance(call.op, keras.Layer) else "operation"
        reader = READERS.get((group, keras_class(call.op)))
        if reader is None or not _accepts(reader, args, kwargs):
            return None
        mark = self.builder.mark()
        try:
            result = reader(call, *args, **kwargs)
        except Unreadable:
            self.builder.forget(mark)
            return None
        if not isinstance(result, Value):
            return list(result)
        return [self._activated(call, result) if reader in ACTIVATED else result]

    def _activated(self, call: KerasCall, x: Value) -> Value:
        """Add the layer's own activation behind it."""
        f = getattr(call.op, "activation", None)
        if f is None or f is keras.activations.linear:
            return x
        name = call.origin.config.get("activation")
        config = {"activation": name if isinstance(name, str) else plain(f)}
        origin = replace(call.origin, kind="Activation", config=config)
        if f in UNTRACEABLE:
            op = UNTRACEABLE[f]
            return self.builder.emit(origin, f"{call.name}/{op.lower()}", op, [x.name], {}, [(x.shape, x.dtype)])[0]
        opened = self.open(f, f, (x,), {}, origin)
        if isinstance(opened, Value):
            return opened
        outputs = [keras.KerasTensor(x.shape, dtype=x.dtype)]
        return self._opaque(f, (x,), {}, outputs, origin, f"{call.name}/activation")[0]

    def _nested(self, operation: Any, args: Any, given: Any, origin: Origin) -> list[Value] | None:
        """Add the recorded calls of an inner Functional or Sequential model; return None for other operations."""
        inner = functional(operation) if isinstance(operation, keras.Model) else None
        if inner is None or given or len(args) != 1 or len(leaves(args)) != len(leaves(inner._inputs_struct)):
            return None
        env = {id(kt): t for kt, t in zip(leaves(inner._inputs_struct), leaves(args), strict=True)}
        self.builder.graph.outer_layers[origin.path] = (origin.kind, {})
        return self.add_calls(leaves(inner._outputs_struct), env, f"{origin.path}/")

    def _by_formula(
        self, operation: Any, args: Any, given: Any, outputs: Sequence[Any], origin: Origin
    ) -> list[Value] | None:
        """Add the operations of a formula; return None for operations without one."""
        formula = FORMULAS.get(keras_class(operation))
        if formula is None:
            return None
        return self._opened(operation, partial(formula, operation), args, given, outputs, origin)

    def _opened(
        self, owner: Any, function: Any, args: Any, kwargs: Any, outputs: Sequence[Any], origin: Origin
    ) -> list[Value] | None:
        """Add the operations of a function, such as a layer's `call`; one that becomes one node gives it its name."""
        before = len(self.builder.graph.nodes)
        opened = self.open(owner, function, args, kwargs, origin)
        flat = [] if opened is None else leaves(opened)
        if len(flat) != len(outputs) or not all(isinstance(t, Value) for t in flat):
            return None
        self.refined |= any(_contradict(t.shape, kt.shape) for t, kt in zip(flat, outputs, strict=True))
        self.builder.graph.outer_layers[origin.path] = (origin.kind, origin.config)
        alone = len(self.builder.graph.nodes) == before + 1 and len(flat) == 1
        return [self._renamed(flat[0], origin.path)] if alone else flat

    def open(self, owner: Any, function: Callable[..., Any], args: Any, kwargs: Any, origin: Origin) -> Any:
        """Trace a function on symbolic tensors, and add its operations; return None if it cannot be traced.

        Args:
            owner: the layer of the function, whose records of calls are restored.

        Raises:
            CaptureError: An operation inside it cannot be captured.
        """
        env: dict[int, Value] = {}
        symbols: dict[str, Any] = {}

        def symbol(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            if x.name not in symbols:
                symbols[x.name] = _symbol(x)
                env[id(symbols[x.name])] = x
                if x.name in self.masks:
                    mask, add = self.masks[x.name]
                    keras.src.backend.set_keras_mask(symbols[x.name], symbol(*add([mask])))
            return symbols[x.name]

        with unrecorded(owner):
            try:
                given = keras.tree.map_structure(symbol, kwargs)
                if "training" in inspect.signature(function).parameters:
                    given["training"] = False
                tensors = keras.tree.map_structure(symbol, args)
                repeated = repeated_constants(leaves(tensors))
                with keras.StatelessScope(), on_symbols(owner), repeated, symbols_first(), functions_on_symbols():
                    out = function(*tensors, **_with_masks(function, tensors, given))
                if not all(isinstance(x, keras.KerasTensor) for x in leaves(out)):
                    return None
                calls_before(leaves(out), env)
            except Exception as e:  # foreign code may raise anything
                self.last_failure = short_message(e)
                return None
            self.builder.references.append((symbols, out))
            prefix = f"{origin.path}/" if origin.path else ""
            return keras.tree.pack_sequence_as(out, self.add_calls(leaves(out), env, prefix, within=origin))

    def _opaque(
        self, operation: Any, args: Any, kwargs: Any, outputs: Sequence[Any], origin: Origin, name: str
    ) -> list[Value]:
        """Add an opaque node that calls the operation itself; its variables are among the inputs."""

        def operand(x: Any) -> str | None:
            return x.name if isinstance(x, Value) else self.builder.weight(x, origin) if _is_array(x) else None

        def constant(x: Any) -> Any:
            return x if x is None or isinstance(x, (bool, int, float, str)) else str(x)

        template = Template(operand, constant)
        layer = isinstance(operation, keras.Layer)
        variables = [*operation.trainable_variables, *operation.non_trainable_variables] if layer else []
        given = [template(args), template(kwargs)]  # before variables, so that the data are the first inputs
        attrs = {"target": target_of(operation), "args": [template(variables), *given], "kwargs": {}}
        return self.builder.emit(origin, name, OPAQUE, template.inputs, attrs, [(kt.shape, kt.dtype) for kt in outputs])

    def _renamed(self, value: Value, name: str) -> Value:
        """Rename the last node, which is a whole layer, to the name of the layer; return its result."""
        graph, node = self.builder.graph, self.builder.graph.nodes[-1]
        if node.output != value.name or node.name == name:
            return value
        self.builder.forget((len(graph.nodes) - 1, len(graph.weights)))
        origin = Origin(node.layer, node.layer_type, node.config)
        (new,) = self.builder.emit(origin, name, node.op, node.inputs, node.attrs, [(value.shape, value.dtype)])
        return new


def _contradict(a: Sequence[int | None], b: Sequence[int | None]) -> bool:
    return len(a) != len(b) or any(None not in pair and pair[0] != pair[1] for pair in zip(a, b, strict=True))


def _symbol(x: Any) -> Any:
    return keras.KerasTensor(x.shape, dtype=x.dtype) if isinstance(x, Value) else x


def _refined(operation: Any, args: Any, kwargs: Any) -> Sequence[Any] | None:
    """Compute output shapes again, with input shapes that were unknown when Keras recorded the call."""
    symbols, named = (keras.tree.map_structure(_symbol, given) for given in (args, kwargs))
    try:
        return leaves(operation.compute_output_spec(*symbols, **named))
    except Exception:  # foreign code may raise anything; the recorded shapes are used
        return None


def _with_masks(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a `call` by name, with the masks of tensors that Keras gives to a running layer."""
    signature = inspect.signature(function)
    symbols = {k: x for k, x in signature.bind(*args, **kwargs).arguments.items() if isinstance(x, keras.KerasTensor)}
    masks = {f"{k}_mask": keras.src.backend.get_keras_mask(x) for k, x in symbols.items()}
    return {**{k: m for k, m in masks.items() if m is not None and k in signature.parameters}, **kwargs}


def _accepts(reader: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether the reader has a parameter for every argument of the call, such as a mask."""
    try:
        inspect.signature(reader).bind(None, *args, **kwargs)
    except TypeError:
        return False
    return True


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, torch.Tensor, keras.Variable)) or keras.ops.is_tensor(x)
