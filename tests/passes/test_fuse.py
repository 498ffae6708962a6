"""Fusion: longest complete pattern first, no node twice, nothing across a branch or an output."""

from __future__ import annotations

import pytest

from chipfit.graph.ir import Graph
from chipfit.passes.fuse import fuse
from tests.build import graph_of

CONV, RELU, ADD = frozenset({"Conv2D"}), frozenset({"Relu"}), frozenset({"Add"})


def net(*rows: tuple[str, str, str], outputs: tuple[str, ...] = ()) -> Graph:
    """Return a graph from (name, operator, space-separated inputs); a value has the name of its node."""
    texts = [f"{name} = {op}({', '.join([*ins.split(), *['w'] * (op == 'Conv2D')])})" for name, op, ins in rows]
    return graph_of(*texts, weights="w", outputs=outputs or None)


def groups(graph: Graph, *patterns: tuple[frozenset[str], ...]) -> list[tuple[str, ...]]:
    return list(fuse(graph, patterns)[0])


def test_only_the_convolution_next_to_the_relu_fuses():
    graph = net(("c1", "Conv2D", "x"), ("c2", "Conv2D", "c1"), ("r", "Relu", "c2"))
    assert groups(graph, (CONV, RELU)) == [("c2", "r")]


def test_a_pattern_with_alternatives_matches_each_of_them():
    acts = ("Tanh", "Relu", "Sigmoid", "Swish")
    rows, last = [("c0", "Conv2D", "x")], "c0"
    for i, act in enumerate(acts, 1):
        rows += [(f"c{i}", "Conv2D", last), (f"a{i}", act, f"c{i}")]
        last = f"a{i}"
    assert groups(net(*rows), (CONV, frozenset(acts))) == [(f"c{i}", f"a{i}") for i in (1, 2, 3, 4)]
    assert groups(net(*rows), (CONV, RELU)) == [("c2", "a2")]


def test_a_shorter_complete_pattern_is_taken_when_the_longer_one_breaks_off():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), ("a", "Add", "r x"), ("t", "Tanh", "a"))
    longer = (CONV, RELU, ADD, frozenset({"Sigmoid"}))
    assert groups(graph, (CONV, RELU), longer) == [("c", "r")]
    assert groups(graph, (CONV, RELU), longer, (CONV, RELU, ADD)) == [("c", "r", "a")]


def test_a_node_belongs_to_one_group():
    chain = net(("c", "Conv2D", "x"), ("r1", "Relu", "c"), ("r2", "Relu", "r1"))
    assert groups(chain, (CONV, RELU), (RELU, RELU)) == [("c", "r1")]
    two = net(("c1", "Conv2D", "x"), ("c2", "Conv2D", "x"), ("a", "Add", "c1 c2"))
    assert groups(two, (CONV, ADD)) == [("c1", "a")]


def test_a_value_with_two_readers_does_not_fuse_and_the_note_says_so():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), ("a", "Add", "r c"))
    found, notes = fuse(graph, [(CONV, RELU)])
    assert found == ()
    assert notes == ["'c' and 'r' do not fuse: the value between them has 2 readers"]


def test_the_tail_of_a_group_may_branch():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), ("a", "Add", "r r"))
    assert groups(graph, (CONV, RELU)) == [("c", "r")]


def test_nothing_fuses_across_an_output_of_the_model():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), outputs=("c", "r"))
    found, notes = fuse(graph, [(CONV, RELU)])
    assert found == () and "output of the model" in notes[0]


@pytest.mark.parametrize("word", ["Clamp", "HardTanh", "ReluN1To1"])
def test_a_platforms_own_word_for_an_operator_is_understood(word):
    graph = net(("c", "Conv2D", "x"), ("k", "Clamp", "c"))
    graph.nodes[1] = graph.nodes[1].with_(attrs={"min": -1.0, "max": 1.0})
    assert groups(graph, (CONV, frozenset({word}))) == [("c", "k")]


def test_a_folded_batch_norm_leaves_the_pattern():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"))
    assert groups(graph, (CONV, frozenset({"BatchNorm"}), RELU)) == [("c", "r")]


def test_an_operator_with_several_results_ends_a_group_and_the_note_says_so():
    graph = net(("s", "Split", "x"), ("r", "Relu", "s"))
    graph.nodes[0] = graph.nodes[0].with_(outputs=("s", "rest"))
    found, notes = fuse(graph, [(frozenset({"Split"}), RELU)])
    assert (found, notes) == ((), ["'s' and 'r' do not fuse: the first has several outputs"])
    assert fuse(net(("s", "Split", "x"), ("r", "Relu", "s")), [(frozenset({"Split"}), RELU)])[0] == (("s", "r"),)


def test_nothing_is_said_of_a_longer_group_where_a_shorter_one_is_found():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), ("a", "Add", "r x"), ("t", "Tanh", "r"))
    assert fuse(graph, [(CONV, RELU), (CONV, RELU, ADD)]) == ((("c", "r"),), [])
    _, notes = fuse(graph, [(CONV, RELU, ADD)])
    assert notes == ["'r' and 'a' do not fuse: the value between them has 2 readers"]


def test_one_note_for_an_operator_of_the_longest_pattern_that_was_refused():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), ("a", "Add", "r c"), ("t", "Tanh", "a"))
    tanh = frozenset({"Tanh"})
    found, notes = fuse(graph, [(CONV, ADD), (CONV, RELU, ADD), (RELU, ADD, tanh), (ADD, tanh)])
    assert found == (("r", "a", "t"),)
    assert notes == ["'c' and 'r' do not fuse: the value between them has 2 readers"]


def test_layers_are_named_as_the_user_knows_them():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), ("a", "Add", "c x"))
    graph.nodes[:2] = [graph.nodes[0].with_(layer="net.conv"), graph.nodes[1].with_(layer="net.act")]
    _, notes = fuse(graph, [(CONV, RELU)])
    assert notes == ["'net.conv' and 'net.act' do not fuse: the value between them has 2 readers"]


def test_patterns_name_sets_of_operators_or_any_operator():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"), ("t", "Tanh", "r"))
    sets = {"r": {"@acts"}, "c": {"@layers"}}
    pattern = frozenset({"@layers"}), frozenset({"@acts"})
    assert fuse(graph, [pattern], lambda n: sets.get(n.name, set()))[0] == (("c", "r"),)
    assert fuse(graph, [pattern]) == ((), [])
    assert groups(graph, (CONV, frozenset({"*"}))) == [("c", "r")]
    assert groups(graph, (frozenset({"*"}), frozenset({"Tanh"}))) == [("r", "t")]


def test_a_pattern_of_one_operator_is_no_fusion():
    graph = net(("c", "Conv2D", "x"), ("r", "Relu", "c"))
    batch_norm = frozenset({"BatchNorm"})
    assert fuse(graph, [(CONV,), (RELU,), (CONV, batch_norm), (batch_norm,), ()]) == ((), [])
    assert groups(graph, (CONV, frozenset({"BatchNorm", "Relu"}))) == [("c", "r")]  # one of both is still there
