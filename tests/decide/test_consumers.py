"""What readers ask of a value, seen through what only moves codes."""

from __future__ import annotations

import pytest
import torch

from chipfit.decide.formats import formats_wanted_by_consumers, limit_to_consumers
from chipfit.decide.groups import find_groups
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph, Node, Value
from tests.build import platform_of

FORMATS = {f"a{k}": {"bits": k, "zero": "any"} for k in (4, 8, 16)} | {"w8": {"bits": 8, "per": "channel"}}


def use(*options):
    return [{"in": a, "out": b} if isinstance(b, str) else {"in": a, **b} for a, b in options]


def chip(rules, **more):
    ops = [{"match": [op], "use": options} for op, options in rules.items()]
    ops += [{"match": ["Reshape", "Concat"], "use": [{"in": "any", "out": "same"}], "exec": "follow"}]
    return platform_of(*ops, formats=FORMATS, **more)


def units_of(platform, *nodes, outputs=None, overrides=None):
    """Nodes (name, operator, inputs) over x; each writes a value of its name."""
    made = [Node(name, op, tuple(ins), (name,)) for name, op, *ins in nodes]
    values = {v: Value(v, (None, 4)) for v in ("x", *(n.name for n in made))}
    graph = Graph(made, ["x"], outputs or [made[-1].name], values, {"w": torch.ones(4, 4)})
    return graph, find_groups(graph, platform, (), overrides or {})


# ---------------------------------------------------------------- widths that readers take

WIDE = use(("a16", "a16"), ("a8", "a8"), ("a4", "a4"))
NARROW_READER = [{"in": "any", "in_bits": [4, 8], "out": "a4"}]


def results(units):
    return {u.head.name: [o.out for o in u.resolved.options] for u in units}


def test_a_maker_writes_no_wider_codes_than_its_reader_takes():
    p = chip({"Relu": WIDE, "Tanh": NARROW_READER})
    _, units = units_of(p, ("r", "Relu", "x"), ("t", "Tanh", "r"))
    left = limit_to_consumers(p, units)
    assert [u.head.name for u in left] == ["r", "t"]
    assert results(left) == {"r": ["a8", "a4"], "t": ["a4"]}


def test_the_bound_goes_through_what_moves_codes_and_no_further():
    p = chip({"Relu": WIDE, "Tanh": NARROW_READER})
    _, units = units_of(
        p, ("p", "Relu", "x"), ("q", "Relu", "p"), ("m", "Reshape", "q"), ("n", "Reshape", "m"), ("t", "Tanh", "n")
    )
    assert results(limit_to_consumers(p, units)) == {
        "p": ["a16", "a8", "a4"],
        "q": ["a8", "a4"],
        "m": ["same"],
        "n": ["same"],
        "t": ["a4"],
    }


def test_the_least_of_several_bounds_counts_in_either_order():
    p = chip({"Relu": WIDE, "Tanh": NARROW_READER, "Sigmoid": [{"in": "any", "in_bits": [4], "out": "a4"}]})
    for first, second in (("Tanh", "Sigmoid"), ("Sigmoid", "Tanh")):
        _, units = units_of(p, ("r", "Relu", "x"), ("s", first, "r"), ("t", second, "r"), outputs=["s", "t"])
        assert results(limit_to_consumers(p, units))["r"] == ["a4"]


def test_a_reader_that_takes_any_width_or_stays_float_bounds_nothing():
    rules = {"Relu": WIDE, "Tanh": [{"in": "any", "out": "a4"}]}
    _, units = units_of(p := chip(rules), ("r", "Relu", "x"), ("t", "Tanh", "r"))
    assert results(limit_to_consumers(p, units))["r"] == ["a16", "a8", "a4"]
    p, kept = chip({"Relu": WIDE, "Tanh": NARROW_READER}), {"t": {"float": "by hand"}}
    _, units = units_of(p, ("r", "Relu", "x"), ("t", "Tanh", "r"), overrides=kept)
    assert results(limit_to_consumers(p, units))["r"] == ["a16", "a8", "a4"]


def test_the_widest_of_a_readers_options_is_its_bound():
    p = chip({"Relu": WIDE, "Tanh": [{"in": "any", "in_bits": [4], "out": "a4"}, *NARROW_READER]})
    _, units = units_of(p, ("r", "Relu", "x"), ("t", "Tanh", "r"))
    assert results(limit_to_consumers(p, units))["r"] == ["a8", "a4"]


def test_a_result_in_float_is_read_by_anyone():
    p = chip({"Relu": use(("a16", "float"), ("a16", "a16")), "Tanh": NARROW_READER})
    _, units = units_of(p, ("r", "Relu", "x"), ("t", "Tanh", "r"))
    assert results(limit_to_consumers(p, units))["r"] == ["float"]


