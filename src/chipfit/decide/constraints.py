"""The platform's rules over named tensors: ties, storage types and dictated scales."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chipfit.errors import UnsupportedError
from chipfit.graph.decomposed_steps import places_in_steps
from chipfit.graph.hidden_scores import hidden_scores
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import LINEAR
from chipfit.graph.states import state_pairs
from chipfit.platform.schema import Rule

#: a scale and a zero point
FixedQParams = tuple[float, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The rules of one operator, with the names of the tensors in its slots."""

    op: str
    rules: tuple[Rule, ...]
    slots: Mapping[str, tuple[str, ...]]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def of(self, slot: str) -> tuple[str, ...]:
        """Return the tensors in a slot; in "outs" and "ins", if they are not listed, those in the single slots."""
        if slot == "outs":
            return self.slots.get("outs", self.slots.get("out", ()))
        if slot == "ins":
            return self.slots.get("ins", tuple(t for k in ("in0", "in1", "in2") for t in self.slots.get(k, ())))
        return self.slots.get(slot, ())

    @property
    def tied(self) -> list[list[str]]:
        """The tensors of each hard tie."""
        return [[t for slot in r.tie for t in self.of(slot)] for r in self.rules if r.tie and r.hard]

    @property
    def same_type(self) -> list[list[str]]:
        """The tensors of each hard `dtype` rule."""
        return [[t for slot in r.dtype for t in self.of(slot)] for r in self.rules if r.dtype and r.hard]

    @property
    def dictated(self) -> list[tuple[str, FixedQParams]]:
        """Each tensor whose scale and zero point the hardware dictates, with them."""
        rules = [(r.fix, (float(r.scale or 0), int(r.zp or 0))) for r in self.rules if r.fix and r.hard]
        return [(t, numbers) for slot, numbers in rules for t in self.of(slot)]


def hard_rules(constraints: Iterable[Constraint]) -> Iterator[tuple[Constraint, Rule]]:
    """Yield the rules that the hardware requires, each with its constraint; the others are preferences."""
    return ((c, r) for c in constraints for r in c.rules if r.hard)


def shared_bias_ties(graph: Graph, stored: Container[str]) -> list[Constraint]:
    """Return ties between the inputs of operators that read one stored bias, or are steps of one recurrent layer.

    A bias is stored in steps of input scale times weight scale, so that one copy serves inputs of one scale only. Steps
    without a bias share the one of zeros that a file format asks for.
    """
    inputs: dict[str, list[str]] = {}
    for n in graph.nodes:
        shared = n.bias or (n.weight if n.composite else None) if n.op in LINEAR else None
        shared = n.operand("b") if n.op == "LSTM" else shared
        if shared is not None and shared in stored and n.data in stored:
            inputs.setdefault(shared, []).append(n.data)
    rule = (Rule(tie=("ins",)),)
    groups = (tuple(dict.fromkeys(names)) for names in inputs.values())
    return [Constraint(op="Linear", rules=rule, slots={"ins": names}) for names in groups if len(names) > 1]


def state_ties(graph: Graph, stored: Container[str]) -> list[Constraint]:
    """Return ties between states of a network of one step and their next values, which become the states."""
    rule = (Rule(tie=("ins",)),)
    pairs = [pair for pair in state_pairs(graph) if pair[0] in stored and pair[1] in stored]
    return [Constraint(op="State", rules=rule, slots={"ins": pair}) for pair in pairs]


def result_ties(graph: Graph, stored: Container[str]) -> list[Constraint]:
    """Return ties between the states after all steps of a recurrent layer and that after the last one, one of them."""
    rule = (Rule(tie=("ins",)),)
    pairs = [n.outputs[:2] for n in graph.nodes if n.op == "LSTM" and len(n.outputs) == 3]
    pairs = [pair for pair in pairs if pair[0] in stored and pair[1] in stored]
    return [Constraint(op="LSTM", rules=rule, slots={"ins": pair}) for pair in pairs]


