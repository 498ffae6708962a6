"""Find the float values that must not be quantized: indices, masks, compared values, and divisors near zero."""

import math
from collections.abc import Collection, Container, Iterable, Mapping

from chipfit.graph.extremes import is_finite
from chipfit.graph.hidden_scores import ALWAYS_HIDES, HIDES_IN_SOFTMAX, HiddenScores
from chipfit.graph.ir import Graph, Node

#: uses of a value, by how much rounding it matters. An index is wrong when it changes at all. A compared value may be
#: rounded where the network computed it, not where it is an input or a constant
_EXACT, _COMPARED, _REAL = range(3)
#: largest ratio between two numbers of a divisor at which no number of it is rounded to 0 on an 8-bit grid
_GREATEST_RATIO = 510.0
#: largest number whose only purpose as an addend or bound is to prevent a division by 0
_GUARD = 1e-2
#: operators allowed between a mask and an operator that it does not affect, besides ones that only move values
_BETWEEN = ("Add", "Sub", "Mul", "Div", "Clamp", "Cast")

EXACT_WHY = "it is only read as an index, a mask or a shape, compared, or cast to integers"
WHOLE_WHY = "beside its use as a number it is given as an index or cast to integers, where no rounding may move it"
INFINITE_WHY = "an infinite constant is in it, which no grid holds"
MASKED_WHY = "a mask of extreme range is in it, which would set its grid"
DIVISOR_WHY = "it divides, and a grid that holds its largest number has 0 for its smallest"
EXPONENT_WHY = "it is an exponent: near a whole number, but not at it, powers of negative numbers do not exist"
GUARD_WHY = "it is kept away from 0, which is a code of every grid"


def float_only_values(graph: Graph, hidden: Iterable[HiddenScores] = ()) -> dict[str, str]:
    """Return the float values that must not be quantized, with the reason; all others may be.

    Args:
        hidden: scores whose grid need not hold the numbers that hide some.
    """
    given, producers, hidden = _without_features(graph), graph.producers(), list(hidden)
    masked, masks = _masks(graph, given, producers, {n.name for h in hidden for n in h.selections})
    use = dict.fromkeys(graph.outputs, _REAL)
    in_integers = set[str]()  # values that determine an index or a cast to integers
    for n in reversed(graph.nodes):
        result_use = max((use.get(o, _EXACT) for o in n.outputs), default=_EXACT)
        for slot, i in graph.slots(n):
            use_here = _EXACT if (n.name, i) in masks else _use(graph, n, slot, result_use)
            use[i] = max(use.get(i, _EXACT), use_here)
            moved_to_integers = not _computes(n) and any(o in in_integers and graph.is_float(o) for o in n.outputs)
            if slot == "index" or _to_integers(n) or moved_to_integers:
                in_integers.add(i)
    real = {v: use[v] > (_COMPARED if v in given else _EXACT) for v in graph.values if v in use and graph.is_float(v)}
    whole = given & in_integers
    exact = {v: WHOLE_WHY if is_real else EXACT_WHY for v, is_real in real.items() if not is_real or v in whole}
    infinite = dict.fromkeys(_infinite(graph, {v for h in hidden for v in (*h.values, *h.fills)}), INFINITE_WHY)
    return infinite | exact | masked | _guarded(graph, producers) | _wide_divisors(graph) | _exponents(graph)


def _infinite(graph: Graph, saturating: Collection[str]) -> set[str]:
    """Return constants that hold infinity, and values that hold it because of them.

    Bounds of Max and Min are not among them: on a grid they saturate at its ends, and bound nothing.
    """
    users = graph.users()
    found = {w for w, x in graph.weights.items() if not is_finite(x) and bool(x.isinf().any())} - {*saturating}
    found = {w for w in found if any(n.op not in ("Max", "Min") for n in users.get(w, ()))}
    for n in graph.nodes:
        # a softmax without bounds is the logarithm of one, which is infinite where a share is 0
        passes = n.facts.moves or n.facts.homogeneous or n.facts.ieee or (n.facts.softmax and not n.facts.bounded)
        selects = n.facts.extreme or n.op in ("Max", "Min") or n.facts.kind == "pool" or n.clip_range is not None
        if (n.op == "Pad" and math.isinf(n.attrs["value"] or 0)) or (
            passes and not selects and any(i in found for i in n.inputs)
        ):
            found |= {o for o in n.outputs if graph.is_float(o)} - {*saturating}
    return found


