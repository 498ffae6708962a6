"""Thresholds, ranges and tables as grids, by hand."""

import inspect

import pytest
import torch

from chipfit.errors import ConfigError
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.inferable import CLASSES, inferable_for, parameters, symmetric, uniform

X = torch.tensor([-3.0, -1.0, -0.3, 0.0, 0.3, 0.6, 1.0, 9.0])


def made(name, **arguments):
    return CLASSES[f"{name}InferableQuantizer"](**arguments)


@pytest.mark.parametrize(
    ("signed", "scale", "ends", "rounded"),
    [
        (True, 0.25, (-4, 3), [-1, -1, -0.25, 0, 0.25, 0.5, 0.75, 0.75]),  # 0.6 / 0.25 = 2.4
        (False, 0.125, (0, 7), [0, 0, 0, 0, 0.25, 0.625, 0.875, 0.875]),
    ],
)
def test_a_threshold_of_one_in_three_bits(signed, scale, ends, rounded):
    s = symmetric(3, 1.0, signed)
    assert float(s.scale) == scale and (s.grid.qmin, s.grid.qmax) == ends and s.grid.per == "tensor" and not s.grid.pot
    assert s.round(X).tolist() == rounded and float(parameters(s)["threshold"]) == 1.0
    each = symmetric(3, [1.0, 4.0], signed, 1, pot=True)
    assert each.scale.tolist() == [scale, 4 * scale] and each.axis == 1 and each.grid.per == "channel" and each.grid.pot
    assert parameters(each)["threshold"].tolist() == [1, 4]


def test_a_range_is_widened_to_zero_and_shifted_onto_it():
    s = uniform(2, -1.0, 2.0)
    assert (float(s.scale), int(s.zero_point), s.grid.qmin, s.grid.qmax) == (1, 1, 0, 3)
    assert [float(v) for v in parameters(s).values()] == [-1, 2] and list(parameters(s)) == ["range_min", "range_max"]
    s = uniform(3, [1.0, -7.0, -1.0], [3.5, -2.0, 2.0], 0)  # 0 .. 3.5, -7 .. 0, and 3 in steps of 3 / 7
    assert s.scale.tolist() == pytest.approx([0.5, 1.0, 3 / 7]) and s.zero_point.tolist() == [0, 7, 2] and s.axis == 0
    assert s.grid.per == "channel" and uniform(2, -1.0, 2.0).grid.per == "tensor"
    low, high = parameters(s).values()
    assert low.tolist() == pytest.approx([0, -7, -6 / 7]) and high.tolist() == pytest.approx([3.5, 0, 15 / 7])


@pytest.mark.parametrize(
    "bad", [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (-1.0, float("inf")), ([1.0], [2.0, 3.0])]
)
def test_ranges_that_are_none_are_refused(bad):
    with pytest.raises(ConfigError, match="A range is empty"):
        uniform(8, *bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), [1.0, 0.0]])
def test_thresholds_that_are_none_are_refused(bad):
    with pytest.raises(ConfigError, match="A threshold is not positive"):
        symmetric(8, bad, True)


def test_a_threshold_is_a_power_of_two_where_the_grid_demands_it():
    with pytest.raises(ConfigError, match=r"power of 2 but is \[2, 3\]"):
        symmetric(8, [2.0, 3.0], True, 0, pot=True)


@pytest.mark.parametrize(
    ("bits", "table", "signed", "width"),
    [
        (1, [-8, 7], True, 4),
        (1, [0, 16], False, 4),  # without a sign, the threshold itself is an entry
        (2, [-8, 0, 1, 7], True, 4),
        (8, [0, 1], True, 8),
    ],
)
def test_a_table_holds_integers_of_its_width(bits, table, signed, width):
    s = symmetric(bits, 4.0, signed, table=[*table, table[0]], entry_bits=width)
    assert s.grid.table == tuple(table) and s.grid.kind == "lut" and s.grid.bits == bits
    assert float(s.scale) == 4.0 / (1 << width - int(signed)) and float(parameters(s)["threshold"]) == 4.0
    assert parameters(s)["lut_values"] == tuple(table)