def step_ties(graph: Graph, stored: Container[str]) -> list[Constraint]:
    """Return ties between what the steps of one recurrent layer read and write: all of them compute alike."""
    alike: dict[Any, list[Node]] = {}
    for n, layer, step, place in places_in_steps(graph):
        if step >= 0:
            alike.setdefault((layer, place), []).append(n)
    sets = (names for nodes in alike.values() for names in zip(*((*n.inputs, *n.outputs) for n in nodes), strict=True))
    groups = (tuple(dict.fromkeys(t for t in names if t in stored and t in graph.values)) for names in sets)
    return [Constraint(op="Step", rules=(Rule(tie=("ins",)),), slots={"ins": g}) for g in groups if len(g) > 1]


def tie_groups(constraints: Iterable[Constraint]) -> tuple[tuple[str, ...], ...]:
    """Return the tensors that must share scale and zero point, over all hard ties; groups of two or more, sorted."""
    return tuple(g for g in connected_components(m for c in constraints for m in c.tied) if len(g) > 1)


def connected_components(lists: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the unions of lists that have members in common, each sorted, in sorted order."""
    parent: dict[str, str] = {}

    def find(t: str) -> str:
        parent.setdefault(t, t)
        while parent[t] != t:
            parent[t] = parent[parent[t]]
            t = parent[t]
        return t

    for members in lists:
        for t in members:
            parent[find(t)] = find(members[0])
    groups: dict[str, list[str]] = {}
    for t in parent:
        groups.setdefault(find(t), []).append(t)
    return tuple(sorted(tuple(sorted(g)) for g in groups.values()))


def copies(graph: Graph, *groups: Collection[str]) -> set[str]:
    """Return the tied tensors that only hold numbers of other members of their tie, whose range they have."""
    tie = {t: k for k, group in enumerate(groups) for t in group}
    found = set[str]()
    for n in graph.nodes:
        if n.facts.moves:
            data = {tie.get(i) for i in n.inputs if i is not None and graph.is_float(i)}
            found |= {o for o in n.outputs if o in tie and data <= {tie[o]}}
    return found


def bounded(graph: Graph, groups: Iterable[Collection[str]]) -> set[str]:
    """Return the tensors of ties that are only read by Max and Min with a constant, such constants, and hidden scores.

    A tie's grid need only cover the results: numbers beyond them saturate at its ends, which changes no result.
    """
    fills = {fill for h in hidden_scores(graph) for fill in h.fills}
    tie = {t: k for k, group in enumerate(groups) for t in group}
    limits = [n for n in graph.nodes if n.op in ("Max", "Min") and any(graph.is_weight(i) for i in n.inputs if i)]
    limits = [n for n in limits if n.output in tie and all(tie.get(i or "") == tie[n.output] for i in n.inputs)]
    users = graph.users() if limits else {}
    read = {i for n in limits for i in n.inputs if i is not None}
    return fills | {i for i in read if i not in graph.outputs and all(n in limits for n in users[i])}


def dictated_qparams(constraints: Sequence[Constraint]) -> dict[str, FixedQParams]:
    """Return tensor -> the scale and zero point that the hardware dictates for it or for a tensor tied to it.

    Raises:
        UnsupportedError: two operators dictate different values for one tensor, or for tensors that must share theirs.
    """
    out: dict[str, FixedQParams] = {}
    by: dict[str, str] = {}
    for c in constraints:
        for t, numbers in c.dictated:
            if out.setdefault(t, numbers) != numbers:
                raise _two_values(f"Tensor '{t}' is", f"{out[t]} by {by[t]} and {numbers} by {c.op}")
            by.setdefault(t, c.op)
    for group in tie_groups(constraints) if out else ():
        given = {out[t]: t for t in group if t in out}
        if len(given) > 1:
            each = " and ".join(f"{numbers} for '{t}' by {by[t]}" for numbers, t in given.items())
            raise _two_values("Tensors that must share one scale are", each)
        for numbers in given:
            out.update(dict.fromkeys(group, numbers))
    return out


def _two_values(what: str, got: str) -> UnsupportedError:
    hint = "keep the operator that joins them in float with overrides"
    return UnsupportedError(f"{what} fixed to two different (scale, zero point)", got=got, hint=hint)
