"""Where one part of a network ends and the next begins."""

from __future__ import annotations

import torch

from chipfit.rounding.methods.learned import network_blocks
from tests.build import graph_of


def graph(nodes, inputs=("x",), outputs=None, ints=()):
    """Nodes as "name: operands", of which those that begin with L are linear."""
    parts = [line.split(": ") for line in nodes]
    texts = [f"{o} = Linear({i}, w{o}, -)" if o[0] == "L" else f"{o} = Add({', '.join(i.split())})" for o, i in parts]
    weights = {f"w{o}": torch.eye(2) for o, _ in parts if o[0] == "L"}
    return graph_of(*texts, weights=weights, inputs=inputs, outputs=outputs, dtypes=dict.fromkeys(ints, "int64"))


def firsts(g, scope):
    return [g.nodes[u.first].name for u in network_blocks(g, scope)]


def test_a_layer_is_a_linear_operator_with_what_follows_it():
    g = graph(["r: x x", "La: r", "b: La La", "c: b b", "Ld: c", "Le: Ld"])
    assert [(u.first, u.last, u.inputs, u.outputs) for u in network_blocks(g, "layer")] == [
        (0, 4, ["x"], ["c"]),
        (4, 5, ["c"], ["Ld"]),
        (5, 6, ["Ld"], ["Le"]),
    ]
    assert [(u.first, u.last) for u in network_blocks(g, "network")] == [(0, 6)]


def test_what_a_part_reads_and_gives_is_what_passes_its_ends():
    g = graph(["La: x", "Lb: La", "c: La Lb", "Ld: c", "e: Ld y x"], inputs=("x", "y"), outputs=["e", "Lb"])
    assert [(u.inputs, u.outputs) for u in network_blocks(g, "layer")] == [
        (["x"], ["La"]),
        (["La"], ["Lb", "c"]),
        (["c", "y", "x"], ["e"]),
    ]
    part = next(iter(network_blocks(g, "layer"))).subgraph(g, ["La", "x"])
    assert [n.name for n in part.nodes] == ["La"] and part.inputs == ["x"] and part.outputs == ["La", "x"]


def test_three_operators_in_a_row_make_a_block():
    row = [f"L{k}: {'x' if k == 0 else f'L{k - 1}'}" for k in range(8)]
    assert firsts(graph(row), "block") == ["L0", "L3", "L6"]
    assert firsts(graph(row[:3]), "block") == ["L0"] and firsts(graph(row[:4]), "block") == ["L0", "L3"]


def test_a_branch_is_a_block_of_its_own():
    """What lies between two values that alone connect the network: the sum, and what it is of."""
    around = ["La: x", "Lb: La", "Lc: Lb", "d: Lc La", "Le: d", "Lf: Le"]
    assert firsts(graph(around), "block") == ["La", "Lb", "Le"]
    one = ["La: x", "Lb: La", "c: Lb La", "Ld: c"]  # one operator beside the branch counts as one in a row
    assert firsts(graph(one), "block") == ["La"]
    first = ["La: x", "Lb: La", "c: Lb x", "Ld: c", "Le: Ld", "Lf: Le"]
    assert firsts(graph(first), "block") == ["La", "Ld"]
    last = ["L0: x", "La: L0", "Lb: La", "c: Lb L0"]
    assert firsts(graph(last), "block") == ["L0", "La"]


def test_only_floats_connect():
    """An integer that is alive beside the stream cuts nothing apart and holds nothing together."""
    g = graph(["La: x", "i: x x", "Lb: La", "Lc: Lb", "Ld: Lc", "e: Ld i"], ints=("i",))
    assert firsts(g, "block") == ["La", "Ld"]
    g = graph(["La: x", "Lb: La", "Lc: Lb", "Ld: Lc", "e: Ld i"], inputs=("x", "i"), ints=("i",))
    assert firsts(g, "block") == ["La", "Ld"]
    g = graph(["La: x", "Lb: La", "Lc: Lb", "Ld: Lc", "e: Ld i"], inputs=("x", "i"))
    assert firsts(g, "block") == ["La"]
