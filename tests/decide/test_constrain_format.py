"""Formats made narrower by hand hold numbers of the chip's format, and no others."""

from __future__ import annotations

import pytest

from chipfit.decide.overrides import METHODS, constrain_format, method_of
from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Format

AFFINE = Format(bits=8, zero="any")
FORMATS = {
    "uniform": AFFINE,
    "symmetric": Format(bits=8),
    "power_of_two": Format(bits=8, scale="pot"),
    "lut_symmetric": Format(bits=4, kind="lut", lut={"entries": 4}),
    "lut_power_of_two": Format(bits=4, kind="lut", lut={"entries": 4}, scale="pot"),
}
#: Lloyd's tables keep their kind; zero points and scales may only lose freedom
INSIDE = {
    "uniform": {"uniform", "symmetric", "power_of_two"},
    "symmetric": {"symmetric", "power_of_two"},
    "power_of_two": {"power_of_two"},
    "lut_symmetric": {"lut_symmetric", "lut_power_of_two"},
    "lut_power_of_two": {"lut_power_of_two"},
}


@pytest.mark.parametrize("mine", METHODS)
@pytest.mark.parametrize("method", METHODS)
def test_a_format_becomes_what_it_holds_and_nothing_else(mine, method):
    fmt = FORMATS[mine]
    assert method_of(fmt) == mine
    if method not in INSIDE[mine]:
        with pytest.raises(UnsupportedError, match="method"):
            constrain_format(fmt, layer="conv", method=method)
        return
    made = constrain_format(fmt, layer="conv", method=method)
    assert made.scale == ("pot" if method.endswith("power_of_two") else "any") and made.bits == fmt.bits
    assert (made == fmt) is (method == mine)


@pytest.mark.parametrize("signed, zero", [(True, 0), ("auto", 0), (False, (0, 128))])
def test_zero_is_in_the_middle_of_unsigned_codes_or_at_their_end(signed, zero):
    """Of 8 bits 128 stands for 0 where values have both signs."""
    made = constrain_format(Format(bits=8, zero="any", signed=signed), layer="conv", method="symmetric")
    assert made.zero == zero and made.signed == signed


def test_a_sign_is_chosen_where_the_format_leaves_it_to_the_data():
    assert constrain_format(Format(bits=8, signed="auto"), layer="conv", signed=False).signed is False
    assert constrain_format(AFFINE, layer="conv", signed=True) == AFFINE
    with pytest.raises(UnsupportedError, match="sign"):
        constrain_format(AFFINE, layer="conv", signed=False)


def test_scales_per_channel_become_one_and_never_the_other_way_round():
    assert constrain_format(Format(bits=8, per="channel"), layer="conv", per="tensor").per == "tensor"
    assert constrain_format(AFFINE, layer="conv", per="tensor") == AFFINE
    with pytest.raises(UnsupportedError, match="scale per"):
        constrain_format(AFFINE, layer="conv", per="channel")


def test_codes_of_other_kinds_have_no_method():
    assert method_of(Format(bits=8, kind="log", base=2.0)) is None
    with pytest.raises(UnsupportedError):
        constrain_format(Format(bits=8, kind="log", base=2.0), layer="conv", method="symmetric")


@pytest.mark.parametrize("mine", METHODS)
@pytest.mark.parametrize("method", METHODS)
def test_what_a_format_becomes_is_the_method_that_was_asked_for(mine, method):
    if method in INSIDE[mine]:
        assert method_of(constrain_format(FORMATS[mine], layer="conv", method=method)) == method


@pytest.mark.parametrize(
    ("fmt", "asked", "words"),
    [
        (
            FORMATS["power_of_two"],
            {"method": "symmetric"},
            "cannot have this method. Got: symmetric. Allowed: power_of",
        ),
        (FORMATS["symmetric"], {"method": "uniform"}, "Got: uniform. Allowed: symmetric, power_of_two. Try: describe"),
        (Format(bits=8, kind="log", base=2.0), {"method": "symmetric"}, "Got: symmetric. Allowed: nothing else."),
        (Format(bits=8, signed=True), {"signed": False}, "cannot have this sign. Got: False. Allowed: True."),
        (Format(bits=8, signed=False), {"signed": True}, "cannot have this sign. Got: True. Allowed: False."),
        (Format(bits=8), {"per": "channel"}, "cannot have this scale per. Got: channel. Allowed: tensor."),
        (Format(bits=8, per="channel"), {"per": "block"}, "cannot have this scale per. Got: block. Allowed: channel."),
        (Format(bits=8, per="row"), {"per": "tensor"}, "cannot have this scale per. Got: tensor. Allowed: row."),
    ],
    ids=str,
)
def test_a_refusal_names_the_layer_what_was_asked_and_what_may_be(fmt, asked, words):
    with pytest.raises(UnsupportedError) as e:
        constrain_format(fmt, layer="conv", **asked)
    assert "The chip's format for 'conv'" in str(e.value) and words in str(e.value)


def test_what_a_format_is_already_changes_nothing():
    for fmt in FORMATS.values():
        assert constrain_format(fmt, layer="conv") == fmt
        assert constrain_format(fmt, layer="conv", method=method_of(fmt), signed=fmt.signed, per=fmt.per) == fmt
    both = constrain_format(
        Format(bits=8, zero="any", signed="auto", per="channel"), layer="conv", signed=True, per="tensor"
    )
    assert (both.signed, both.per, both.zero) == (True, "tensor", "any")
