"""Overrides: what the user decides about single layers, such as float, bits, a narrower grid or a range rule."""

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from chipfit.engine.curves import steps_in
from chipfit.errors import PlanError, UnknownNameError, UnsupportedError, raised_outside_chipfit, short_message
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS, facts_of
from chipfit.platform.schema import Format
from chipfit.ranges import name_of, rule_of
from chipfit.registry import is_number

MOVES_FLOATS = "it moves values that are not quantized"
PARTS_ARE_LOST = "on the grid that all parts of its result share, a part would be lost"
FLOAT_IS_CHEAPER = (
    "integers would cost more than they save, by conversions where its inputs or consumers are in float, or by rounding"
)

#: method, the kind of a grid -> the kinds whose numbers such a grid holds all
METHODS = {
    "uniform": ("uniform", "symmetric", "power_of_two"),
    "symmetric": ("symmetric", "power_of_two"),
    "power_of_two": ("power_of_two",),
    # a table with one entry for each code may as well hold the values of an evenly spaced grid
    "lut_symmetric": ("lut_symmetric", "lut_power_of_two", "symmetric", "power_of_two"),
    "lut_power_of_two": ("lut_power_of_two", "power_of_two"),
}


class LayerFilter(Protocol):
    """A filter that chooses layers by what they are rather than by a name."""

    def match(self, node: Node) -> bool:
        """Return whether the filter chooses a layer. With a true attribute `optional` it may choose none at all."""
        ...


#: a layer path, glob, operator, layer type or filter -> "float" or a table of choices; as a table or as pairs, of which
#: a later one wins over an earlier one
Overrides = Mapping[Any, Any] | Sequence[tuple[Any, Any]]
NodeOverrides = Mapping[str, Mapping[str, Any]]  #: node name -> choices, as `resolve_overrides` gives them


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
_PER, _INPUTS = ("tensor", "channel", "block"), ("codes", "dynamic", "float")
#: choice -> (what it may be, in words, and its test)
CHOICES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bits": ('of the weights: a number of bits, "float", or None for the chip\'s own choice', _is_bits),
    "activation_bits": ('of the result: a number of bits, "float", or None for the chip\'s own choice', _is_bits),
    "weight_method": (f"grid of the weights, narrower than the chip's: {', '.join(METHODS)}", _one_of(*METHODS)),
    "method": (f"grid of the result, narrower than the chip's: {', '.join(METHODS)}", _one_of(*METHODS)),
    "per": ('"tensor", "channel" or "block": what shares one weight scale', _one_of(*_PER)),
    "inputs": (
        '"codes", "dynamic" (quantized by the kernel at run time) or "float": how data are read',
        _one_of(*_INPUTS),
    ),
    "signed": ("whether the result has a sign, if the chip derives it from the data", lambda v: isinstance(v, bool)),
    "result": ('"codes" or "float": what a kernel that can do both outputs', _one_of("codes", "float")),
    "weight_rule": ("range rule of the weights", _is_rule),
    "rule": ("range rule of the result", _is_rule),
    "range": ("(low, high) of the result, known beforehand: nothing is collected for it", _is_range),
    "z_threshold": (
        "outliers of the result that its range ignores, in standard deviations",
        lambda v: is_number(v) and v > 0,
    ),
}
#: choices that have no meaning for a layer without weights
OF_WEIGHTS = ("bits", "weight_method", "per", "weight_rule", "inputs")
#: operator of the node that stands for an input of the model, and the choices about inputs
INPUT = "Input"
OF_INPUTS = ("float", "activation_bits", "rule", "range", "z_threshold")