@pytest.mark.parametrize(
    ("bits", "table", "signed", "words"),
    [
        (9, [0, 1], True, "too large"),
        (1, [0], True, "does not fit its width.*1 entries"),
        (1, [0, 1, 2], True, "does not fit its width.*3 entries.*2 to 2 with 1 bits"),
        (2, [0, 1.5], True, "out of bounds"),
        (2, [0, -1.5], True, "out of bounds"),
        (2, [-9, 0], True, "out of bounds.*from -8 to 7"),
        (2, [0, 8], True, "out of bounds"),
        (2, [-1, 8], False, "out of bounds.*from 0 to 16"),
        (2, [0, 17], False, "out of bounds"),
    ],
)
def test_tables_that_are_none_are_refused(bits, table, signed, words):
    with pytest.raises(ConfigError, match=words):
        symmetric(bits, 4.0, signed, table=table, entry_bits=4)


def test_entries_are_of_eight_bits_and_channels_are_those_of_the_tensor_by_default():
    assert float(symmetric(2, 1.0, True, table=[-128, 0, 127]).scale) == 1 / 128
    lut, pot = (str(inspect.signature(CLASSES[f"Weights{n}InferableQuantizer"])) for n in ("LUTSymmetric", "POT"))
    assert lut.endswith("per_channel, channel_axis=None, input_rank=None, lut_values_bitwidth=8, eps=1e-08)")
    assert pot == "(num_bits, threshold, per_channel, channel_axis=None, input_rank=None)"


def test_the_ends_of_a_range_are_those_after_its_shift():
    ends = {"min_range": [-1.0, 0.5], "max_range": [2.0, 3.0]}
    q = made("WeightsUniform", num_bits=3, **ends, per_channel=True, channel_axis=0)
    assert q.min_range == pytest.approx([-6 / 7, 0.0]) and q.max_range == pytest.approx([15 / 7, 3.0])


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("WeightsPOT", {"threshold": [1.0], "per_channel": True}, "without a channel_axis"),
        ("WeightsPOT", {"threshold": 1.0, "per_channel": False}, "to be a list"),
        ("WeightsPOT", {"threshold": [], "per_channel": False}, "to be a list"),
        ("WeightsPOT", {"threshold": [1.0, 2.0], "per_channel": False}, "takes one threshold"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name, arguments, words):
    with pytest.raises(ConfigError, match=words):
        made(name, num_bits=8, **arguments)


def test_a_table_of_one_tensor_has_many_entries():
    q = made("WeightsLUTPOT", num_bits=2, lut_values=[-3, 0, 3], threshold=[1.0], per_channel=False)
    assert q.stored.grid.table == (-3, 0, 3) and q.stored.axis is None
    ignored = made("WeightsPOT", num_bits=2, threshold=[1.0], per_channel=False, channel_axis=3)
    assert ignored.stored.axis is None and ignored.stored.scale.dim() == 0


@pytest.mark.parametrize(
    ("stored", "role", "name"),
    [
        (symmetric(4, 1.5, True), "weight", "WeightsSymmetric"),
        (symmetric(4, [1.0, 2.0], True, 1, pot=True), "weight", "WeightsPOT"),
        (uniform(4, [-1.0, -2.0], [1.0, 3.0], 0), "weight", "WeightsUniform"),
        (symmetric(2, 2.0, True, table=[-7, 0, 7], entry_bits=4), "weight", "WeightsLUTSymmetric"),
        (symmetric(2, 2.0, True, pot=True, table=[-7, 0, 7], entry_bits=4), "weight", "WeightsLUTPOT"),
        (symmetric(4, 1.5, False), "activation", "ActivationSymmetric"),
        (symmetric(4, 2.0, True, pot=True), "activation", "ActivationPOT"),
        (uniform(4, -1.0, 3.0), "activation", "ActivationUniform"),
        (symmetric(2, 2.0, False, pot=True, table=[0, 7, 16], entry_bits=4), "activation", "ActivationLutPOT"),
    ],
)
def test_every_grid_has_a_class_that_makes_it_again(stored, role, name):
    q = inferable_for(stored, role)
    assert type(q).__name__ == f"{name}InferableQuantizer" and q.stored.grid == stored.grid
    torch.testing.assert_close(q.stored.scale.reshape(-1), stored.scale.reshape(-1))
    assert torch.equal(q.stored.zero_point.reshape(-1), stored.zero_point.reshape(-1)) and q.stored.axis == stored.axis
    w = torch.linspace(-3, 3, 8).view(2, 2, 2)
    torch.testing.assert_close(q(w), stored.round(w))
    again = type(q).from_config(q.get_config())
    assert torch.equal(again(w), q(w)) and again.get_config() == q.get_config()


def test_a_narrow_grid_has_the_threshold_of_its_bits():
    narrow = symmetric(4, 1.0, True)
    narrow = narrow.with_(grid=Grid(bits=4, qmin=-7, qmax=7))
    assert float(parameters(narrow)["threshold"]) == 1.0
