"""Between the arguments and results of the user's model and flat lists of tensors, through pytrees kept as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.errors import DataError
from chipfit.graph.ir import Graph


def flatten_inputs(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """The tensors of a call, in the order of `graph.inputs`.

    Raises:
        DataError: the call has another structure than the captured one.
    """
    return flatten_call(json.loads(graph.in_spec), args, kwargs or {})


def flatten_call(spec: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """As `flatten_inputs`, from a parsed `in_spec`. What was captured by position may be passed by name.

    Raises:
        DataError: as above.
    """
    args, kwargs = tuple(args), dict(kwargs)
    for name in spec["names"][len(args) : spec["args"]]:
        if name not in kwargs:
            break
        args = (*args, kwargs.pop(name))
    leaves = pytree.tree_leaves((args, {k: kwargs[k] for k in spec["kwargs"] if k in kwargs}))
    if len(args) != spec["args"] or set(kwargs) != set(spec["kwargs"]) or len(leaves) != spec["leaves"]:
        words = "{} positional and {} keyword arguments, {} leaves"
        raise DataError(
            "The model was captured with other inputs",
            got=words.format(len(args), sorted(kwargs), len(leaves)),
            allowed=words.format(spec["args"], sorted(spec["kwargs"]), spec["leaves"]),
        )
    return [leaves[i] for i in spec["tensors"]]


def unflatten_outputs(graph: Graph, outputs: Sequence[Any]) -> Any:
    """The structure that the user's model returns, from one value per graph output."""
    return Results(graph)(outputs)


class Results:
    """The structure that a model returns; called with one value per graph output, it makes one."""

    def __init__(self, graph: Graph) -> None:
        spec = json.loads(graph.out_spec)
        self._leaves, self._tree = spec["leaves"], load_tree(spec)

    def __call__(self, outputs: Sequence[Any]) -> Any:
        leaves = [outputs[x["output"]] if "output" in x else x["constant"] for x in self._leaves]
        return pytree.tree_unflatten(leaves, self._tree)

    def __deepcopy__(self, memo: dict[int, Any]) -> Results:
        return self  # nothing changes it, and copying a tree makes torch warn


def load_tree(spec: Mapping[str, Any]) -> Any:
    """The pytree of a saved spec; where its classes cannot be imported here, dicts and tuples of the same shape."""
    try:
        return pytree.treespec_loads(spec["tree"])
    except Exception:  # pytree raises many types for unknown classes; the plain form always loads
        return pytree.treespec_loads(spec["plain"])


def dump_tree(tree: Any, example: Any) -> dict[str, str]:
    """A pytree spec as JSON, with the plain form that loads without the user's classes."""
    plain = pytree.treespec_dumps(pytree.tree_structure(_plain(example)))
    try:
        return {"tree": pytree.treespec_dumps(tree), "plain": plain}
    except Exception:  # a class without serialised name
        return {"tree": plain, "plain": plain}


def _plain(x: Any) -> Any:
    """The same leaves in dicts and tuples."""
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items() if v is not None or type(x) is dict}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x) if getattr(x, f.name) is not None}
    if isinstance(x, (tuple, list)):
        return type(x)(_plain(v) for v in x) if type(x) in (tuple, list) else tuple(_plain(v) for v in x)
    return x