class Layers:
    """The nodes of a graph by every name that a user may give them."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = tuple(graph.nodes)
        #: names of each kind -> nodes; of tensors: the node that makes an activation, the nodes that read a weight
        self.exact, self.inside, self.tensors, self.ops, self.types = (
            defaultdict[str, list[Node]](list) for _ in range(5)
        )
        for v in graph.inputs:
            self.tensors[v].append(Node(v, INPUT, (), (v,)))
        for n in self.nodes:
            for name in {*n.outputs, *(i for i in n.inputs if i is not None and i in graph.weights)}:
                self.tensors[name].append(n)
            for name in {n.layer, n.name, n.composite or n.name}:
                self.exact[name].append(n)
            for k in (k for k, c in enumerate(n.layer) if c == "."):
                self.inside[n.layer[:k]].append(n)
            for op in {n.op, n.composite_op or n.op, *(step.op for step in steps_in(n))}:
                self.ops[op].append(n)
            self.types[n.layer_type].append(n)

    def match(self, pattern: str | LayerFilter) -> list[Node]:
        """Return the nodes that a pattern names; see `match_layers`."""
        if not isinstance(pattern, str):
            inputs = [t[0] for v, t in self.tensors.items() if t and t[0].op == INPUT]
            inputs = inputs if getattr(pattern, "of_inputs", False) else []
            nodes = [n for n in (*inputs, *self.nodes) if _chooses(pattern, n)]
            if not nodes and not getattr(pattern, "optional", False):
                wanted = getattr(pattern, "name", None) or pattern
                names = self._names | {n.name for n in self.nodes}
                raise UnknownNameError("layer for the filter", str(wanted), names, hint=_LISTS)
            return nodes
        is_glob = any(c in pattern for c in "*?[")
        globbed = [n for n in self.nodes if fnmatch.fnmatchcase(n.display_name, pattern)] if is_glob else []
        by_name = self.exact.get(pattern) or self.inside.get(pattern) or self.tensors.get(pattern) or globbed
        requantized_for = self.exact.get(pattern.rpartition("_for_")[2])  # see `insertions.requantize`
        nodes = by_name or self.ops.get(pattern) or self.types.get(pattern) or requantized_for or self._divided(pattern)
        if not nodes:
            raise UnknownNameError("layer", pattern, self._names, hint=_LISTS)
        return nodes

    def _divided(self, part: str) -> list[Node]:
        """Return the node that the chip divides, for the name of a part, "NODE/mean_1"; see `passes.new_nodes`."""
        whole, _, op = part.rpartition("/")
        known = re.sub(r"_\d+$", "", op) in {name.lower() for name in OPS}
        return [n for n in self.nodes if known and n.name == whole]

    @property
    def _names(self) -> set[str]:
        return {name for n in self.nodes for name in (n.display_name, n.op, n.composite_op, n.layer_type) if name}


def _chooses(layer_filter: LayerFilter, node: Node) -> bool:
    """Return whether a filter chooses a node, or the composite that it is a part of."""
    try:
        whole = node.with_(name=node.composite, op=node.composite_op) if node.composite else node
        return bool(layer_filter.match(node)) or (whole is not node and bool(layer_filter.match(whole)))
    except Exception as e:  # in a user's filter, or in an object whose `match` compares something else
        if not raised_outside_chipfit(e):
            raise
        what, got = f"The key of an override fails: {short_message(e)}", repr(layer_filter)[:120]
        allowed = "a layer's path, a glob, an operator, a layer type, or a filter, whose match(node) returns a bool"
        raise PlanError(what, got=got, allowed=allowed) from e


def match_layers(graph: Graph, pattern: str | LayerFilter) -> list[Node]:
    """Return the nodes that a user names by `pattern`.

    A name is tried in this order: exact layer path or node name; every layer inside that path; a tensor, which stands
    for the node that makes it, for the nodes that read a weight, or for an input of the model (operator `INPUT`); a
    glob over paths; canonical operator ("Conv2D"); class of the user's layer ("LayerNorm"); a part of a node that the
    chip divides, which stands for the whole node.

    Raises:
        UnknownNameError: nothing matches; lists near names.
    """
    return Layers(graph).match(pattern)


_LISTS = "`chipfit.lint(model, example)` lists the layers"


def override_entries(overrides: Overrides | None) -> list[tuple[Any, Any]]:
    """Return overrides as (pattern, "float" or choices), in the order given; an empty list for None.

    Raises:
        PlanError: neither a table nor pairs, or a pattern that is neither a name nor a filter.
    """
    entries = [] if overrides is None else list(overrides.items()) if isinstance(overrides, Mapping) else overrides
    if not isinstance(entries, (list, tuple)) or any(not isinstance(e, (list, tuple)) or len(e) != 2 for e in entries):
        allowed = 'a table, or a list of pairs: layer -> "float" or a table of choices'
        raise PlanError("The overrides are not understood", got=repr(overrides)[:120], allowed=allowed)
    for pattern, _ in entries:
        is_filter = callable(getattr(pattern, "match", None)) and not isinstance(pattern, type)
        if not (isinstance(pattern, str) or is_filter):
            allowed = "a layer's path, a glob, an operator, a layer type, or a filter"
            raise PlanError("The key of an override is not understood", got=repr(pattern)[:120], allowed=allowed)
    return [(pattern, choices) for pattern, choices in entries]


def resolve_overrides(graph: Graph, overrides: Overrides | None) -> dict[str, dict[str, Any]]:
    """Return overrides by node name, in the order of the last entry about each; a later entry wins over an earlier one.

    Choices about a weight hold for every node that reads it, since it is stored once; float is a choice of each reader.

    Raises:
        UnknownNameError: a pattern that names no layer, a choice or a range rule that does not exist.
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
        if any(n.op == INPUT for n in nodes):
            _check_input_choices(str(pattern), choices)
        about_weights = [k for k in choices if k in OF_WEIGHTS]
        if about_weights and nodes and not any(has_weights(n.op) for n in nodes):
            hint = "name a layer with weights, or choose activation_bits, rule or method for its result"
            what = f"'{pattern}' has no weights, so that '{about_weights[0]}' has no meaning for it"
            raise PlanError(
                what, got=", ".join(dict.fromkeys(f"{n.op} '{n.display_name}'" for n in nodes[:8])), hint=hint
            )
        for node, own in [*((n, choices) for n in nodes), *for_other_readers(layers, nodes, choices)]:
            merged = merge_overrides(out.pop(node.name, {}), own)
            # in a group that shares one kernel, choices about weights go to the layer that has them
            out[node.name] = {k: v for k, v in merged.items() if k not in OF_WEIGHTS or has_weights(node.op)}
    return out


