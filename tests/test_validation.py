"""Validation by pydantic with chipfit's error messages."""

import inspect
from dataclasses import FrozenInstanceError, field
from typing import Annotated

import pytest
from pydantic import Field

from chipfit.errors import ConfigError, ModelingError, UnknownNameError
from chipfit.validation import Number, allowed, arguments, check_value, record


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
    ("make", "text"),
    [
        (lambda: Options("yes"), "'on' must be True or False. Where: Options. Got: 'yes'."),
        (lambda: Options(ratio=True), "'ratio' must be a number. Where: Options. Got: True."),
        (lambda: Options(names=[]), "'names' must be a list that is not empty. Where: Options. Got: []."),
        (lambda: Options(names=["a", 3]), "'names.1' must be text. Where: Options, key names.1. Got: 3."),
        (lambda: Options(share=-1), "'share' must be a number that is at least 0. Where: Options. Got: -1."),
        (lambda: setattr(Options(), "on", 1), "'on' must be True or False. Where: Options. Got: 1."),
    ],
)
def test_invalid_values_are_named_with_allowed_ones(make, text):
    with pytest.raises(ConfigError) as e:
        make()
    assert str(e.value) == text


def test_unknown_names_list_similar_ones():
    with pytest.raises(UnknownNameError, match="Try: 'ratio'"):
        Options(ration=1)
    with pytest.raises(UnknownNameError, match="Try: 'ratio'"):
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
    with pytest.raises(ModelingError, match="'numbers' must be an integer. Where: .*Many. Got: 'a'"):
        Many(1, 2, "a")
    with pytest.raises(ModelingError, match="'word' must be text. Where: .*Many. Got: 3"):
        Many(word=3)


def test_a_type_may_describe_its_allowed_values():
    even = Annotated[int, Field(multiple_of=2), allowed("an even number")]
    assert check_value(even, 4, ConfigError, "Thing", "size") == 4
    with pytest.raises(ConfigError, match="'size' is not allowed. Where: Thing. Got: 3. Allowed: an even number"):
        check_value(even, 3, ConfigError, "Thing", "size")
