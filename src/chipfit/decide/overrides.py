"""What the user decides by hand about single layers: kept in float, bits, narrower grids, range rules."""

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from chipfit.decide.narrow import METHODS
from chipfit.errors import PlanError, UnknownNameError, raised_outside_chipfit, short_message
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS
from chipfit.ranges import name_of, rule_of
from chipfit.registry import is_number

FLOAT_IS_CHEAPER = "codes would cost more here than they save: what it reads, or its readers, are in float"


class LayerFilter(Protocol):
    """Chooses layers by what they are rather than by a name."""

    def match(self, node: Node) -> bool:
        """Whether the layer is meant. A filter with a true attribute `optional` may mean none of them."""
        ...


#: a layer path, glob, operator, layer type or filter -> "float" or a table of choices; as a table or as pairs, of which
#: a later one wins over an earlier one
Overrides = Mapping[Any, Any] | Sequence[tuple[Any, Any]]


def _is_bits(v: Any) -> bool:
    return v is None or (isinstance(v, str) and v == "float") or (is_number(v) and isinstance(v, int) and v > 0)


def _is_rule(v: Any) -> bool:
    return rule_of(v) is not None


def _is_range(v: Any) -> bool:
    numbers = isinstance(v, (tuple, list)) and all(is_number(x) and abs(x) <= _LARGEST for x in v)
    return numbers and len(v) == 2 and bool(v[0] <= v[1])


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, str) and v in words


#: the largest number that tensors hold
_LARGEST = torch.finfo(torch.float32).max
#: choice -> (what it may be, in words, and its test)
CHOICES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bits": ('of the weights: a number of bits, "float", or None for the chip\'s own choice', _is_bits),
    "activation_bits": ('of the result: a number of bits, "float", or None for the chip\'s own choice', _is_bits),
    "weight_method": (f"grid of the weights, narrower than the chip's: {', '.join(METHODS)}", _one_of(*METHODS)),
    "method": (f"grid of the result, narrower than the chip's: {', '.join(METHODS)}", _one_of(*METHODS)),
    "per": (
        '"tensor", "channel" or "block": what shares one weight scale',
        _one_of("tensor", "channel", "block"),
    ),
    "inputs": (
        '"codes", "dynamic" (rounded by the kernel, each time it runs) or "float": how a layer takes its data',
        _one_of("codes", "dynamic", "float"),
    ),
    "signed": ("whether the result has a sign, where the chip leaves it to the data", lambda v: isinstance(v, bool)),
    "result": ('"codes" or "float": what a kernel that can do both hands over', _one_of("codes", "float")),
    "weight_rule": ("range rule of the weights", _is_rule),
    "rule": ("range rule of the result", _is_rule),
    "range": ("(low, high) of the result, known beforehand: nothing is collected for it", _is_range),
    "z_threshold": (
        "outliers of the result that its range ignores, in standard deviations",
        lambda v: is_number(v) and v > 0,
    ),
}
#: those that say nothing about a layer without weights
OF_WEIGHTS = ("bits", "weight_method", "per", "weight_rule", "inputs")


