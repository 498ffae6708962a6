"""Conditions of rules: the attributes that they test, and the reason when one is violated."""

import pytest

from chipfit.platform.predicates import evaluate, value

#: five unequal sizes; kernel, stride, padding and dilation differ by axis
NODE = {
    "in_shape": (2, 3, 9, 16),
    "out_shape": (2, 5, 7, 4),
    "kernel": (3, 5),
    "stride": (2, 3),
    "dilation": (2, 3),
    "padding": ((1, 2), (0, 3)),
    "negative_slope": 0.25,
    "axis": 1,
}


#: attribute -> changes of the node and its value there
VALUES = {
    "slope": [({}, 0.25)],
    "batch": [({}, 2), ({"in_shape": None}, None)],
    "rank": [({}, 4)],
    "depth": [({}, 3), ({"in_shape": (2,)}, None)],
    "kernel": [({}, (3, 5)), ({"kernel": None}, None)],
    "filter_width": [({}, 5), ({"kernel": (5,)}, 5), ({"kernel": (2, 3, 7)}, 7)],
    "dilated_h": [({}, 2 * 2 + 1), ({"dilation": (1, 3)}, 3)],
    "dilated_hw": [({}, (2 * 2 + 1) * (3 * 4 + 1)), ({"dilation": (1, 1)}, 15)],
    "reduced": [
        *[({}, 9 * 16), ({"axes": (1,)}, 3), ({"axes": (1, -1)}, 48)],
        *[({"in_shape": (None, 3, 9, 16), "axes": axes}, size) for axes, size in [((1, 2), 27), ((0, 2), None)]],
        *[({"in_shape": (2, 3, None, 16)}, None), ({"in_shape": (2, 3)}, None)],
        ({"in_shape": None, "axes": (1,)}, None),
    ],
    "axis": [({}, "depth"), ({"axis": -3}, "depth"), ({"axis": 0}, "other"), ({"in_shape": ()}, None)],
    "dims_above_1": [({}, 3), ({"in_shape": (7, 1, 1)}, 0), ({"in_shape": (1, None, 0)}, 2)],
    "group_width": [
        ({"groups": 1}, 5),
        ({"groups": 3, "out_shape": (2, 6, 1, 1)}, 2),
        ({"groups": 5, "in_shape": (2, 5)}, 1),
    ],
    "out_size": [({}, (7, 4)), *[({"out_shape": s}, None) for s in [(2, 5), (2, 5, None, 7)]]],
    "unheard_of": [({}, None)],
}


@pytest.mark.parametrize("key", VALUES)
def test_attributes_follow_from_those_of_a_node(key):
    for changes, found in VALUES[key]:
        assert value(key, {**NODE, **changes}) == found, changes


@pytest.mark.parametrize("key", ["slope", "batch", "rank", "depth", "filter_width", "dilated_h", "padding", "axis"])
def test_an_attribute_that_a_node_lacks_is_not_known(key):
    assert value(key, {}) is None and evaluate({key: 1}, {}) == ("", (key,))


def test_a_pool_without_a_window_has_the_size_of_its_input():
    assert value("kernel", {"in_shape": (2, 3, 9, 16)}) == (9, 16)
    assert value("kernel", {"in_shape": (2, 3, 9)}) == (9,)
    assert value("kernel", {"in_shape": (2, 3)}) is None


def test_a_kernel_without_dilation_reaches_as_far_as_it_is_large():
    assert value("dilated_hw", {"kernel": (3, 5)}) == 15 and value("dilated_h", {"kernel": (4, 5)}) == 4


@pytest.mark.parametrize(
    "padding, stride, before, after, kind",
    [
        (((0, 0), (0, 0)), (2, 2), (9, 9), (4, 4), "valid"),
        (((0, 1), (0, 0)), (2, 1), (9, 7), (5, 7), "same"),  # ceil(9 / 2)
        (((0, 0), (1, 0)), (2, 1), (8, 7), (4, 7), "same"),
        (((1, 1), (1, 1)), (2, 1), (9, 7), (4, 7), "explicit"),
        (((1, 1), (1, 1)), (2, 1), (9, 7), (5, 8), "explicit"),
        (((1, 1), (1, 1)), (2, 1), (None, 7), (5, 7), None),
        (((1, 1), (1, 1)), (2, 1), (9, 7), (5, None), None),
    ],
)
def test_kinds_of_padding(padding, stride, before, after, kind):
    node = {"padding": padding, "stride": stride, "in_shape": (1, 2, *before), "out_shape": (1, 2, *after)}
    assert value("padding", node) == kind


@pytest.mark.parametrize(
    "want, holds",  # for 2, 3 and 4
    [
        (3, [False, True, False]),
        ([3, 4], [False, True, True]),
        ((2, 3), [True, True, False]),
        ([], [False, False, False]),
        ({"eq": 3}, [False, True, False]),
        ({"in": [2, 4]}, [True, False, True]),
        ({"min": 3}, [False, True, True]),
        ({"max": 3}, [True, True, False]),
        ({"min": 3, "max": 3}, [False, True, False]),
        ({"multiple": 2}, [True, False, True]),
        ("twice", [False, False, True]),
        (["half", 2], [True, False, False]),
        ({"max": "twice"}, [True, True, True]),
        ({"min": "twice"}, [False, False, True]),
    ],
)
def test_each_test_at_its_bound_and_beside_it(want, holds):
    assert [evaluate({"n": want}, {"n": n, "twice": 4, "half": 1})[0] == "" for n in (2, 3, 4)] == holds


@pytest.mark.parametrize(
    "where, attrs, answer",
    [
        ({"kernel": {"max": 3}}, {"kernel": (3, 4)}, ("kernel at most 3 (got 3 x 4)", ())),
        ({"kernel": {"min": 3}}, {"kernel": [2, 4]}, ("kernel at least 3 (got 2 x 4)", ())),
        ({"flag": True}, {"flag": False}, ("flag true (got false)", ())),
        ({"stride": "equal_xy"}, {"stride": (1, 2, 1)}, ("stride equal in x and y (got 1 x 2 x 1)", ())),
        ({"stride": "equal_xy"}, {"stride": 2}, ("", ())),
        ({"a": 1, "b": 1, "c": 1}, {"b": 1}, ("", ("a", "c"))),
        ({"a": 1, "b": 1, "c": 1}, {"b": 2}, ("b 1 (got 2)", ("a",))),
        ({"n": {"max": 3}}, {"n": "many"}, ("", ("n",))),  # a size without a number
        ({"n": {"max": 3}}, {"n": 0}, ("", ())),
        ({"n": []}, {"n": 2}, ("n nothing (got 2)", ())),  # no value is allowed
        ({"n": ""}, {"n": "a"}, ("n nothing (got a)", ())),
        ({"groups": [1, "in_channels"]}, {"groups": 2, "in_channels": 8}, ("groups 1 or 8 (got 2)", ())),
        ({"channels": {"multiple": 16}}, {"channels": 24}, ("channels a multiple of 16 (got 24)", ())),
        ({"slope": 0.1015625}, {"negative_slope": 0.01}, ("slope 0.1015625 (got 0.01)", ())),
    ],
)
def test_the_answer_names_what_is_broken_and_what_is_not_known(where, attrs, answer):
    assert evaluate(where, attrs) == answer
