"""Calls and results as flat lists of tensors, and their structure as text."""

import collections
import copy
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from chipfit.engine.trees import ResultStructure, dump_tree, flatten_call, flatten_inputs, load_tree, read_tree
from chipfit.errors import DataError, GraphError

Pair = collections.namedtuple("Pair", "first second")
pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")


@dataclasses.dataclass
class Answer:
    loss: Any
    scores: Any = None
    more: Any = None


pytree.register_dataclass(Answer, serialized_type_name="tests.Answer")

#: f(a, b, *, c, d), of which b is a list of a tensor, a number and a tensor; d is no tensor
SPEC = {"names": ["a", "b"], "args": 2, "kwargs": ["c", "d"], "leaves": 6, "tensors": [0, 1, 3, 4]}


@pytest.mark.parametrize(
    "args, kwargs",
    [
        (("a", ["b0", 5, "b2"]), {"c": "c", "d": 7}),
        (("a", ["b0", 5, "b2"]), {"d": 7, "c": "c"}),
        (("a",), {"d": 7, "b": ["b0", 5, "b2"], "c": "c"}),
        ((), {"d": 7, "b": ["b0", 5, "b2"], "c": "c", "a": "a"}),
        (["a", ["b0", 5, "b2"]], {"c": "c", "d": 7}),
    ],
)
def test_the_tensors_of_a_call_come_in_the_order_of_the_captured_one(args, kwargs):
    before = dict(kwargs)
    assert flatten_call(SPEC, args, kwargs) == ["a", "b0", "b2", "c"]
    assert flatten_inputs(SimpleNamespace(in_spec=json.dumps(SPEC)), args, kwargs) == ["a", "b0", "b2", "c"]
    assert kwargs == before


@pytest.mark.parametrize(
    "args, kwargs, got",
    [
        (("a",), {"c": "c", "d": 7}, "1 positional and ['c', 'd'] keyword arguments, 3 values"),
        (("a", ["b0", 5]), {"c": "c", "d": 7}, "2 positional and ['c', 'd'] keyword arguments, 5 values"),
        (("a", ["b", 5, "b"]), {"c": "c"}, "2 positional and ['c'] keyword arguments, 5 values"),
        (("a", ["b", 5, "b"]), {"c": "c", "e": 7}, "2 positional and ['c', 'e'] keyword arguments, 5 values"),
        (("a", ["b", 5, "b"]), {"c": ["c", 7]}, "2 positional and ['c'] keyword arguments, 6 values"),
        (("a", ["b", 5], "b"), {"c": "c", "d": 7}, "3 positional and ['c', 'd'] keyword arguments, 6 values"),
        ((), {"b": ["b", 5, "b"], "c": "c", "d": 7}, "0 positional and ['b', 'c', 'd'] keyword arguments, 2 values"),
    ],
)
def test_another_structure_is_refused(args, kwargs, got):
    with pytest.raises(DataError) as e:
        flatten_call(SPEC, args, kwargs)
    assert got in str(e.value) and "2 positional and ['c', 'd'] keyword arguments, 6 values" in str(e.value)


