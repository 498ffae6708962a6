"""Group the nodes that the chip runs as one kernel, by the platform's fusion patterns."""

from collections.abc import Callable, Sequence, Set

from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import words_of
from chipfit.passes.rewriting import Readers

#: a pattern is a chain of alternatives: ({"Conv2D", "Linear"}, {"Relu"})
Pattern = tuple[frozenset[str], ...]
Fits = Callable[[Node, frozenset[str]], bool]  #: whether a node is one of the alternatives, and in no group yet


def fuse(
    graph: Graph, patterns: Sequence[Pattern], sets: Callable[[Node], Set[str]] = lambda _: frozenset()
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """Find the fused groups.

    In execution order, each node outside of groups starts the longest pattern that matches completely. Every value
    inside a group has exactly one reader and is not an output of the model. Batch norms are left out of the patterns,
    because they are folded.

    Args:
        graph: after batch-norm folding.
        patterns: chains of operator alternatives, in the platform's order.
        sets: the operator sets that a node belongs to, as patterns name them ("@relu_sets").

    Returns:
        Groups of two or more node names in execution order, and one note per refused fusion.
    """
    chains = sorted({_without_batch_norm(p) for p in patterns} - {()}, key=lambda p: (-len(p), [sorted(s) for s in p]))
    words = {n.name: {"*", *words_of(n.op, n.attrs), *sets(n)} for n in graph.nodes}
    readers, grouped = Readers(graph), set[str]()
    groups, notes = list[tuple[str, ...]](), list[str]()

    def fits(n: Node, alternatives: frozenset[str]) -> bool:
        return n.name not in grouped and not words[n.name].isdisjoint(alternatives)

    for node in graph.nodes:
        refusal = ""
        for chain in chains:
            found, why = _follow(readers, node, chain, fits)
            if len(found) == len(chain) > 1:
                groups.append(tuple(n.name for n in found))
                grouped.update(groups[-1])
                refusal = ""
                break
            refusal = refusal or why
        if refusal:
            notes.append(refusal)
    return tuple(groups), notes


def _follow(readers: Readers, start: Node, chain: Pattern, fits: Fits) -> tuple[list[Node], str]:
    """Return the nodes along `chain` from `start` as far as they match, and why a matching reader does not fuse."""
    if not fits(start, chain[0]):
        return [], ""
    found = [start]
    for alternatives in chain[1:]:
        last = found[-1]
        read_by = readers.of(last.output)
        fitting = [r for r in read_by if fits(r, alternatives)]
        if not fitting:
            return found, ""
        who = f"'{last.display_name}' and '{fitting[0].display_name}' do not fuse"
        if len(last.outputs) > 1:
            return found, f"{who}: the first has several outputs"
        if len(read_by) > 1:
            return found, f"{who}: the value between them has {len(read_by)} readers"
        if last.output in readers.graph.outputs:
            return found, f"{who}: the value between them is an output of the model"
        found.append(fitting[0])
    return found, ""


def _without_batch_norm(pattern: Pattern) -> Pattern:
    kept = tuple(s for s in pattern if not s <= {"BatchNorm"})
    return kept if len(kept) > 1 else ()
