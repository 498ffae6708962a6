"""Running a graph: what is freed, what is kept, and what may be overwritten."""

import pytest
import torch

from chipfit.engine.run import done_after, first_deviation, run
from chipfit.graph.ir import Graph, Node
from tests.build import graph_of


def graph(*rows: tuple[str, str, str], output: str) -> Graph:
    """Rows of (operator, operands, result) over the input "x", [3]."""
    attrs = {"Split": {"axis": 0, "sizes": (1, 2)}, "Reshape": {"shape": (3, 1)}}
    nodes = [Node(r.split()[0], op, tuple(i.split()), tuple(r.split()), attrs.get(op, {})) for op, i, r in rows]
    return graph_of(*nodes, inputs=["x"], outputs=[output], shape=(3,), weights={"w": torch.ones(3)})


def test_a_name_is_done_after_its_last_reader_or_at_once_where_nothing_reads_it():
    g = graph(("Split", "x", "a rest"), ("Add", "x w", "b"), ("Mul", "b w", "c"), output="c")
    assert [sorted(d) for d in done_after(g)] == [["a", "rest"], ["x"], ["b", "w"]]


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


NEG = ("Neg", "x", "a")


@pytest.mark.parametrize(
    "rows, keep, written",
    [
        ([("Add", "x w", "y"), ("Neg", "y", "a"), ("Relu", "a", "b")], (), True),
        ([NEG, ("Relu", "a", "b"), ("Add", "b a", "c")], (), False),  # read again
        ([NEG, ("Relu", "a", "b")], ("a",), False),
        ([NEG, ("Reshape", "a", "view"), ("Relu", "a", "b"), ("Add", "b w", "c")], (), False),  # shares its memory
        ([("Reshape", "x", "a"), ("Relu", "a", "b")], (), False),
        ([NEG, ("Add", "a a", "b")], (), False),  # read twice
    ],
)
def test_what_nothing_else_reads_keeps_or_sees_is_overwritten(rows, keep, written):
    assert overwritten(graph(*rows, output=rows[-1][2]), keep=keep) is written


def test_weights_and_results_may_be_replaced():
    g = graph(("Add", "x w", "a"), ("Neg", "a", "b"), output="b")
    x = torch.tensor([1.0, 2.0, 3.0])
    assert run(g, [x], weights={"w": torch.full((3,), 10.0)})["b"].tolist() == [-11, -12, -13]
    assert run(g, [x], hook=lambda n, y: (y[0] * 2,))["b"].tolist() == [-8, -12, -16]


def test_a_sum_of_unlike_operands_is_not_written_over_the_first():
    g = graph(("Neg", "x", "a"), ("Add", "a w", "b"), output="b")
    x = torch.tensor([1.0, 2.0, 3.0])
    for w in (torch.ones(3), torch.ones(2, 3), torch.ones(3, dtype=torch.float64), torch.ones(1)):
        g.weights["w"] = w
        got, want = run(g, [x], reuse=True)["b"], run(g, [x])["b"]
        assert torch.equal(got, want) and got.dtype == want.dtype
    g.weights["w"] = torch.ones(3)
    assert overwritten(g)


def test_a_clipped_activation_overwrites_its_operand():
    g = graph(("Add", "x w", "a"), ("Relu6", "a", "b"), output="b")
    x = torch.tensor([-3.0, 4.0, 7.0])
    kept = {}
    got = run(g, [x], reuse=True, hook=lambda n, y: kept.setdefault(n.name, y))
    assert got["b"].tolist() == [0, 5, 6] and kept["a"][0] is kept["b"][0]


def test_a_part_of_what_the_caller_gave_is_not_overwritten():
    g = graph(("Split", "x", "a rest"), ("Relu", "a", "b"), output="b")
    x = torch.tensor([-1.0, -2.0, 3.0])
    assert run(g, [x], reuse=True)["b"].tolist() == [0] and x.tolist() == [-1, -2, 3]


@pytest.mark.parametrize("off, found", [(0.0, None), (0.9e-3, None), (1.1e-3, 1.1e-3 * 8), (-1.1e-3, 1.1e-3 * 8)])
def test_an_output_departs_beyond_a_thousandth_of_the_largest(off, found):
    g = graph(("Neg", "x", "a"), output="a")
    want = torch.tensor([-1.0, 4.0, -8.0])
    got = first_deviation(g, [-want], [want + torch.tensor([8 * off, 0.0, 0.0])])
    assert got is None if found is None else got == ("a", pytest.approx(found, rel=1e-3))
    small = torch.tensor([0.0, 1e-5, 0.0])  # near zero a millionth is tolerated
    assert first_deviation(g, [-small], [small + 0.9e-6]) is None
    assert first_deviation(g, [-small], [small + 1.1e-6]) == ("a", pytest.approx(1.1e-6, rel=1e-2))


def test_other_shapes_and_errors_depart_and_what_is_not_finite_does_not():
    g = graph(("Neg", "x", "a"), output="a")
    x = torch.tensor([1.0, 2.0, 3.0])
    assert first_deviation(g, [x], [torch.zeros(3, 1)]) == ("a", [3])
    name, why = first_deviation(graph(("Add", "x w", "a"), output="a"), [torch.zeros(4)], [x])
    assert name == "a" and "must match" in why
    for want in (torch.tensor([float("nan"), 0, 0]), torch.tensor([float("inf"), 0, 0])):
        assert first_deviation(g, [x], [want]) is None
    assert first_deviation(g, [torch.tensor([float("nan"), 2.0, 3.0])], [-x]) is not None
    assert first_deviation(g, [torch.zeros(0)], [torch.zeros(0)]) is None


def test_of_several_outputs_the_first_that_departs_is_named():
    g = graph(("Neg", "x", "a"), ("Neg", "a", "b"), output="a")
    g.outputs = ["a", "b", "w"]
    x = torch.tensor([1.0, 2.0, 3.0])
    assert first_deviation(g, [x], [-x, x, torch.ones(3)]) is None
    assert first_deviation(g, [x], [-x, x + 1, torch.zeros(3)]) == ("b", 1.0)
    assert first_deviation(g, [x], [-x, x, torch.zeros(3)]) == ("w", 1.0)


def test_a_hook_may_give_fewer_results_than_there_are_and_keep_what_nothing_reads():
    g = graph(("Split", "x", "a rest"), ("Neg", "a", "b"), output="b")
    x = torch.tensor([1.0, 2.0, 3.0])
    assert run(g, [x], keep=["rest", "x"])["rest"].tolist() == [2, 3]
    assert run(g, [x], hook=lambda n, y: y[:1])["b"].tolist() == [-1]


def test_outputs_may_be_inputs_weights_and_named_twice():
    g = graph(("Neg", "x", "a"), output="a")
    g.outputs = ["x", "a", "w", "a"]
    out = run(g, [torch.tensor([1.0, 2.0, 3.0])], reuse=True)
    assert {k: v.tolist() for k, v in out.items()} == {"x": [1, 2, 3], "a": [-1, -2, -3], "w": [1, 1, 1]}
    assert run(g, [torch.zeros(3)], weights={"w": torch.full((3,), 5.0)})["w"].tolist() == [5, 5, 5]
