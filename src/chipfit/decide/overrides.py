"""Overrides: what the user decides about single layers, such as float, bits, a narrower grid or a range rule."""

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from chipfit.engine.curves import steps_in
from chipfit.errors import PlanError, UnknownNameError, UnsupportedError, raise_bug, short_message
from chipfit.graph.ir import Graph, Node, Removed
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
    """A filter that chooses layers by what they are rather than by a name.

    A method `match_folded(node, into)`, if it has one, chooses nodes that were folded into others; it is called if
    `match` chooses nothing.
    """

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


class Named(NamedTuple):
    """A node that a pattern names."""

    node: Node
    removed: Removed | None = None  #: the node that was meant, where a rewrite put `node` in its place

    @property
    def name(self) -> str:
        """The user's name for what was meant."""
        return self.node.display_name if self.removed is None else self.removed.node.display_name

    @property
    def op(self) -> str:
        return self.node.op if self.removed is None else self.removed.node.op

    def takes(self, choice: str) -> bool:
        """Return whether a choice about what was meant is one about the node.

        Float is always one; a choice about weights if there are any, one about a result if it is that of the node.
        """
        of_weight = choice in OF_WEIGHTS and has_weights(self.op)
        return self.removed is None or choice == "float" or (of_weight if choice in OF_WEIGHTS else self.removed.same)


class _Names:
    """Nodes by every name that a user may give them."""

    def __init__(self) -> None:
        #: names of each kind -> nodes; of tensors: the node that makes an activation, the nodes that read a weight
        self.exact, self.inside, self.tensors, self.paths, self.ops, self.types = (
            defaultdict[str, list[Named]](list) for _ in range(6)
        )

    def add(self, n: Node, found: Sequence[Named], tensors: Iterable[str | None]) -> None:
        """Let the names of a node name others, or itself."""
        for name in {*tensors} - {None}:
            self.tensors[str(name)] += found
        for name in {n.layer, n.name, n.composite or n.name}:
            self.exact[name] += found
        for k in (k for k, c in enumerate(n.layer) if c == "."):
            self.inside[n.layer[:k]] += found
        for op in {n.op, n.composite_op or n.op, *(step.op for step in steps_in(n))}:
            self.ops[op] += found
        self.paths[n.display_name] += found
        self.types[n.layer_type] += found

    def by_name(self, pattern: str) -> list[Named]:
        """Return what a name, a path or a glob over paths stands for."""
        is_glob = any(c in pattern for c in "*?[")
        globbed = [f for p in self.paths if fnmatch.fnmatchcase(p, pattern) for f in self.paths[p]] if is_glob else []
        return self.exact.get(pattern) or self.inside.get(pattern) or self.tensors.get(pattern) or globbed

    def by_kind(self, pattern: str) -> list[Named]:
        """Return what a canonical operator, or a class of layers, stands for."""
        return self.ops.get(pattern) or self.types.get(pattern) or []

    @property
    def known(self) -> set[str]:
        """The paths, operators and classes of layers."""
        return {*self.paths, *self.ops, *self.types} - {""}


