"""What the user decides by hand: layers kept in float, bits of single layers."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from chipfit.errors import PlanError, UnknownNameError
from chipfit.graph.ir import Graph, Node

#: layer path, glob, operator or layer type -> "float" or {"bits": n, "activation_bits": n}
Overrides = Mapping[str, Any]

_KEYS = ("bits", "activation_bits")


def match_layers(graph: Graph, pattern: str) -> list[Node]:
    """The nodes that a user means by `pattern`.

    Tried in this order: exact layer path or node name; every layer inside that path; a glob over paths; canonical
    operator ("Conv2D"); class of the user's layer ("LayerNorm").

    Raises:
        UnknownNameError: nothing matches; lists near names.
    """
    tries = (
        lambda n: pattern in (n.layer, n.name),
        lambda n: n.layer.startswith(pattern + "."),
        lambda n: any(c in pattern for c in "*?[") and fnmatch.fnmatchcase(n.layer, pattern),
        lambda n: n.op == pattern,
        lambda n: n.layer_type == pattern,
    )
    for fits in tries:
        found = [n for n in graph.nodes if fits(n)]
        if found:
            return found
    known = {n.layer for n in graph.nodes if n.layer} | {n.op for n in graph.nodes} | {n.layer_type for n in graph.nodes if n.layer_type}
    raise UnknownNameError("layer", pattern, known, hint="`chipfit.lint(model, example)` lists the layers")


def resolve_overrides(graph: Graph, overrides: Overrides) -> dict[str, dict[str, Any]]:
    """Overrides by node name; a later entry wins over an earlier one on the same node.

    Raises:
        UnknownNameError: a key that names no layer.
        PlanError: a value that is neither "float" nor a table of bits.
    """
    out: dict[str, dict[str, Any]] = {}
    for pattern, said in overrides.items():
        if said == "float":
            said = {"float": f"overrides keep '{pattern}' in float"}
        elif not isinstance(said, Mapping) or not said or any(k not in _KEYS or not isinstance(v, int) for k, v in said.items()):
            raise PlanError(
                f"The override of '{pattern}' is not understood",
                got=repr(said),
                allowed='"float", or a table such as {"bits": 4, "activation_bits": 8}',
            )
        for node in match_layers(graph, pattern):
            out.setdefault(node.name, {}).update(said)
    return out
