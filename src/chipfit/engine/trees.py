"""Conversion between arguments and results of the user's model and flat lists of tensors, by pytrees stored as JSON."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.engine.types import dtype_of
from chipfit.errors import DataError, GraphError
from chipfit.files import parse_json
from chipfit.graph.ir import Graph


def flatten_inputs(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """Return the tensors of a call, in the order of `graph.inputs`.

    Raises:
        DataError: the structure differs from that of the captured call.
    """
    return flatten_call(json.loads(graph.in_spec), args, kwargs or {})


def flatten_call(spec: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call for a parsed `in_spec`; raises as `flatten_inputs`.

    Arguments that were captured by position may be passed by name, and several of them as one list.
    """
    args, kwargs = tuple(args), dict(kwargs)
    if len(args) == 1 < spec["args"] and isinstance(args[0], (list, tuple)) and len(args[0]) == spec["args"]:
        args = tuple(args[0])
    for name in spec["names"][len(args) : spec["args"]]:
        if name not in kwargs:
            break
        args = (*args, kwargs.pop(name))
    leaves = pytree.tree_leaves((args, {k: kwargs[k] for k in spec["kwargs"] if k in kwargs}))
    if len(args) != spec["args"] or set(kwargs) != set(spec["kwargs"]) or len(leaves) != spec["leaves"]:
        words = "{} positional and {} keyword arguments, {} values"
        got = words.format(len(args), sorted(kwargs), len(leaves))
        allowed = words.format(spec["args"], sorted(spec["kwargs"]), spec["leaves"])
        raise DataError("The model was captured with other inputs", got=got, allowed=allowed)
    return [leaves[i] for i in spec["tensors"]]


