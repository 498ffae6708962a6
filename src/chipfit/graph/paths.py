"""From a value to the linear operators that read it, through operators that a rewrite may cross."""

from collections.abc import Callable
from dataclasses import dataclass, field

from chipfit.graph.ir import Graph, Node, Users
from chipfit.graph.linear import is_linear
from chipfit.graph.ops import OPS


@dataclass(slots=True)
class Paths:
    """Everything between one value and the linear operators behind it."""

    crossed: list[Node] = field(default_factory=list)  #: operators on the way, in execution order
    ends: list[Node] = field(default_factory=list)  #: the linear operators, in execution order
    refused: str = ""  #: why some path does not end in a linear operator


def paths(graph: Graph, users: Users, value: str, crossable: Callable[[Node], bool]) -> Paths:
    """Follow every reader of `value` to a linear operator.

    Args:
        crossable: whether the rewrite may pass through an operator of one data input.
    """
    out, todo = Paths(), [value]
    while todo:
        v = todo.pop()
        if v in graph.outputs:
            out.refused = f"'{v}' is an output of the model"
        for n in users.get(v, ()):
            if is_linear(graph, n) and n.inputs[0] == v:
                out.ends.append(n)
            elif crossable(n) and graph.activations(n) == [v]:
                out.crossed.append(n)
                todo += n.outputs
            else:
                out.refused = f"{n.op} '{n.who}' reads it"
    order = {n.name: k for k, n in enumerate(graph.nodes)}
    out.crossed.sort(key=lambda n: order[n.name])
    out.ends.sort(key=lambda n: order[n.name])
    if not out.ends and not out.refused:
        out.refused = "nothing reads it"
    return out


def only_reader(graph: Graph, users: Users, value: str) -> Node | None:
    """The one node that reads `value`, once; None when there are several, or when the model returns it."""
    readers = users.get(value, [])
    return readers[0] if len(readers) == 1 and value not in graph.outputs else None


def scaled_by_channel(node: Node) -> bool:
    """f(s x) = s f(x) holds with one s > 0 for each channel on axis 1."""
    if node.op == "Pad":
        return node.attrs["value"] == 0 and tuple(node.attrs["padding"][1]) == (0, 0)
    return node.op in OPS and OPS[node.op].homogeneous and OPS[node.op].by_channel


def adds_alike(graph: Graph, node: Node) -> bool:
    """A sum of activations of one shape."""
    data = graph.activations(node)
    return node.op == "Add" and len(data) == 2 and graph.shape(data[0]) == graph.shape(data[1])