#: what models return -> the same in dicts, lists and tuples
RETURNED = [
    (0, 0),
    ([1, (2, [])], [1, (2, [])]),
    ({"b": 1, "a": [2]}, {"b": 1, "a": [2]}),
    (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (collections.defaultdict(list, {"k": 1, 3: 2}), {"k": 1, 3: 2}),
    ({"a": None, "b": 1}, {"a": None, "b": 1}),
    (collections.OrderedDict(a=None, b=1), {"a": None, "b": 1}),
    (collections.defaultdict(list, {"a": None, 3: 2}), {"a": None, 3: 2}),
    (Pair(1, [2]), (1, [2])),
    (Pair(None, [None]), (None, [None])),
    (Answer(1, Pair(2, 3)), {"loss": 1, "scores": (2, 3)}),
    ({"outer": Answer([1], None, (2,))}, {"outer": {"loss": [1], "more": (2,)}}),
    (collections.OrderedDict(a=Answer(1, 2, 3)), {"a": {"loss": 1, "scores": 2, "more": 3}}),
    ((), ()),
    ({}, {}),
]


@pytest.mark.parametrize("x, plain", RETURNED)
def test_a_structure_that_torch_wrote_is_read_without_its_classes(x, plain):
    """Fields of a dataclass keep their names, those of a named tuple their order."""
    read = read_tree(pytree.treespec_dumps(pytree.tree_structure(x)))
    assert read == pytree.tree_structure(pytree.tree_map(lambda _: 0, plain))


@pytest.mark.parametrize("x, plain", RETURNED)
def test_a_structure_is_kept_with_its_classes_where_they_are_known(x, plain):
    tree = pytree.tree_structure(x)
    spec = json.loads(json.dumps(dump_tree(tree, x)))
    assert load_tree(spec) == tree
    ordinary = x == plain and type(x) in (int, list, tuple, dict)
    assert set(spec) == ({"plain"} if ordinary else {"captured", "plain"})
    elsewhere = {"captured": "of another process", "plain": spec["plain"]}
    leaves = pytree.tree_leaves(plain)
    assert load_tree(elsewhere).unflatten(leaves) == load_tree({"plain": spec["plain"]}).unflatten(leaves) == plain


def test_structures_with_classes_of_one_name_are_told_apart():
    other = dataclasses.make_dataclass("Answer", ["loss", "scores"])
    pytree.register_dataclass(other, serialized_type_name="tests.other.Answer")
    specs = [dump_tree(pytree.tree_structure(x), x) for x in (Answer(1, 2), other(1, 2), Pair(1, 2))]
    assert len({s["captured"] for s in specs}) == 3
    assert [load_tree(s).type for s in specs[:2]] == [Answer, other]


def test_results_take_outputs_and_constants_to_their_places():
    tree = pytree.tree_structure({"a": 0, "b": [0, 0]})
    leaves = [{"output": 1}, {"constant": 7}, {"output": 0}]
    spec = {"plain": pytree.treespec_dumps(tree), "leaves": leaves}
    results = ResultStructure(SimpleNamespace(out_spec=json.dumps(spec)))
    assert results(["x", "y"]) == {"a": "y", "b": [7, "x"]}
    assert copy.deepcopy(results) is results


def node(kind, context, *children):
    return {"type": kind, "context": context, "children_spec": list(children)}


LEAF = node(None, None)


@pytest.mark.parametrize(
    "tree, read",
    [
        (node("tests.Unknown", '["a", "b"]', LEAF, LEAF), {"a": 0, "b": 0}),
        (node("tests.Unknown", '[["a", "b"], ["c"]]', LEAF, LEAF), {"a": 0, "b": 0}),
        (node("tests.Unknown", '["a", ["b", "c"]]', LEAF, LEAF), {"b": 0, "c": 0}),
        (node("tests.Unknown", '["a"]', LEAF, LEAF), (0, 0)),
        (node("tests.Unknown", "[[1.5, null], []]", LEAF, LEAF), (0, 0)),
        (node("tests.Unknown", "text", LEAF), (0,)),
        (node("tests.Unknown", None, LEAF, LEAF), (0, 0)),
        (node("builtins.dict", ["k", 3], LEAF, LEAF), {"k": 0, 3: 0}),
        (node("collections.defaultdict", '["list", ["k"]]', LEAF), {"k": 0}),
    ],
)
def test_fields_are_named_where_the_text_names_each(tree, read):
    assert read_tree(json.dumps([1, tree])).unflatten([0] * 2 if len(tree["children_spec"]) == 2 else [0]) == read


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([2, LEAF]),
        "[1]",
        json.dumps([1, node("builtins.dict", '["a"]', LEAF, LEAF)]),
        json.dumps([1, node("collections.OrderedDict", None, LEAF)]),
        json.dumps([1, node(3, None)]),
        json.dumps([1, {"type": None, "children_spec": None}]),
        json.dumps([1, [LEAF]]),
        json.dumps([1, node("builtins.list", None, 3)]),
    ],
)
def test_what_is_no_structure_is_refused(text):
    with pytest.raises(GraphError, match="structure of inputs or outputs is malformed"):
        read_tree(text)