def call_with(graph: Graph, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with these inputs of the graph; arguments that are not tensors are None."""
    spec = json.loads(graph.in_spec)
    leaves: list[Any] = [None] * spec["leaves"]
    for k, x in zip(spec["tensors"], inputs, strict=True):
        leaves[k] = x
    args, kwargs = pytree.tree_unflatten(leaves, load_tree(spec))
    return args, kwargs


def batch_axes(graph: Graph) -> dict[str, int]:
    """Return the axis of samples of each input that has one; it is axis 0 unless the capture found another."""
    spec = json.loads(graph.in_spec) if graph.in_spec else {}
    if "batch" in spec:
        return {graph.inputs[k]: axis for k, axis in spec["batch"]}
    return {i: 0 for i in graph.inputs if graph.shape(i)[:1] == (None,)}


def with_states(graph: Graph, names: Sequence[str]) -> Graph:
    """Return a graph that knows which of its inputs hold states; the last outputs are their next values.

    Raises:
        DataError: there is no such input, there are too few outputs, or a state and its next value differ in shape.
    """
    if not names:
        return graph
    unknown = [n for n in names if n not in graph.inputs]
    if unknown:
        what = f"State '{unknown[0]}' is not an input of the model"
        raise DataError(what, allowed=", ".join(graph.inputs))
    if len(names) > len(graph.outputs):
        what = f"The model has {len(graph.outputs)} outputs, and {len(names)} states"
        raise DataError(what, hint="return the next states as the last outputs, in the order of `states`")
    first = len(graph.outputs) - len(names)
    for name, k in zip(names, range(first, len(graph.outputs)), strict=True):
        have, want = graph.shape(graph.outputs[k]), graph.shape(name)
        if len(have) != len(want) or any(
            None not in pair and len({*pair}) > 1 for pair in zip(have, want, strict=True)
        ):
            what = f"State '{name}' and its next value, output {k} of the model, differ in shape"
            raise DataError(what, got=f"{list(want)} and {list(have)}")
    graph = graph.copy()
    pairs = [[graph.inputs.index(n), first + k] for k, n in enumerate(names)]
    graph.in_spec = json.dumps({**json.loads(graph.in_spec), "states": pairs})
    return graph


def dump_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    tensors: Sequence[int] | None = None,
    **more: Any,
) -> str:
    """Return the `in_spec` of a call.

    Args:
        names: parameters that the positional arguments belong to.
        tensors: indices of the leaves that are inputs of the graph; by default all.
        more: further entries, of the framework.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    spec = {"args": len(args), "kwargs": list(kwargs), "leaves": len(leaves)}
    spec |= {"tensors": list(range(len(leaves)) if tensors is None else tensors), "names": list(names), **more}
    return json.dumps({**dump_tree(tree, (tuple(args), dict(kwargs))), **spec})


def dump_result(example: Any, leaves: Sequence[Mapping[str, Any]], tree: Any = None) -> str:
    """Return the `out_spec` of a result.

    Args:
        leaves: for each leaf, {"output": index of the graph's output} or {"constant": value}; "dtype" of an output is
            the number type that the model returns, where the graph's differs.
        tree: the structure of the result, if it is not that of `example`.
    """
    tree = pytree.tree_structure(example) if tree is None else tree
    return json.dumps({**dump_tree(tree, example), "leaves": list(leaves)})


class ResultStructure:
    """The structure of a model's result; a call with one value per graph output builds a result."""

    def __init__(self, graph: Graph) -> None:
        self._text, spec = graph.out_spec, json.loads(graph.out_spec)
        self._leaves, self._tree = spec["leaves"], load_tree(spec)

    def __call__(self, outputs: Sequence[Any]) -> Any:
        return pytree.tree_unflatten([_leaf(x, outputs) for x in self._leaves], self._tree)

    def __deepcopy__(self, memo: dict[int, Any]) -> ResultStructure:
        return self  # immutable, and torch warns when a tree is copied

    def __reduce__(self) -> Any:
        return ResultStructure, (SimpleNamespace(out_spec=self._text),)  # and when one is unpickled


def _leaf(x: Mapping[str, Any], outputs: Sequence[Any]) -> Any:
    """Return one leaf of a result, in the number type that the model returns."""
    if "output" not in x:
        return x["constant"]
    out = outputs[x["output"]]
    return out.to(dtype_of(x["dtype"])) if "dtype" in x and isinstance(out, torch.Tensor) else out


#: digest -> structure with the user's own classes, of results of models that this process captured
_CAPTURED: dict[str, Any] = {}
#: classes in which torch counts an entry that is None; classes of libraries omit it
_KEEP_NONE = dict, collections.OrderedDict, collections.defaultdict
#: their names in a structure that torch wrote
_DICTS = tuple(f"{c.__module__}.{c.__qualname__}" for c in _KEEP_NONE)


def dump_tree(tree: Any, example: Any) -> dict[str, str]:
    """Return a pytree as JSON of dicts, lists and tuples; one with other classes is also kept in this process."""
    own = pytree.tree_structure(_plain(example))
    plain = {"plain": pytree.treespec_dumps(own)}
    if own == tree:
        return plain
    digest = hashlib.sha256(f"{tree!r} {_classes(tree)}".encode()).hexdigest()
    _CAPTURED[digest] = tree
    return {"captured": digest, **plain}


def load_tree(spec: Mapping[str, Any]) -> Any:
    """Return the pytree of `dump_tree`, with the user's classes if this process captured it."""
    captured = _CAPTURED.get(spec.get("captured", ""))
    return captured if captured is not None else read_tree(spec["plain"])


def read_tree(text: str) -> Any:
    """Return a pytree that torch wrote, without importing classes: as dicts, lists and tuples with the same leaves.

    A class becomes a dict if the text names its fields, else a tuple.

    Raises:
        GraphError: the text is malformed.
    """
    try:
        match parse_json(text, GraphError, where="a structure of inputs or outputs is malformed"):
            case [1, node]:
                return pytree.tree_structure(_nested(node))
        raise ValueError("not of version 1")
    except (ValueError, RecursionError) as e:
        raise GraphError("The structure of inputs or outputs is malformed", got=f"{type(e).__name__}: {e}") from e


def _nested(node: Mapping[str, Any]) -> Any:
    """Return the structure of a node with 0 at every leaf."""
    parts = node.get("children_spec") if isinstance(node, dict) else None
    if not isinstance(parts, list) or not isinstance(node.get("type"), (str, type(None))):
        raise ValueError(f"{str(node)[:80]} is not a node")
    kind, children = node.get("type", ""), [_nested(c) for c in parts]
    if kind is None:
        return 0
    if kind in ("builtins.list", "builtins.tuple"):
        return children if kind == "builtins.list" else tuple(children)
    context = node.get("context")
    if isinstance(context, dict):  # for a defaultdict
        context = context.get("dict_context")
    names = json.loads(context) if isinstance(context, str) and context[:1] == "[" else context
    while isinstance(names, list) and len(names) == 2 and isinstance(names[1], list):
        names = names[0] if isinstance(names[0], list) else names[1]  # fields of a dataclass; [factory, keys]
    if isinstance(names, list) and len(names) == len(children) and all(isinstance(n, (str, int)) for n in names):
        return dict(zip(names, children, strict=True))
    if kind in _DICTS:
        raise ValueError(f"{len(children)} entries with the keys {names}")
    return tuple(children)


def _classes(tree: Any) -> list[str]:
    """Return the classes of a pytree, by module and name."""
    kinds = (tree.type, tree.context) if tree.type is not None else ()
    own = [f"{k.__module__}.{k.__qualname__}" for k in kinds if isinstance(k, type)]
    return own + [name for child in tree.children() for name in _classes(child)]


def _plain(x: Any) -> Any:
    """Return x with its containers converted to dicts, lists and tuples."""
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items() if v is not None or type(x) in _KEEP_NONE}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x) if getattr(x, f.name) is not None}
    if isinstance(x, (tuple, list)):
        return type(x)(_plain(v) for v in x) if type(x) in (tuple, list) else tuple(_plain(v) for v in x)
    return x
