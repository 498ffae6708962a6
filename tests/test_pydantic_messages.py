"""Validation by pydantic with chipfit's error messages."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, field
from typing import Annotated

import pytest
from pydantic import Field

from chipfit.errors import ConfigError, ModelingError, UnknownNameError
from chipfit.pydantic_messages import Number, allowed, arguments, check_value, record


@record(ConfigError)
class Options:
    on: bool = False
    ratio: Number = 0.5
    share: Annotated[Number, Field(ge=0)] = 0
    names: Annotated[list[str], Field(min_length=1)] = field(default_factory=lambda: ["a"])

    def __post_init__(self):
        if self.on and self.ratio == 0:
            raise ConfigError("ratio is 0")


def test_a_record_has_positional_arguments_and_keeps_the_type_of_numbers():
    made = Options(True, 3)
    assert (made.on, made.ratio, made.names) == (True, 3, ["a"])
    assert isinstance(made.ratio, int)
    assert list(inspect.signature(Options).parameters) == ["on", "ratio", "share", "names"]
    with pytest.raises(ConfigError, match="ratio is 0"):
        Options(True, 0)


@pytest.mark.parametrize(
    ("make", "option", "text"),
    [
        (lambda: Options("yes"), "on", "of the wrong type. Got: 'yes' of type str. Allowed: True or False."),
        (lambda: Options(ratio=True), "ratio", "of the wrong type. Got: True of type bool. Allowed: a number."),
        (
            lambda: Options(names=[]),
            "names",
            "of the wrong type. Got: [] of type list. Allowed: a list that is not empty.",
        ),
        (lambda: Options(names=["a", 3]), "names[1]", "of the wrong type. Got: 3 of type int"),
        (lambda: Options(share=-1), "share", "out of bounds. Got: -1 of type int. Allowed: a number that is at"),
        (lambda: setattr(Options(), "on", 1), "on", "of the wrong type"),
    ],
)
def test_invalid_values_are_named_with_allowed_ones(make, option, text):
    with pytest.raises(ConfigError) as e:
        make()
    assert f"'{option}' of Options is {text}" in str(e.value)


def test_unknown_names_list_similar_ones():
    with pytest.raises(UnknownNameError, match="did you mean 'ratio'"):
        Options(ration=1)
    with pytest.raises(UnknownNameError, match="did you mean 'ratio'"):
        Options().ration = 1


def test_too_many_and_missing_arguments_raise_pythons_own_error():
    @record(ModelingError, frozen=True)
    class One:
        value: int

    with pytest.raises(TypeError, match="value"):
        One()
    with pytest.raises(TypeError):
        One(1, 2)
    with pytest.raises(ModelingError, match="There is no option of One named 'other'"):
        One(1, other=2)
    with pytest.raises(FrozenInstanceError):
        One(1).value = 2


def test_arguments_of_a_constructor_are_validated_by_their_annotations():
    class Many:
        @arguments(ModelingError)
        def __init__(self, *numbers: int, word: str = "x") -> None:
            self.numbers = numbers

    assert Many(1, 2).numbers == (1, 2)
    with pytest.raises(ModelingError, match="'numbers' of .*Many is of the wrong type. Got: 'a' of type str"):
        Many(1, 2, "a")
    with pytest.raises(ModelingError, match="'word' of .*Many is of the wrong type. Got: 3"):
        Many(word=3)


def test_a_type_may_describe_its_allowed_values():
    even = Annotated[int, Field(multiple_of=2), allowed("an even number")]
    assert check_value(even, 4, ConfigError, "Thing", "size") == 4
    with pytest.raises(ConfigError, match="'size' of Thing is of the wrong type. Got: 3 of .* Allowed: an even number"):
        check_value(even, 3, ConfigError, "Thing", "size")