class Layers:
    """The nodes of a graph by every name that a user may give them, or may give to nodes that rewrites took out.

    What stands for a node that was joined with others is found by each of its names. Where a node was folded into the
    weights of another, or left out, only a name or path leads to that other one, where no node that computes has it: no
    class of layers does.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes, self._order = tuple(graph.nodes), {n.name: k for k, n in enumerate(graph.nodes)}
        self._names, self._folded, by = _Names(), _Names(), defaultdict[str, list[Node]](list)
        for v in graph.inputs:
            self._names.tensors[v].append(Named(Node(v, INPUT, (), (v,))))
        for n in self.nodes:
            weights = [i for i in n.inputs if i is not None and i in graph.weights]
            owners = (w[: max(w.rfind("."), w.rfind("/"), 0)] for w in weights)  # layers that are read, not called
            self._names.add(n, [Named(n)], (*n.outputs, *weights, *filter(None, owners)))
            for name in {n.name, n.composite or n.name}:
                by[name].append(n)
        self._removed = [(r, [Named(n, r) for n in by[r.by]]) for r in graph.removed.values()]
        for r, found in self._removed:
            (self._names if r.joined else self._folded).add(r.node, found, r.node.outputs)

    def match(self, pattern: str | LayerFilter) -> list[Node]:
        """Return the nodes that a pattern names; see `match_layers`."""
        return [found.node for found in self.find(pattern)]

    def find(self, pattern: str | LayerFilter) -> list[Named]:
        """Return the nodes that a pattern names, each once, with what was meant."""
        found = self._of_name(pattern) if isinstance(pattern, str) else self._of_filter(pattern)
        best = dict[str, Named]()
        for f in sorted(found, key=lambda f: f.removed is not None and not f.removed.same):
            best.setdefault(f.node.name, f)
        return sorted(best.values(), key=lambda f: self._order.get(f.node.name, -1))

    def readers(self, weight: str) -> list[Node]:
        """Return the nodes that read a weight."""
        return [f.node for f in self._names.tensors.get(weight, ()) if f.removed is None]

    def _of_filter(self, layers: LayerFilter) -> list[Named]:
        known = self._names.tensors.values() if getattr(layers, "of_inputs", False) else ()
        inputs = [t[0] for t in known if t and t[0].op == INPUT]
        found = [f for f in (*inputs, *map(Named, self.nodes)) if _chooses(layers, f.node)]
        found += [f for r, by in self._removed if r.joined and _chooses(layers, r.node) for f in by]
        if not found and (match := getattr(layers, "match_folded", None)) is not None:
            found = [f for r, by in self._removed if not r.joined for f in by if match(r.node, f.node)]
        if not found and not getattr(layers, "optional", False):
            wanted = getattr(layers, "name", None) or layers
            names = self._names.known | {n.name for n in self.nodes}
            raise UnknownNameError("layer for the filter", str(wanted), names, hint=_LISTS)
        return found

    def _of_name(self, pattern: str) -> list[Named]:
        names = self._names
        requantized_for = names.exact.get(pattern.rpartition("_for_")[2])  # see `insertions.requantize`
        found = names.by_name(pattern) or names.by_kind(pattern)
        if all(f.node.facts.moves for f in found):  # it computes nothing here
            found = [*found, *self._folded.by_name(pattern)]
        if found := found or requantized_for or self._divided(pattern):
            return found
        if pattern and (pattern in self._folded.known or pattern in self._folded.exact):
            by = {f.name: f.node.display_name for f in self._folded.by_kind(pattern)}
            folded = ", ".join(f"'{name}' is a part of '{other}'" for name, other in by.items())
            hint = "name one of those" if by else "leave it out: it computes nothing that an output needs"
            raise PlanError(f"Nothing is left of '{pattern}' in the network", got=folded or None, hint=hint)
        raise UnknownNameError("layer", pattern, names.known | self._folded.known, hint=_LISTS)

    def _divided(self, part: str) -> list[Named]:
        """Return the node that the chip divides, for the name of a part, "NODE/mean_1"; see `passes.new_nodes`."""
        whole, _, op = part.rpartition("/")
        known = re.sub(r"_\d+$", "", op) in {name.lower() for name in OPS}
        return [Named(n) for n in self.nodes if known and n.name == whole]


def _chooses(layer_filter: LayerFilter, node: Node) -> bool:
    """Return whether a filter chooses a node, or the composite that it is a part of."""
    try:
        whole = node.with_(name=node.composite, op=node.composite_op) if node.composite else node
        return bool(layer_filter.match(node)) or (whole is not node and bool(layer_filter.match(whole)))
    except Exception as e:  # in a user's filter, or in an object whose `match` compares something else
        raise_bug(e)
        what, got = f"The key of an override fails: {short_message(e)}", repr(layer_filter)[:120]
        allowed = "a layer's path, a glob, an operator, a layer type, or a filter, whose match(node) returns a bool"
        raise PlanError(what, got=got, allowed=allowed) from e


def match_layers(graph: Graph, pattern: str | LayerFilter) -> list[Node]:
    """Return the nodes that a user names by `pattern`.

    A name is tried in this order: exact layer path or node name; every layer inside that path; a tensor, which stands
    for the node that makes it, for the nodes that read a weight, or for an input of the model (operator `INPUT`); a
    glob over paths; canonical operator ("Conv2D"); class of the user's layer ("LayerNorm"); a part of a node that the
    chip divides, which stands for the whole node. A layer that a rewrite joined with others or folded into another
    still has its names, see `Layers`.

    Raises:
        UnknownNameError: nothing matches; lists near names.
        PlanError: every layer of that kind was folded into others, or left out.
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
        raise PlanError("Overrides must be a table or a list of pairs", got=repr(overrides)[:120], allowed=allowed)
    for pattern, _ in entries:
        is_filter = callable(getattr(pattern, "match", None)) and not isinstance(pattern, type)
        if not (isinstance(pattern, str) or is_filter):
            allowed = "a layer's path, a glob, an operator, a layer type, or a filter"
            raise PlanError("Key of an override does not name layers", got=repr(pattern)[:120], allowed=allowed)
    return [(pattern, choices) for pattern, choices in entries]


