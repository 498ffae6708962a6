"""Fusion: longest complete pattern first, no node twice, nothing across a branch or an output."""

import pytest

from chipfit.graph.ir import Graph
from chipfit.passes.fuse import fuse
from tests.build import graph_of

CONV, RELU, ADD, TANH, NORM = (frozenset({op}) for op in ("Conv2D", "Relu", "Add", "Tanh", "BatchNorm"))
ACTS = frozenset({"Tanh", "Relu"})
C, R = "c Conv2D x", "r Relu c"


def net(*rows: str, outputs: tuple[str, ...] = ()) -> Graph:
    """Return a graph from "name operator inputs"; a value has the name of its node."""
    parts = [row.split() for row in rows]
    texts = [f"{name} = {op}({', '.join([*ins, *['w'] * (op == 'Conv2D')])})" for name, op, *ins in parts]
    return graph_of(*texts, weights="w", outputs=outputs or None)


@pytest.mark.parametrize(
    "rows, patterns, groups",
    [
        (["b Conv2D x", "c Conv2D b", R], [(CONV, RELU)], [("c", "r")]),  # the convolution next to the ReLU
        ([C, R, "d Conv2D r", "t Tanh d"], [(CONV, ACTS)], [("c", "r"), ("d", "t")]),
        ([C, R, "d Conv2D r", "t Tanh d"], [(CONV, RELU)], [("c", "r")]),
        ([C, R, "a Add r x", "t Tanh a"], [(CONV, RELU), (CONV, RELU, ADD, NORM, RELU)], [("c", "r")]),
        (
            [C, R, "a Add r x", "t Tanh a"],
            [(CONV, RELU), (CONV, RELU, ADD, RELU), (CONV, RELU, ADD)],
            [("c", "r", "a")],
        ),
        ([C, R, "q Relu r"], [(CONV, RELU), (RELU, RELU)], [("c", "r")]),  # a node belongs to one group
        ([C, "d Conv2D x", "a Add c d"], [(CONV, ADD)], [("c", "a")]),
        ([C, R, "a Add r r"], [(CONV, RELU)], [("c", "r")]),  # the last of a group may have several readers
        ([C, R], [(CONV, NORM, RELU)], [("c", "r")]),  # a folded batch norm leaves the pattern
        ([C, R], [(CONV,), (RELU,), (CONV, NORM), (NORM,), ()], []),  # one operator is no fusion
        ([C, R], [(CONV, NORM | RELU)], [("c", "r")]),  # one of both is still there
        ([C, R], [(CONV, frozenset({"*"}))], [("c", "r")]),
        ([C, R, "t Tanh r"], [(frozenset({"*"}), TANH)], [("r", "t")]),
    ],
)
def test_the_longest_complete_pattern_is_fused_and_no_node_twice(rows, patterns, groups):
    assert list(fuse(net(*rows), patterns)[0]) == groups


TWO_READERS = "'{}' and '{}' do not fuse: the value between them has 2 readers".format


@pytest.mark.parametrize(
    "rows, patterns, groups, notes",
    [
        ([C, R, "a Add r c"], [(CONV, RELU)], (), [TWO_READERS("c", "r")]),
        ([C, R, "a Add r x", "t Tanh r"], [(CONV, RELU), (CONV, RELU, ADD)], (("c", "r"),), []),  # a shorter one
        ([C, R, "a Add r x", "t Tanh r"], [(CONV, RELU, ADD)], (), [TWO_READERS("r", "a")]),
        (  # one note for an operator of the longest pattern that was refused
            [C, R, "a Add r c", "t Tanh a"],
            [(CONV, ADD), (CONV, RELU, ADD), (RELU, ADD, TANH), (ADD, TANH)],
            (("r", "a", "t"),),
            [TWO_READERS("c", "r")],
        ),
    ],
)
def test_a_value_with_two_readers_does_not_fuse_and_the_note_says_so(rows, patterns, groups, notes):
    assert fuse(net(*rows), patterns) == (groups, notes)


def test_nothing_fuses_across_an_output_of_the_model():
    found, notes = fuse(net(C, R, outputs=("c", "r")), [(CONV, RELU)])
    assert found == () and "output of the model" in notes[0]


@pytest.mark.parametrize("word", ["Clamp", "HardTanh", "ReluN1To1"])
def test_a_platforms_own_word_for_an_operator_is_understood(word):
    graph = net(C, "k Clamp c")
    graph.nodes[1] = graph.nodes[1].with_(attrs={"min": -1.0, "max": 1.0})
    assert fuse(graph, [(CONV, frozenset({word}))])[0] == (("c", "k"),)


def test_an_operator_with_several_results_ends_a_group_and_the_note_says_so():
    graph, pattern = net("s Split x", "r Relu s"), (frozenset({"Split"}), RELU)
    assert fuse(graph, [pattern])[0] == (("s", "r"),)
    graph.nodes[0] = graph.nodes[0].with_(outputs=("s", "rest"))
    assert fuse(graph, [pattern]) == ((), ["'s' and 'r' do not fuse: the first has several outputs"])


def test_layers_are_named_as_the_user_knows_them():
    graph = net(C, R, "a Add c x")
    graph.nodes[:2] = [graph.nodes[0].with_(layer="net.conv"), graph.nodes[1].with_(layer="net.act")]
    assert fuse(graph, [(CONV, RELU)])[1] == [TWO_READERS("net.conv", "net.act")]


def test_patterns_name_sets_of_operators():
    graph, pattern = net(C, R), (frozenset({"@layers"}), frozenset({"@acts"}))
    sets = {"r": {"@acts"}, "c": {"@layers"}}
    assert fuse(graph, [pattern], lambda n: sets.get(n.name, set()))[0] == (("c", "r"),)
    assert fuse(graph, [pattern]) == ((), [])
