"""Remember the nodes that rewrites take out of a graph, so that the user's names of them still name something."""

from collections.abc import Mapping
from dataclasses import replace

from chipfit.graph.ir import Graph, Node, Removed


def remember_removed(before: Graph, after: Graph) -> Graph:
    """Return a rewritten graph that knows what stands for the nodes that it lacks, and for those that `before` lacked.

    That is the node that makes their result now, else the one that reads it, or what stands for that one.
    """
    now = {n.composite: n for n in after.nodes if n.composite} | {n.name: n for n in after.nodes}
    then, by = {n.name: n for n in before.nodes}, _successors(before, after, now)

    def record(n: Node, name: str) -> Removed:
        part = n.composite == name or (name in now and (name not in then or then[name].op != now[name].op))
        return Removed(n.with_(inputs=(), attrs={}), name, joined=bool(name) and part, same=n.output in after.values)

    removed = {n.name: record(n, by[n.name]) for n in before.nodes if n.name not in now}
    for name, r in before.removed.items():
        known = r.by in now or r.by not in by
        removed[name] = r if known else replace(record(r.node, by[r.by]), joined=r.joined and removed[r.by].joined)
    return replace(after, removed={name: r for name, r in removed.items() if name not in now})


def remember_layers_without_nodes(graph: Graph, layers: Mapping[str, str]) -> None:
    """Let a graph know the layers that compute nothing, such as identities.

    Args:
        layers: path of each layer of the model -> its class.
    """
    paths = graph.layer_paths()
    for path, kind in layers.items():
        if path and path not in paths:
            graph.removed[path] = Removed(Node(path, kind, (), (), {}, path, kind), "", joined=False, same=False)


def remember_aliases(graph: Graph, values: Mapping[str, tuple[str, str]], before: Graph) -> None:
    """Let further names stand for nodes, or for what stands for these.

    Args:
        values: the other name of a node -> the other name of its result, and the result in `before`.
        before: the graph, before a rewrite that it remembers.
    """
    makers, nodes = before.producers(), {n.name: n for n in graph.nodes}
    known = {*nodes, *(n.layer for n in graph.nodes)}
    for name, (result, value) in values.items():
        n = makers.get(value)
        r = graph.removed.get(n.name) if n is not None else None
        if n is not None and name not in known and (n.name in nodes or r is not None):
            alias = n.with_(name=name, inputs=(), attrs={}, outputs=(result,), layer="")
            r = r or Removed(n, n.name, joined=True, same=n.output == value)
            graph.removed[name] = replace(r, node=alias)


def _successors(before: Graph, after: Graph, now: dict[str, Node]) -> dict[str, str]:
    """Return what stands in a rewritten graph for each node of the graph before: a node, a composite, or "" for none.

    Args:
        now: the nodes of the rewritten graph, and its composites.
    """
    makers, readers = after.producers(), before.users()
    ends, by, computes = dict(zip(before.outputs, after.outputs, strict=False)), dict[str, str](), dict[str, str]()
    for n in reversed(before.nodes):
        own = next((name for name in (n.name, n.composite) if name in now), "")
        made = (makers.get(x) for o in n.outputs for x in (o, ends.get(o)) if x is not None)
        behind = next(filter(None, (computes[r.name] for o in n.outputs for r in readers.get(o, ()))), "")
        by[n.name] = own or next((m.name for m in made if m is not None), "") or behind
        computes[n.name] = behind or own if own and n.facts.moves else by[n.name]  # what moves numbers changes none
    return by