def resolve_overrides(graph: Graph, overrides: Overrides | None) -> dict[str, dict[str, Any]]:
    """Return overrides by node name, in the order of the last entry about each; a later entry wins over an earlier one.

    Choices about a weight hold for every node that reads it, since it is stored once; float is a choice of each reader.

    Raises:
        UnknownNameError: a pattern that names no layer, a choice or a range rule that does not exist.
        PlanError: a value that is neither "float" nor a table of choices; a choice about weights for layers without; a
            pattern that names only layers of which nothing is left.
    """
    out: dict[str, dict[str, Any]] = {}
    layers = Layers(graph)
    for pattern, choices in override_entries(overrides):
        if isinstance(choices, str) and choices == "float":
            choices = {"float": f"overrides keep '{pattern}' in float"}
        else:
            check_choices(pattern, choices)
        found = layers.find(pattern)
        if any(f.op == INPUT for f in found):
            _check_input_choices(str(pattern), choices)
        about_weights = [k for k in choices if k in OF_WEIGHTS]
        if about_weights and found and not any(has_weights(f.op) for f in found):
            hint = "name a layer with weights, or choose activation_bits, rule or method for its result"
            what = f"'{pattern}' has no weights, so that '{about_weights[0]}' has no meaning for it"
            raise PlanError(what, got=", ".join(dict.fromkeys(f"{f.op} '{f.name}'" for f in found[:8])), hint=hint)
        of_each = [(f.node, {k: v for k, v in choices.items() if f.takes(k)}) for f in found]
        for node, own in [*of_each, *for_other_readers(layers, found, choices)]:
            merged = merge_overrides(out.pop(node.name, {}), own)
            # in a group that shares one kernel, choices about weights go to the layer that has them
            out[node.name] = {k: v for k, v in merged.items() if k not in OF_WEIGHTS or has_weights(node.op)}
    return out


def for_other_readers(
    layers: Layers, found: Collection[Named], choices: Mapping[str, Any]
) -> Iterator[tuple[Node, dict[str, Any]]]:
    """Yield the other nodes that read a weight of these, with the choices that are about the weight as it is stored."""
    of_weight = {k: v for k, v in choices.items() if k in OF_WEIGHTS and k != "inputs" and v != "float"}
    weights = dict.fromkeys(f.node.operand("w") for f in found if any(map(f.takes, of_weight)))
    readers = {n.name: n for w in weights if w is not None for n in layers.readers(w) if n.operand("w") == w}
    own = {f.node.name for f in found}
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
        raise PlanError(f"Override of '{pattern}' has an unknown form", got=repr(choices)[:120], allowed=allowed)
    for k, v in choices.items():
        words, fits = CHOICES[k]
        if not fits(v):
            raise PlanError(f"Value of '{k}' for '{pattern}' is not allowed", got=repr(v)[:120], allowed=words)


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
