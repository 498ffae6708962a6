"""Filters on the attributes of layers, and the members of operator sets."""

import pytest

from chipfit.platform.filters import AttributeFilter, Member, equal, has_nan

NAN = float("nan")


def where(attr, test, value):
    return AttributeFilter(attr=attr, test=test, value=value)


EQUAL = [(2, (2, 2)), (2.0, [2, 2, 2]), (2, 2.0), ((1, 2), [1, 2]), ("same", "".join(["sa", "me"])), (300, int("300"))]
EQUAL += [(None, None), (True, True), ({"a": [1]}, {"a": (1,)})]
UNEQUAL = [(2, (2, 3)), (2, (3, 2)), (2, ("2", 2)), (2, ()), (2, "2"), ((1, 2), (2, 1)), ("same", ("same", "same"))]
UNEQUAL += [(None, 0), (True, 1), (False, 0), (True, (1, 1)), (True, (True, True))]


@pytest.mark.parametrize("pairs, same", [(EQUAL, True), (UNEQUAL, False)], ids=["equal", "unequal"])
def test_equality_as_users_mean_it(pairs, same):
    for a, b in pairs:
        assert equal(a, b) is same and equal(b, a) is same, (a, b)


@pytest.mark.parametrize("value", [NAN, [1.0, NAN], (1.0, (2.0, NAN)), {"a": 1.0, "b": {"c": NAN}}])
def test_nan_is_found_wherever_it_stands(value):
    assert has_nan(value) and not any(has_nan(v) for v in ({"a": 1.0}, [], 1.0, "nan", None))
    with pytest.raises(ValueError, match="nan, which is equal to nothing"):
        where("a", "eq", value)


@pytest.mark.parametrize(
    "test, holds",  # of 1, 2 and 3, against 2
    [
        ("eq", [False, True, False]),
        ("is", [False, True, False]),
        ("ne", [True, False, True]),
        ("gt", [False, False, True]),
        ("ge", [False, True, True]),
        ("lt", [True, False, False]),
        ("le", [True, True, False]),
    ],
)
def test_a_number_against_another(test, holds):
    f = where("n", test, 2)
    assert [f.match({"n": n}) for n in (1, 2, 3)] == holds
    assert not f.match({}) and not f.match({"m": 2})
    assert f.match({"n": None}) is (test == "ne")  # no order between None and a number


def test_a_missing_attribute_is_none_for_one_test_alone():
    matching = [t for t in ("is", "eq", "ne", "gt", "contains") if where("a", t, None).match({})]
    assert matching == ["is"] and where("a", "eq", None).match({"a": None}) and not where("a", "is", 1).match({})


def test_what_a_list_or_text_contains():
    f = where("a", "contains", "ab")
    assert [a for a in ("cabs", "acb", ["ab"], ["abc"], 3, None) if f.match({"a": a})] == ["cabs", ["ab"]]


def test_equality_is_what_a_filter_tests_unless_another_test_is_given():
    assert AttributeFilter(attr="n", value=2).match({"n": (2, 2)})
    assert not AttributeFilter(attr="n").match({"n": 0}) and AttributeFilter(attr="n").match({"n": None})


def test_filters_are_joined_flat_and_nested():
    a, b, c = (where("n", "eq", k) for k in (1, 2, 3))
    either, both = a | b | c, where("n", "ge", 1) & where("n", "le", 2) & where("m", "eq", 0)
    assert len(either.any_) == 3 and len(both.all_) == 3 and either.all_ is None and both.any_ is None
    assert [either.match({"n": n}) for n in range(5)] == [False, True, True, True, False]
    assert [both.match({"n": n, "m": 0}) for n in range(4)] == [False, True, True, False]
    assert not both.match({"n": 1, "m": 1})
    mixed = (a | b) & where("m", "eq", 0)
    words = "n = 1 | n = 2 | n = 3", "n >= 1 & n <= 2 & m = 0", "(n = 1 | n = 2) & m = 0"
    assert tuple(map(str, (either, both, mixed))) == words
    assert len(mixed.all_) == 2 and mixed.match({"n": 2, "m": 0}) and not mixed.match({"n": 3, "m": 0})
    with pytest.raises(TypeError):
        _ = a & 1
    with pytest.raises(TypeError):
        _ = a | None


@pytest.mark.parametrize("parts", [{}, {"attr": "n", "any": ({"attr": "m"},)}, {"all": (), "any": ()}])
def test_a_filter_is_a_condition_or_one_join(parts):
    with pytest.raises(ValueError, match="exactly one of attr, any, all"):
        AttributeFilter.model_validate(parts)


def test_filters_and_members_stay_as_they_are_and_know_their_fields():
    f, m = where("n", "eq", 1), Member(op=("Conv2D",))
    for thing, field in ((f, "value"), (m, "op")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(thing, field, ())
    for kind, first in ((AttributeFilter, {"attr": "n"}), (Member, {"op": ["Conv2D"]})):
        with pytest.raises(ValueError, match="Extra inputs"):
            kind.model_validate({**first, "other": 1})
    assert where("n", "eq", [2, [1]]).value == (2, (1,))  # lists are kept as tuples
    assert AttributeFilter(any_=(f,)) == AttributeFilter.model_validate({"any": (f,)})


@pytest.mark.parametrize(
    "member, held",  # of (Conv2D, Conv2d, groups 1), (Conv2D, Mine, groups 1), (Linear, Conv2d, groups 2)
    [
        (Member(), [True, True, True]),
        (Member(op=("Conv2D", "Add")), [True, True, False]),
        (Member(type="Conv2d"), [True, False, True]),
        (Member(name="Conv2d"), [True, True, True]),
        (Member(where=where("groups", "eq", 1)), [True, True, False]),
        (Member(op=("Conv2D",), type="Conv2d"), [True, False, False]),
        (Member(op=("Linear",), where=where("groups", "eq", 1)), [False, False, False]),
        (Member(type="Mine", where=where("groups", "eq", 1)), [False, True, False]),
    ],
)
def test_which_layers_a_member_holds(member, held):
    layers = [("Conv2D", "Conv2d", 1), ("Conv2D", "Mine", 1), ("Linear", "Conv2d", 2)]
    assert [member.match(op, layer, {"groups": g}) for op, layer, g in layers] == held


def test_members_that_operators_alone_describe_are_bare():
    more = [{"type": "T"}, {"name": "T"}, {"where": where("n", "eq", 1)}]
    assert Member(op=("Add",)).bare and not any(Member(op=("Add",), **m).bare for m in more)
    named = [Member(), *(Member(**m) for m in more)]
    assert [m.nearness("T") for m in named] == [1, 0, 0, 1] and [m.nearness("U") for m in named] == [1, 1, 2, 1]