def _exponents(graph: Graph) -> dict[str, str]:
    """Return the constant exponents: a grid holds most of them only nearly."""
    exponents = (n.inputs[1] for n in graph if n.facts.exponent)
    return {v: EXPONENT_WHY for v in exponents if v in graph.weights and graph.is_float(v)}


def _wide_divisors(graph: Graph) -> dict[str, str]:
    """Return constant divisors without 0 of which an 8-bit grid would round a number to 0."""
    divisors = [i for n in graph if n.op == "Div" and (i := n.inputs[1]) in graph.weights]
    sizes = {v: graph.weights[v].abs() for v in divisors if graph.is_float(v)}
    return {v: DIVISOR_WHY for v, w in sizes.items() if 0 < float(w.min()) < float(w.max()) / _GREATEST_RATIO}


def _guarded(graph: Graph, producers: Mapping[str, Node]) -> dict[str, str]:
    """Return divisors, and operands of roots and logarithms, that a small bound or addend keeps away from 0.

    They are intermediate values of a norm: a grid would round the bound to 0.
    """
    out: dict[str, str] = {}
    for n in graph.nodes:
        if not n.facts.pole or n.composite:  # its statistics decide about a composite
            continue
        way, v = list[str](), n.inputs[-1] or ""
        while v in producers:
            node = producers[v]
            way.append(v)
            if node.op in ("Clamp", "Add", "Max"):
                bounds = [graph.weights[i] for i in node.inputs if i in graph.weights]
                least = node.attrs["min"] if node.op == "Clamp" else max((float(b.max()) for b in bounds), default=None)
                if least is not None and 0 < least <= _GUARD:
                    out |= dict.fromkeys(way, GUARD_WHY)
                break
            if node.op not in ("Sqrt", "Expand", "Reshape", "Unsqueeze", "Transpose"):
                break
            v = node.data
    return out


def _use(graph: Graph, n: Node, slot: str, result_use: int) -> int:
    """Return how a node uses the value in `slot`, if its own results are used as `result_use`."""
    if n.op == "Size" or slot in ("index", "mask"):
        return _EXACT
    if _computes(n) or (n.facts.extreme and not n.facts.moves):
        return _REAL
    if any(graph.is_float(o) for o in n.outputs):
        return result_use
    return _EXACT if _to_integers(n) else _COMPARED


def _to_integers(n: Node) -> bool:
    return n.op == "Cast" and n.attrs["dtype"].startswith(("int", "uint"))


def _computes(n: Node) -> bool:
    """Check whether a node computes features: sums of products, or a norm."""
    return n.op in ("MatMul", "SDPA") or n.facts.weighted


def _without_features(graph: Graph) -> set[str]:
    """Return inputs, constants, and values that follow from them without a layer that computes features."""
    out = {*graph.inputs, *graph.weights}
    for n in graph.nodes:
        if not _computes(n) and all(i in out for i in n.inputs if i is not None):
            out.update(n.outputs)
    return out


def _masks(
    graph: Graph, given: set[str], producers: Mapping[str, Node], saturating: Container[str]
) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Find masks that are added to scores or replace them.

    Args:
        saturating: names of selections whose masks saturate.

    Returns:
        Values that hold masked scores, with the reason; (node, operand) pairs whose operand is a mask.
    """
    found: dict[str, str] = {}
    operands: set[tuple[str, str]] = set()

    def is_mask(value: str, bound: float) -> bool:
        """Check for a constant beyond the bound, or, in front of a softmax, a value that follows from inputs alone."""
        w = graph.weights.get(value)
        if w is None:
            return value in given and bound == HIDES_IN_SOFTMAX
        return w.is_floating_point() and not bool((w.abs() < -bound).all())

    def masked(value: str, bound: float) -> bool:
        """Check whether a value holds masked scores; record it, and all values between the mask and it."""
        n = producers.get(value)
        if n is None or not (n.op in _BETWEEN or n.facts.moves) or not graph.is_float(value):
            return False
        data = [i for slot, i in graph.slots(n) if slot.startswith("in") and slot != "index"]
        scores = [i for i in data if i not in given]
        adds = n.op in ("Add", "Sub", "Where", "Max", "Min") and scores and n.name not in saturating
        here = [i for i in data if adds and is_mask(i, bound)]
        operands.update((n.name, i) for i in here)
        before = [masked(i, bound) for i in scores]  # each is recorded
        if here or any(before):
            found[value] = MASKED_WHY
        return value in found

    for n in graph.nodes:
        if n.facts.softmax or n.facts.extreme or (n.facts.moves and n.facts.layout == "spatial"):
            masked(n.data, HIDES_IN_SOFTMAX if n.facts.softmax else ALWAYS_HIDES)
    return found, operands
