"""From a Keras 3 model to a Graph, by walking its symbolic calls.

An operation that no reader knows is opened: its `call` is traced on symbolic tensors and what it is made of is read in
its place. What cannot be traced (recurrent layers, foreign code) stays an opaque node that calls the layer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import keras
import numpy as np
import torch
from torch.utils import _pytree as pytree

from chipfit.engine.run import run
from chipfit.engine.trees import dump_tree
from chipfit.errors import CaptureError
from chipfit.frameworks.keras.backend import forward
from chipfit.frameworks.keras.opaque import hold
from chipfit.frameworks.keras.read import READERS, Call, Tensor, Unreadable
from chipfit.frameworks.keras.weights import to_canonical
from chipfit.graph.check import check
from chipfit.graph.config import plain
from chipfit.graph.ir import OPAQUE, Graph, Node, Ref, Value
from chipfit.passes.layout import rearrange

#: largest difference between Graph and model that is put down to the order of additions, as a share of the largest output
_TOLERANCE = 1e-3


def capture(model: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Graph:
    """Read a Keras 3 model into a Graph, in channels-first form with inputs and outputs as the model has them.

    The model is read as `model(x, training=False)` computes it and not changed. Weights are named "layer/variable".

    Args:
        model: a built keras.Model: Functional, Sequential, or a subclass whose `call` can be traced.
        args, kwargs: one batch of inputs, torch tensors, as a model of this structure takes them. Needed where the model
            does not fix the shapes of its inputs; where given, the Graph is compared with the model on it.

    Raises:
        CaptureError: naming the layer and what to change.
    """
    _demand_model(model)
    functional = _functional(model)
    struct = functional._inputs_struct if functional is not None else None
    example = _example(struct, args, kwargs or {})
    reading = Reading()
    if functional is None or any(None in kt.shape[1:] for kt in keras.tree.flatten(struct)):
        if example is None:
            raise CaptureError(
                f"The shapes of the inputs of '{model.name}' are not fixed",
                hint="give an example batch: the shapes are taken from it",
            )
        given = example
        struct = keras.tree.map_structure(lambda t: keras.KerasTensor((None, *t.shape[1:]), dtype=_dtype(t)), example)
        outputs = None
    else:
        given, outputs = example if example is not None else struct, functional._outputs_struct
    names = _input_names(struct, model)
    tensors = [reading.input(n, kt, x) for n, kt, x in zip(names, _leaves(struct), _leaves(given), strict=True)]
    if outputs is None:
        filled = keras.tree.pack_sequence_as(struct, tensors)
        results = reading.open(model, model.call, (filled,), {}, _Origin())
        if results is None:
            raise CaptureError(
                f"The model '{model.name}' cannot be traced: {reading.last_failure}",
                hint="write its call with keras layers and keras.ops, without branches on values, or as a Functional model",
            )
    else:
        env = {id(kt): t for kt, t in zip(_leaves(struct), tensors, strict=True)}
        results = keras.tree.pack_sequence_as(outputs, reading.walk(keras.tree.flatten(outputs), env, ""))
    graph = reading.finish(results, struct, names)
    if example is not None:
        graph.example = tuple(x.detach() for x in _leaves(example))
        _compare(graph, model, example)
    return graph


# ---------------------------------------------------------------- the model and its inputs


def _demand_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise CaptureError(
            "A Keras model is an instance of keras.Model",
            got=type(model).__name__,
            hint="wrap a layer: keras.Sequential([layer])",
        )
    if not model.built:
        raise CaptureError(
            f"The model '{model.name}' has no weights yet", hint="call it once on data, or load its weights, first"
        )
    model_first = next(
        (x for x in model._flatten_layers() if getattr(x, "data_format", None) == "channels_first"), None
    )
    if model_first is not None:
        raise CaptureError(
            f"Layer '{model_first.name}' works channels-first",
            allowed="data_format='channels_last'",
            hint="build the model with keras.config.set_image_data_format('channels_last') and copy the weights, which are the same",
        )
    mixed = next((x for x in model._flatten_layers() if x.compute_dtype != "float32" and x.variables), None)
    if mixed is not None:
        raise CaptureError(
            f"Layer '{mixed.name}' computes in {mixed.compute_dtype}",
            allowed="float32",
            hint="build the model with keras.config.set_dtype_policy('float32') and load its weights",
        )


def _functional(model: Any) -> Any:
    """The Functional model whose recorded calls are what `model` computes; None for a model with a `call` of its own."""
    if isinstance(model, keras.Sequential):
        return model._functional
    recorded = hasattr(model, "_inputs_struct") and not any("call" in vars(c) for c in _own_classes(model))
    return model if recorded else None


def _own_classes(x: Any) -> Iterator[type]:
    """The user's part of the class of a layer, from the most special on."""
    for c in type(x).__mro__:
        if c.__module__.partition(".")[0] == "keras":
            return
        yield c