def test_codes_that_no_reader_takes_are_refused_with_both_layers_unless_one_stays_float():
    p = chip({"Relu": use(("a16", "a16")), "Tanh": NARROW_READER})
    nodes = (("r", "Relu", "x"), ("t", "Tanh", "r"))
    with pytest.raises(
        UnsupportedError, match=r"result of 'r' is wider than its consumer 't' can.*'npu'.*16.*most 8 bits"
    ):
        limit_to_consumers(p, units_of(p, *nodes)[1])
    _, units = units_of(p, *nodes, overrides={"r": {"float": "by hand"}})
    assert results(limit_to_consumers(p, units)) == {"r": ["a16"], "t": ["a4"]}


def test_what_has_no_options_has_none_to_lose():
    p = chip({"Tanh": NARROW_READER})
    _, units = units_of(p, ("r", "Relu", "x"), ("t", "Tanh", "r"))
    assert results(limit_to_consumers(p, units)) == {"r": [], "t": ["a4"]}


# ---------------------------------------------------------------- formats that readers want

READS8, READS4, ANYTHING = use(("a8", "a8")), use(("a4", "a4")), [{"in": "any", "out": "a4"}]
RULES = {"Relu": READS8, "Tanh": READS4, "Sigmoid": ANYTHING, "Gelu": use(("float", "a8"))}


def asked(*nodes, platform=None, **more):
    p = platform or chip(RULES)
    graph, units = units_of(p, *nodes, **more)
    return formats_wanted_by_consumers(graph, p, units)


def test_a_reader_wants_the_format_of_its_first_option():
    assert asked(("r", "Relu", "x"), ("t", "Tanh", "r")) == {"r": "a4", "x": "a8"}
    assert asked(("s", "Sigmoid", "x")) == {"x": "any"}
    assert asked(("g", "Gelu", "x")) == {}


@pytest.mark.parametrize(
    ("readers", "wanted"),
    [
        (("Relu", "Tanh"), "a4"),
        (("Tanh", "Relu"), "a8"),
        (("Sigmoid", "Relu"), "a8"),
        (("Relu", "Sigmoid"), "a8"),
        (("Sigmoid", "Sigmoid"), "any"),
        (("Relu", "Gelu"), "a8"),
        (("Gelu", "Relu"), "a8"),
    ],
)
def test_of_several_readers_the_last_decides_but_for_one_that_takes_anything(readers, wanted):
    made = asked(("p", readers[0], "x"), ("q", readers[1], "x"), outputs=["p", "q"])
    assert made["x"] == wanted


def test_a_mover_passes_the_request_on_to_what_it_alone_reads():
    assert asked(("r", "Relu", "x"), ("m", "Reshape", "r"), ("t", "Tanh", "m")) == {"m": "a4", "r": "a4", "x": "a8"}
    two = (("r", "Relu", "x"), ("m", "Reshape", "r"), ("t", "Tanh", "m"), ("g", "Gelu", "r"))
    assert asked(*two, outputs=["t", "g"]) == {"m": "a4", "x": "a8"}
    at_input = (("m", "Reshape", "x"), ("t", "Tanh", "m"), ("g", "Gelu", "x"))
    assert asked(*at_input, outputs=["t", "g"]) == {"m": "a4", "x": "a4"}


def test_a_mover_that_stays_float_or_is_asked_nothing_passes_nothing_on():
    nodes = (("r", "Relu", "x"), ("m", "Reshape", "r"), ("t", "Tanh", "m"))
    assert asked(*nodes, overrides={"m": {"float": "by hand"}}) == {"m": "a4", "x": "a8"}
    quiet = (("r", "Relu", "x"), ("m", "Reshape", "r"), ("n", "Reshape", "x"), ("t", "Tanh", "n"))
    assert asked(*quiet, outputs=["m", "t"]) == {"n": "a4", "x": "a4"}


@pytest.mark.parametrize(
    ("place", "unlisted", "wanted"),
    [
        ({"io_out": ["a4", "a8"]}, None, {"m": "a4", "r": "a4", "x": "a8"}),
        ({"io_out": ["a4", "float"]}, None, {"x": "a8"}),
        ({}, None, {"x": "a8"}),
        ({"io_out": ["a4", "a8"]}, "cpu", {"x": "a8"}),
    ],
)
def test_results_of_the_model_are_wanted_as_the_chip_hands_them_out(place, unlisted, wanted):
    p = chip(RULES, place=place, **({"unlisted": unlisted} if unlisted else {}))
    assert asked(("r", "Relu", "x"), ("m", "Reshape", "r"), platform=p) == wanted
