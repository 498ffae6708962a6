"""Graph rewrites: one a file, each a function `Graph -> (Graph, notes)`.

A note is one line that says what was rewritten, or what was refused and why; notes end up in `Plan.rewrites`.
The graph is checked after every pass, so a broken graph is blamed on the pass that broke it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chipfit.graph.check import check
from chipfit.graph.ir import Graph

Pass = Callable[[Graph], tuple[Graph, list[str]]]


def run_passes(graph: Graph, passes: Sequence[Pass]) -> tuple[Graph, list[str]]:
    """Apply `passes` in order.

    Returns:
        The rewritten graph and every pass's notes.

    Raises:
        GraphError: naming the pass that left the graph inconsistent.
    """
    notes: list[str] = []
    for p in passes:
        graph, said = p(graph)
        check(graph, blame=p.__name__)
        notes += said
    return graph, notes