def _leaves(x: Any) -> list[Any]:
    return keras.tree.flatten(x)


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _example(struct: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The example in the structure of the model's inputs; None without one. Labels behind the inputs are left out."""
    if not args and not kwargs:
        return None
    given = dict(kwargs) if kwargs and not args else args[0]
    if isinstance(struct, (list, tuple)) and isinstance(given, torch.Tensor):
        given = list(args[: len(struct)])
    if struct is not None and isinstance(given, Mapping) and isinstance(struct, Mapping):
        given = {k: given[k] for k in struct if k in given}
    if struct is not None:
        want, got = len(_leaves(struct)), len(_leaves(given))
        if isinstance(struct, Mapping) != isinstance(given, Mapping) or want != got:
            described = f"inputs named {sorted(struct)}" if isinstance(struct, Mapping) else f"{want} inputs"
            raise CaptureError(
                "The example does not fit the model", got=f"{type(given).__name__} of {got}", allowed=described
            )
    if any(not isinstance(x, torch.Tensor) or x.dim() == 0 for x in _leaves(given)):
        raise CaptureError(
            "The example holds something else than batches of numbers",
            got=str([type(x).__name__ for x in _leaves(given)]),
        )
    return given


def _input_names(struct: Any, model: Any) -> list[str]:
    if isinstance(struct, Mapping):
        if any(not isinstance(k, str) or len(_leaves(v)) != 1 for k, v in struct.items()):
            raise CaptureError(
                f"The inputs of '{model.name}' are a nested structure", hint="use one flat dict, or a list"
            )
        return sorted(struct)  # the order in which Keras flattens a dict
    if isinstance(struct, (list, tuple)) and any(isinstance(x, (list, tuple, Mapping)) for x in struct):
        raise CaptureError(f"The inputs of '{model.name}' are a nested structure", hint="use one flat dict, or a list")
    kts = _leaves(struct)
    recorded = [getattr(getattr(kt, "_keras_history", None), "operation", None) for kt in kts]
    return [
        op.name if op is not None else ("input" if len(kts) == 1 else f"input_{i}") for i, op in enumerate(recorded)
    ]


def _compare(graph: Graph, model: Any, example: Any) -> None:
    """A reader that misunderstands a layer is found here, not on the chip."""
    try:
        want = [y.numpy() for y in _leaves(forward(model, example))]
    except Exception as e:  # the user's code may raise anything
        raise CaptureError(
            f"The model fails on the example input: {type(e).__name__}: {str(e).strip().splitlines()[0][:300]}"
        ) from e
    with torch.inference_mode():
        env = run(graph, graph.example)
    got = [env[o].numpy() for o in graph.outputs]
    for name, a, b in zip(graph.outputs, want, got, strict=True):
        same = a.shape == b.shape and (
            not a.size or np.abs(a - b).max() <= _TOLERANCE * max(float(np.abs(a).max()), 1e-3)
        )
        if not same and np.isfinite(a).all():
            raise CaptureError(
                f"Output '{name}' of the captured graph differs from the model's",
                got=f"{np.abs(a - b).max() if a.shape == b.shape else b.shape}",
                hint="the model computes something that this reader does not see; please report it with the model",
            )


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Origin:
    """The layer that the nodes being read belong to."""

    path: str = ""
    kind: str = ""
    config: dict[str, Any] = field(default_factory=dict)


class Reading:
    """The growing Graph."""

    def __init__(self) -> None:
        self.graph = Graph([], [], [], {}, {}, data_format="channels_last", framework="keras")
        self.names: set[str] = set()
        self.known: dict[tuple[Any, ...], str] = {}  #: (variable, operator that reads it, shape) -> weight
        self.alive: list[Any] = []  #: symbolic tensors and variables whose identity is remembered
        self.last_failure = ""

    def input(self, name: str, symbol: Any, given: Any) -> Tensor:
        """A graph input; data of another type than the model declares are cast, as Keras does."""
        shape = tuple(symbol.shape)
        dtype = _dtype(given) if isinstance(given, torch.Tensor) else symbol.dtype
        dtype = symbol.dtype if dtype in ("float64", symbol.dtype) else dtype
        self.graph.inputs.append(self.value(name, shape, dtype).name)
        tensor = Tensor(name, shape, dtype)
        if dtype == symbol.dtype:
            return tensor
        return self.emit(_Origin(), f"{name}_cast", "Cast", [name], {"dtype": symbol.dtype}, shape, symbol.dtype)

    def walk(
        self, outputs: Sequence[Any], env: dict[int, Tensor], prefix: str, within: _Origin | None = None
    ) -> list[Any]:
        """Read every call that `outputs` depend on, up to the symbolic tensors in `env`.

        Args:
            prefix: path of the layers around, to put before the names of layers found.
            within: the layer that operations outside any inner layer belong to; None in a Functional model, where each
                operation is its own.
        """

        def now(x: Any) -> Any:
            return env[id(x)] if isinstance(x, keras.KerasTensor) else x

        for node in _in_order(outputs, env):
            args = keras.tree.map_structure(now, node.arguments.args)
            given = keras.tree.map_structure(now, node.arguments.kwargs)
            results = self.call(node.operation, args, given, node.outputs, prefix, within)
            for kt, t in zip(node.outputs, results, strict=True):
                env[id(kt)] = t
                self.alive.append(kt)
        return [now(o) for o in outputs]

    def call(
        self, operation: Any, args: Any, kwargs: Any, outputs: Sequence[Any], prefix: str, within: _Origin | None
    ) -> list[Tensor]:
        """Read one call; returns a Tensor for each symbolic output."""
        origin, name = self._origin(operation, args, kwargs, prefix, within)
        if isinstance(operation, keras.Layer):
            kwargs = {k: v for k, v in kwargs.items() if k != "training"}
        if any(None in kt.shape[1:] for kt in outputs):
            outputs = _refined(operation, args, kwargs) or outputs
        reader, given = _reader(operation), {k: v for k, v in kwargs.items() if v is not None}
        if reader is not None and _takes(reader, args, given):
            mark = len(self.graph.nodes), len(self.graph.weights)
            try:
                found = reader(Call(self, operation, outputs, origin, name), *args, **given)
                return [found] if isinstance(found, Tensor) else list(found)
            except Unreadable:  # opened or opaque below
                self._forget(mark)
        inner = _functional(operation) if isinstance(operation, keras.Model) else None
        if (
            inner is not None
            and not given
            and len(args) == 1
            and len(_leaves(args)) == len(_leaves(inner._inputs_struct))
        ):
            env = {id(kt): t for kt, t in zip(_leaves(inner._inputs_struct), _leaves(args), strict=True)}
            return self.walk(_leaves(inner._outputs_struct), env, f"{origin.path}/")
        if isinstance(operation, keras.Layer):
            before = len(self.graph.nodes)
            opened = self.open(operation, operation.call, args, kwargs, origin)
            flat = None if opened is None else _leaves(opened)
            if flat is not None and len(flat) == len(outputs) and all(isinstance(t, Tensor) for t in flat):
                return (
                    [self._renamed(flat[0], origin.path)]
                    if len(self.graph.nodes) == before + 1 and len(flat) == 1
                    else flat
                )
        return self.opaque(operation, args, kwargs, outputs, origin, name)

    def open(self, owner: Any, function: Callable[..., Any], args: Any, kwargs: Any, origin: _Origin) -> Any:
        """Trace a function on symbolic tensors and read what it is made of; None when it cannot be traced.

        Raises:
            CaptureError: something inside it cannot be captured.
        """
        env: dict[int, Tensor] = {}
        made: dict[str, Any] = {}

        def symbol(x: Any) -> Any:
            if isinstance(x, Tensor):
                if x.name not in made:
                    made[x.name] = keras.KerasTensor(x.shape, dtype=x.dtype)
                    env[id(made[x.name])] = x
                return made[x.name]
            return x

        with _unrecorded(owner):
            try:
                given = keras.tree.map_structure(symbol, kwargs)
                if "training" in inspect.signature(function).parameters:
                    given["training"] = False
                with keras.StatelessScope():
                    out = function(*keras.tree.map_structure(symbol, args), **given)
                if not all(isinstance(x, keras.KerasTensor) for x in _leaves(out)):
                    return None
                _in_order(_leaves(out), env)
            except Exception as e:  # foreign code may raise anything
                self.last_failure = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:300]}"
                return None
            self.alive.append((made, out))
            prefix = f"{origin.path}/" if origin.path else ""
            return keras.tree.pack_sequence_as(out, self.walk(_leaves(out), env, prefix, within=origin))

    def opaque(
        self, operation: Any, args: Any, kwargs: Any, outputs: Sequence[Any], origin: _Origin, name: str
    ) -> list[Tensor]:
        """A node that calls the operation itself, its variables among the inputs."""
        inputs: list[str] = []

        def template(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return [template(v) for v in x]
            if isinstance(x, Mapping):
                return {k: template(v) for k, v in x.items()}
            if not isinstance(x, Tensor) and not _is_array(x):
                return x if x is None or isinstance(x, (bool, int, float, str)) else str(x)
            known = x.name if isinstance(x, Tensor) else self.weight(x, origin)
            if known not in inputs:
                inputs.append(known)
            return Ref(inputs.index(known))

        layer = isinstance(operation, keras.Layer)
        variables = [*operation.trainable_variables, *operation.non_trainable_variables] if layer else []
        given = [
            template(args),
            template(kwargs),
        ]  # data before variables, so that a reader of the node sees them first
        attrs = {"target": hold(operation), "args": [template(variables), *given], "kwargs": {}}
        shapes = [(tuple(kt.shape), kt.dtype) for kt in outputs]
        return self.emit_many(origin, name, OPAQUE, inputs, attrs, shapes)

    # ---- pieces

    def _origin(
        self, operation: Any, args: Any, kwargs: Any, prefix: str, within: _Origin | None
    ) -> tuple[_Origin, str]:
        """The layer that a call belongs to, and the name of its nodes."""
        kind = type(operation).__name__
        if isinstance(operation, keras.Layer):
            path = f"{prefix}{operation.name}"
            return _Origin(path, kind, _plain(operation.get_config() if _has_config(operation) else {})), path
        function = _function_name(kind)
        if within is not None:
            return replace(within, kind=within.kind or function), f"{prefix}{function}"
        path = f"{prefix}{operation.name}"
        return _Origin(path, function, _plain(_settings(operation, args, kwargs))), path

    def value(self, name: str, shape: tuple[int | None, ...], dtype: str) -> Value:
        self.names.add(name)
        self.graph.values[name] = Value(name, shape, dtype)
        return self.graph.values[name]

    def emit(
        self,
        origin: _Origin,
        name: str,
        op: str,
        inputs: Sequence[str | None],
        attrs: dict[str, Any],
        shape: Any,
        dtype: str,
    ) -> Tensor:
        return self.emit_many(origin, name, op, inputs, attrs, [(tuple(shape), dtype)])[0]

    def emit_many(
        self,
        origin: _Origin,
        name: str,
        op: str,
        inputs: Sequence[str | None],
        attrs: dict[str, Any],
        outs: Sequence[tuple[Any, str]],
    ) -> list[Tensor]:
        """Append a node; one output has the node's name, several a number behind it."""
        name = self.unique(name)
        names = [name] if len(outs) == 1 else [self.unique(f"{name}.{i}") for i in range(len(outs))]
        tensors = [Tensor(n, shape, dtype) for n, (shape, dtype) in zip(names, outs, strict=True)]
        for t in tensors:
            self.value(t.name, t.shape, t.dtype)
        ins = list(inputs)
        while ins and ins[-1] is None:
            ins.pop()
        self.graph.nodes.append(
            Node(name, op, tuple(ins), tuple(names), attrs, origin.path, origin.kind, config=origin.config)
        )
        return tensors

    def unique(self, name: str) -> str:
        base, k = name, 1
        while name in self.names or name in self.graph.weights:
            name, k = f"{base}_{k}", k + 1
        self.names.add(name)
        return name

    def weight(
        self, variable: Any, origin: _Origin, op: str = "", name: str = "", shape: tuple[int, ...] | None = None
    ) -> str:
        """The weight that a variable or constant is in the form in which `op` reads it, seen as `shape` before."""
        key = (id(variable), op, shape)
        if key not in self.known:
            self.alive.append(variable)
            own = name or getattr(variable, "name", "constant") or "constant"
            full = self.unique("/".join(p for p in (origin.path, own) if p))
            array = keras.ops.convert_to_numpy(variable)
            tensor = torch.from_numpy(array.copy())
            self.graph.weights[full] = to_canonical(op, tensor if shape is None else tensor.reshape(shape))
            if getattr(variable, "trainable", False):
                self.graph.trainable.add(full)
            self.known[key] = full
        return self.known[key]

    def _forget(self, mark: tuple[int, int]) -> None:
        """Take back the nodes and weights of an attempt."""
        nodes, weights = mark
        gone = {o for n in self.graph.nodes[nodes:] for o in (n.name, *n.outputs)} | set(
            list(self.graph.weights)[weights:]
        )
        for name in gone:
            self.graph.values.pop(name, None)
            self.graph.weights.pop(name, None)
        self.names -= gone
        self.graph.trainable -= gone
        self.known = {k: w for k, w in self.known.items() if w not in gone}
        del self.graph.nodes[nodes:]

    def _renamed(self, tensor: Tensor, name: str) -> Tensor:
        """The result of the last node under the name of the layer of which it is all."""
        node = self.graph.nodes[-1]
        if node.output != tensor.name or node.name == name:
            return tensor
        self._forget((len(self.graph.nodes) - 1, len(self.graph.weights)))
        (new,) = self.emit_many(
            _Origin(node.layer, node.layer_type, node.config),
            name,
            node.op,
            node.inputs,
            node.attrs,
            [(tensor.shape, tensor.dtype)],
        )
        return new

    # ---- the end

    def finish(self, results: Any, struct: Any, names: Sequence[str]) -> Graph:
        """Outputs, call structure and layout."""
        graph = self.graph
        leaves = _leaves(
            results
        )  # in the order of Keras, which sorts the keys of a dict; torch takes them as they come
        for t in leaves:
            if not isinstance(t, Tensor):
                raise CaptureError("An output of the model is no tensor that it computes", got=type(t).__name__)
        graph.outputs = [t.name for t in leaves]
        order, tree = pytree.tree_flatten(keras.tree.pack_sequence_as(results, list(range(len(leaves)))))
        filled = pytree.tree_unflatten(order, tree)
        graph.out_spec = json.dumps({**dump_tree(tree, filled), "leaves": [{"output": i} for i in order]})
        by_name = isinstance(struct, Mapping)
        call: Any = ((), dict.fromkeys(names, 0)) if by_name else ((0,) * len(names), {})
        graph.in_spec = json.dumps(
            {
                **dump_tree(pytree.tree_structure(call), call),
                "args": len(call[0]),
                "kwargs": list(call[1]),
                "leaves": len(names),
                "tensors": list(range(len(names))),
                "names": [] if by_name else list(names),
                "packed": not isinstance(struct, keras.KerasTensor),
            }
        )
        _drop_dead(graph)
        check(graph, blame="capture")
        moved = rearrange(graph, "channels_first")
        _keep_names(moved.graph, moved.copies)
        check(moved.graph, blame="layout")
        return moved.graph


def _reader(operation: Any) -> Callable[..., Any] | None:
    """The reader of an operation's class; a user's class has its Keras parent's unless it computes something else."""
    if any("call" in vars(c) or "__call__" in vars(c) for c in _own_classes(operation)):
        return None
    own = next((c for c in type(operation).__mro__ if c.__module__.partition(".")[0] == "keras"), None)
    group = "layer" if isinstance(operation, keras.Layer) else "operation"
    return None if own is None else READERS.get((group, own.__name__))


def _refined(operation: Any, args: Any, kwargs: Any) -> Sequence[Any] | None:
    """The outputs again, now that more of the inputs' shapes is known than Keras knew when it recorded the call."""

    def symbol(x: Any) -> Any:
        return keras.KerasTensor(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x

    try:
        return _leaves(
            operation.compute_output_spec(
                *keras.tree.map_structure(symbol, args), **keras.tree.map_structure(symbol, kwargs)
            )
        )
    except Exception:  # foreign code may raise anything; the recorded shapes serve
        return None


def _takes(reader: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether the reader has a parameter for every argument of the call; a mask, for example, has none in most."""
    try:
        inspect.signature(reader).bind(None, *args, **kwargs)
    except TypeError:
        return False
    return True


def _in_order(outputs: Sequence[Any], env: Mapping[int, Any]) -> list[Any]:
    """Keras's records of the calls that lead to `outputs`, each after those that it depends on."""
    order: list[Any] = []
    done: set[int] = set()
    stack = [(kt, False) for kt in reversed(outputs)]
    while stack:
        kt, ready = stack.pop()
        if id(kt) in env:
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
def _unrecorded(owner: Any) -> Iterator[None]:
    """Keras records every symbolic call in the layers called; afterwards the user's layers are as they were."""
    layers = owner._flatten_layers() if isinstance(owner, keras.Layer) else []
    before = [(layer, list(layer._inbound_nodes), list(layer._outbound_nodes)) for layer in layers]
    try:
        yield
    finally:
        for layer, inbound, outbound in before:
            layer._inbound_nodes[:], layer._outbound_nodes[:] = inbound, outbound


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, torch.Tensor, keras.Variable)) or keras.ops.is_tensor(x)


def _has_config(layer: Any) -> bool:
    try:
        layer.get_config()
    except Exception:  # custom layers without one raise what they like
        return False
    return True


def _settings(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Constant arguments and constructor settings of a keras.ops operation."""
    try:
        call = inspect.signature(operation.call).bind(*args, **kwargs).arguments
    except TypeError:
        call = dict(kwargs)
    own = {k: v for k, v in vars(operation).items() if not k.startswith("_") and k != "name"}
    return {
        k: v for k, v in {**own, **call}.items() if v is None or isinstance(v, (bool, int, float, str, tuple, list))
    }


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON data; Keras marks some keys with "$", which saved results keep for themselves."""
    return {k: _unmarked(v) for k, v in plain(settings).items()}


def _unmarked(x: Any) -> Any:
    if isinstance(x, dict):
        return {k.lstrip("$"): _unmarked(v) for k, v in x.items()}
    return tuple(_unmarked(v) for v in x) if isinstance(x, tuple) else x


@cache
def _function_name(kind: str) -> str:
    """The function of keras.ops whose calls Keras records under this class name; "Argmax" is `argmax`, "GetItem" `get_item`."""
    return next((f for f in dir(keras.ops) if f.replace("_", "") == kind.lower()), kind.lower())


def _drop_dead(graph: Graph) -> None:
    live = set(graph.outputs)
    kept = []
    for n in reversed(graph.nodes):
        if live.intersection(n.outputs):
            kept.append(n)
            live.update(i for i in n.inputs if i is not None)
        else:
            for o in n.outputs:
                del graph.values[o]
    graph.nodes = kept[::-1]


def _keep_names(graph: Graph, copies: Mapping[str, tuple[str, Any]]) -> None:
    """A constant of which only the rearranged copy is read gives its name to that copy."""
    users = graph.users()
    for copy, (original, _) in copies.items():
        if copy not in graph.weights or original in users or sum(o == original for o, _ in copies.values()) > 1:
            continue
        graph.weights[original] = graph.weights.pop(copy)
        graph.nodes = [
            n.with_(inputs=tuple(original if i == copy else i for i in n.inputs)) if copy in n.inputs else n
            for n in graph.nodes
        ]
