"""Running a graph: what is freed, what is kept, and what may be overwritten."""

from __future__ import annotations

import torch

from chipfit.engine.run import done_after, run
from chipfit.graph.ir import Graph, Node, Value


def graph(*rows: tuple[str, str, str], output: str) -> Graph:
    """Rows of (operator, operands, result) over the input "x", [3]."""
    attrs = {"Split": {"axis": 0, "sizes": (1, 2)}, "Reshape": {"shape": (3, 1)}}
    nodes = [Node(r.split()[0], op, tuple(i.split()), tuple(r.split()), attrs.get(op, {})) for op, i, r in rows]
    values = {name: Value(name, (3,)) for name in ("x", *(o for n in nodes for o in n.outputs))}
    return Graph(nodes, ["x"], [output], values, {"w": torch.ones(3)})


def test_a_name_is_done_after_its_last_reader_or_at_once_where_nothing_reads_it():
    g = graph(("Split", "x", "a rest"), ("Add", "x w", "b"), ("Mul", "b w", "c"), output="c")
    assert [sorted(d) for d in done_after(g)] == [["a", "rest"], ["x"], ["b", "w"]]


def test_outputs_and_kept_values_come_back():
    g = graph(("Neg", "x", "a"), ("Relu", "a", "b"), output="b")
    out = run(g, [torch.tensor([-1.0, 0.0, 2.0])], keep=["a", "w"])
    assert {k: v.tolist() for k, v in out.items()} == {"a": [1, 0, -2], "b": [1, 0, 0], "w": [1, 1, 1]}


def overwritten(g: Graph, *, keep: tuple[str, ...] = ()) -> bool:
    """Whether the value "a" is written over when memory is reused; the result is the same in any case."""
    x, seen = torch.tensor([-1.0, 0.0, 2.0]), {}
    want = run(g, [x])

    def hook(node, results):
        seen.setdefault(node.name, (results[0], results[0].clone()))
        return results

    got = run(g, [x], keep=keep, reuse=True, hook=hook)
    assert all(torch.equal(got[o], want[o]) for o in g.outputs)
    assert x.tolist() == [-1, 0, 2]
    before = seen["a"]
    return not torch.equal(*before)


def test_an_activation_overwrites_a_sum_that_nothing_else_reads():
    assert overwritten(graph(("Add", "x w", "y"), ("Neg", "y", "a"), ("Relu", "a", "b"), output="b"))


def test_what_is_read_again_kept_or_returned_is_not_overwritten():
    g = graph(("Neg", "x", "a"), ("Relu", "a", "b"), ("Add", "b a", "c"), output="c")
    assert not overwritten(g)
    assert not overwritten(graph(("Neg", "x", "a"), ("Relu", "a", "b"), output="b"), keep=("a",))
    assert not overwritten(graph(("Neg", "x", "a"), ("Relu", "a", "b"), output="a"))


def test_what_shares_memory_with_another_value_is_not_overwritten():
    g = graph(("Neg", "x", "a"), ("Reshape", "a", "view"), ("Relu", "a", "b"), ("Add", "b w", "c"), output="c")
    assert not overwritten(g)
    g = graph(("Reshape", "x", "a"), ("Relu", "a", "b"), output="b")
    assert not overwritten(g)


def test_an_operand_that_is_read_twice_is_not_overwritten():
    assert not overwritten(graph(("Neg", "x", "a"), ("Add", "a a", "b"), output="b"))