def for_other_readers(
    layers: Layers, nodes: Collection[Node], choices: Mapping[str, Any]
) -> Iterator[tuple[Node, dict[str, Any]]]:
    """Yield the other nodes that read a weight of these, with the choices that are about the weight as it is stored."""
    of_weight = {k: v for k, v in choices.items() if k in OF_WEIGHTS and k != "inputs" and v != "float"}
    weights = dict.fromkeys(n.operand("w") for n in nodes if of_weight)
    readers = {n.name: n for w in weights if w is not None for n in layers.tensors.get(w, ()) if n.operand("w") == w}
    own = {n.name for n in nodes}
    yield from ((n, of_weight) for name, n in readers.items() if name not in own)


def merge_overrides(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return choices with later ones over earlier ones; only a number of bits cancels an earlier "float"."""
    sets_bits = any(isinstance(later.get(k), int) for k in ("bits", "activation_bits"))
    return {**{k: v for k, v in earlier.items() if not (sets_bits and k == "float")}, **later}


def with_results(resolved: NodeOverrides, results: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Return resolved overrides over chosen modes: node name -> "codes", "float", "whole" or "apart"."""
    whole = {"whole": FLOAT_IS_CHEAPER, "apart": PARTS_ARE_LOST}
    chosen = {n: {"float": whole[r]} if r in whole else {"result": r} for n, r in results.items()}
    out: dict[str, Mapping[str, Any]] = {n: c for n, c in chosen.items() if n not in resolved}
    return out | {n: merge_overrides(chosen.get(n, {}), c) for n, c in resolved.items()}


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


def _check_input_choices(name: str, choices: Mapping[str, Any]) -> None:
    """Refuse choices that an input of the model does not have.

    Raises:
        PlanError: a choice beside its range and float.
    """
    if wrong := [k for k in choices if k not in OF_INPUTS]:
        allowed = f'"float", or a table with {", ".join(OF_INPUTS[1:])}, such as {{"range": (0.0, 1.0)}}'
        hint = "name the layers that read it"
        raise PlanError(f"'{wrong[0]}' is not a choice for input '{name}'", got=wrong[0], allowed=allowed, hint=hint)


def has_weights(op: str) -> bool:
    """Return whether an operator may have weights of its own."""
    return op == "MatMul" or facts_of(op, {}).weighted


def to_record(overrides: Overrides | None) -> dict[str, Any]:
    """Return overrides as JSON data: filters, rules and numbers that JSON cannot hold are written as text."""

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


def method_of(fmt: Format) -> str | None:
    """Return the method, as in METHODS, of a format; None for logarithmic and floating-point formats."""
    pot = fmt.scale == "pot"
    if fmt.kind == "lut":
        return "lut_power_of_two" if pot else "lut_symmetric"
    if fmt.kind != "int":
        return None
    return "uniform" if fmt.zero == "any" else "power_of_two" if pot else "symmetric"


def constrain_format(
    fmt: Format, *, layer: str, method: str | None = None, signed: bool | None = None, per: str | None = None
) -> Format:
    """Return `fmt` with one zero point, power-of-two scales, a given sign, or one scale for all channels.

    The result holds some of the numbers that the chip's format holds, never others, unless its width is free: then it
    is of any method.

    Args:
        layer: its name, for messages.
        method: one of METHODS.
        signed: only if the format derives the sign from the data.
        per: "tensor" for one scale; "channel" is what a format per channel has already.

    Raises:
        UnsupportedError: the chip's format does not hold the numbers of the wanted one.
    """
    changes: dict[str, Any] = {}
    have = method_of(fmt)
    if method is not None and method != have:
        allowed = METHODS[have] if have else ()
        if fmt.lut and fmt.lut.get("entries", 1 << fmt.bits) < 1 << fmt.bits:
            allowed = tuple(m for m in allowed if m.startswith("lut"))
        if method not in allowed and fmt.free:
            changes |= _other_method(method)
        elif method not in allowed:
            raise _not_held(layer, "method", method, allowed)
        elif fmt.kind == "lut" and not method.startswith("lut"):
            changes |= {"kind": "int", "lut": None}
        elif have == "uniform":
            changes["zero"] = (0, 1 << fmt.bits - 1) if fmt.signed is False else 0
        if method.endswith("power_of_two"):
            changes["scale"] = "pot"
    if signed is not None and signed != fmt.signed:
        if fmt.signed != "auto":
            raise _not_held(layer, "sign", signed, (fmt.signed,))
        changes["signed"] = signed
    if per is not None and per != fmt.per:
        if (per, fmt.per) != ("tensor", "channel"):
            raise _not_held(layer, "scale per", per, (fmt.per,))
        changes["per"] = per
    return fmt.model_copy(update=changes)


def _other_method(method: str) -> dict[str, Any]:
    """Return the fields of a format that make it one of a method."""
    if method == "uniform":
        return {"zero": "any", "scale": "any", "pair_limit": None}
    table = {"kind": "lut", "free": False, "range": "full", "lut": {"value_bits": 8}}
    return {"zero": 0, "scale": "any", "pair_limit": None, **(table if method.startswith("lut") else {})}


def _not_held(layer: str, what: str, got: Any, allowed: tuple[Any, ...]) -> UnsupportedError:
    may, hint = ", ".join(map(str, allowed)) or "nothing else", "describe a chip that can, or leave the layer as it is"
    return UnsupportedError(f"The chip's format for '{layer}' cannot have this {what}", got=got, allowed=may, hint=hint)