class Layers:
    """The nodes of a graph by everything that a user may call them."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = tuple(graph.nodes)
        #: names of each kind -> nodes
        self.exact, self.inside, self.ops, self.types = (defaultdict[str, list[Node]](list) for _ in range(4))
        for n in self.nodes:
            for name in {n.layer, n.name}:
                self.exact[name].append(n)
            for k in (k for k, c in enumerate(n.layer) if c == "."):
                self.inside[n.layer[:k]].append(n)
            self.ops[n.op].append(n)
            self.types[n.layer_type].append(n)

    def match(self, pattern: str | LayerFilter) -> list[Node]:
        """See `match_layers`."""
        if not isinstance(pattern, str):
            found = [n for n in self.nodes if _meant(pattern, n)]
            if not found and not getattr(pattern, "optional", False):
                wanted = getattr(pattern, "name", None) or pattern
                known = self._known | {n.name for n in self.nodes}
                raise UnknownNameError("layer for the filter", str(wanted), known, hint=_LISTS)
            return found
        is_glob = any(c in pattern for c in "*?[")
        globbed = [n for n in self.nodes if fnmatch.fnmatchcase(n.layer, pattern)] if is_glob else []
        names = self.exact.get(pattern) or self.inside.get(pattern) or globbed
        found = names or self.ops.get(pattern) or self.types.get(pattern) or []
        if not found:
            raise UnknownNameError("layer", pattern, self._known, hint=_LISTS)
        return found

    @property
    def _known(self) -> set[str]:
        return {name for n in self.nodes for name in (n.layer, n.op, n.layer_type) if name}


def _meant(chosen_by: LayerFilter, node: Node) -> bool:
    try:
        return bool(chosen_by.match(node))
    except Exception as e:  # of a user's filter, or of a thing whose `match` compares something else
        if not raised_outside_chipfit(e):
            raise
        allowed = "a layer's path, a glob, an operator, a layer type, or a filter, whose match(node) says yes or no"
        raise PlanError(
            f"The key of an override fails: {short_message(e)}", got=repr(chosen_by)[:120], allowed=allowed
        ) from e


def match_layers(graph: Graph, pattern: str | LayerFilter) -> list[Node]:
    """The nodes that a user means by `pattern`.

    Of a name, tried in this order: exact layer path or node name; every layer inside that path; a glob over paths;
    canonical operator ("Conv2D"); class of the user's layer ("LayerNorm").

    Raises:
        UnknownNameError: nothing matches; lists near names.
    """
    return Layers(graph).match(pattern)


_LISTS = "`chipfit.lint(model, example)` lists the layers"


def override_entries(overrides: Overrides | None) -> list[tuple[Any, Any]]:
    """Overrides as (pattern, "float" or choices), in the order given; None has none.

    Raises:
        PlanError: neither a table nor pairs, or a pattern that is no name and no filter.
    """
    listed = [] if overrides is None else list(overrides.items()) if isinstance(overrides, Mapping) else overrides
    if not isinstance(listed, (list, tuple)) or any(not isinstance(p, (list, tuple)) or len(p) != 2 for p in listed):
        allowed = 'a table, or a list of pairs: layer -> "float" or a table of choices'
        raise PlanError("The overrides are not understood", got=repr(overrides)[:120], allowed=allowed)
    for pattern, _ in listed:
        is_filter = callable(getattr(pattern, "match", None)) and not isinstance(pattern, type)
        if not (isinstance(pattern, str) or is_filter):
            allowed = "a layer's path, a glob, an operator, a layer type, or a filter"
            raise PlanError("The key of an override is not understood", got=repr(pattern)[:120], allowed=allowed)
    return [(pattern, choices) for pattern, choices in listed]


def resolve_overrides(graph: Graph, overrides: Overrides | None) -> dict[str, dict[str, Any]]:
    """Overrides by node name, in the order of the last entry about each; a later entry wins over an earlier one.

    Raises:
        UnknownNameError: a pattern that means no layer, a choice or a range rule that does not exist.
        PlanError: a value that is neither "float" nor a table of choices; a choice about weights for layers without.
    """
    out: dict[str, dict[str, Any]] = {}
    layers = Layers(graph)
    for pattern, choices in override_entries(overrides):
        if isinstance(choices, str) and choices == "float":
            choices = {"float": f"overrides keep '{pattern}' in float"}
        else:
            check_choices(pattern, choices)
        nodes = layers.match(pattern)
        about_weights = [k for k in choices if k in OF_WEIGHTS]
        if about_weights and nodes and not any(has_weights(n.op) for n in nodes):
            hint = "name a layer with weights, or say activation_bits, rule or method about its result"
            what = f"'{pattern}' has no weights, so that '{about_weights[0]}' says nothing about it"
            raise PlanError(what, got=", ".join(dict.fromkeys(f"{n.op} '{n.who}'" for n in nodes[:8])), hint=hint)
        for node in nodes:
            taken = merge_overrides(out.pop(node.name, {}), choices)
            # of a group that shares one kernel, only the layer with weights has a word about them
            out[node.name] = {k: v for k, v in taken.items() if k not in OF_WEIGHTS or has_weights(node.op)}
    return out


def merge_overrides(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Choices with later ones over them. Who asks for bits takes an earlier "float" back; no other choice does."""
    asks = any(isinstance(later.get(k), int) for k in ("bits", "activation_bits"))
    return {**{k: v for k, v in earlier.items() if not (asks and k == "float")}, **later}


def with_results(resolved: Mapping[str, Mapping[str, Any]], results: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Overrides by node name, over what was chosen about results: node name -> "codes", "float" or "whole"."""
    chosen: dict[str, Mapping[str, Any]] = {
        n: {"float": FLOAT_IS_CHEAPER} if r == "whole" else {"result": r} for n, r in results.items()
    }
    return {n: c for n, c in chosen.items() if n not in resolved} | {
        n: merge_overrides(chosen.get(n, {}), c) for n, c in resolved.items()
    }


def check_choices(pattern: Any, choices: Any) -> None:
    """Refuse a table of choices that cannot be understood.

    Raises:
        UnknownNameError: a range rule that does not exist.
        PlanError: anything else.
    """
    if not (isinstance(choices, Mapping) and choices and all(isinstance(k, str) and k in CHOICES for k in choices)):
        allowed = f'"float", or a table with {", ".join(CHOICES)}, such as {{"bits": 4, "activation_bits": 8}}'
        raise PlanError(f"The override of '{pattern}' is not understood", got=repr(choices)[:120], allowed=allowed)
    for k, v in choices.items():
        words, fits = CHOICES[k]
        if not fits(v):
            raise PlanError(f"'{k}' of the override of '{pattern}' is not understood", got=repr(v)[:120], allowed=words)


def has_weights(op: str) -> bool:
    """Whether an operator may have weights of its own."""
    return op == "MatMul" or (op in OPS and OPS[op].weighted)


def to_record(overrides: Overrides | None) -> dict[str, Any]:
    """Overrides as JSON data: filters and rules by their text, numbers that JSON has no word for as well."""

    def plain(v: Any) -> Any:
        if callable(v):
            return name_of(v)
        return str(v) if isinstance(v, float) and not math.isfinite(v) else v

    out: dict[str, Any] = {}
    for pattern, choices in override_entries(overrides):
        table = choices if isinstance(choices, str) else {k: plain(v) for k, v in choices.items()}
        earlier = out.get(str(pattern))
        out[str(pattern)] = {**earlier, **table} if isinstance(earlier, dict) and isinstance(table, dict) else table
    return out
