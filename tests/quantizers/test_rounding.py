"""The rounding rules that platforms name: against arithmetic on paper, in torch and Keras, training and integers."""

import math
from fractions import Fraction

import pytest
import torch

from chipfit.frameworks.torch.modules import fake_quantize_ste
from chipfit.quantizers.grids import Grid, fake_quantize, quantize
from chipfit.quantizers.rounding import ROUNDINGS, round_by_rule
from chipfit.ranges import choose

#: rule -> what -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.7 and -0.7 become
KEPT_BY_USER = {
    "half_even": [-2, -2, 0, 0, 2, 2, 1, -1],
    "half_away": [-3, -2, -1, 1, 2, 3, 1, -1],
    "half_up": [-2, -1, 0, 1, 2, 3, 1, -1],
    "floor": [-3, -2, -1, 0, 1, 2, 0, -1],
    "trunc": [-2, -1, 0, 0, 1, 2, 0, 0],
}
X = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.7, -0.7])


def grid(rounding, **more):
    return Grid(**{"bits": 8, "qmin": -128, "qmax": 127, "rounding": rounding, **more})


@pytest.mark.parametrize("rule", KEPT_BY_USER)
def test_codes_are_those_on_paper_however_they_are_computed(rule):
    one, zero = torch.tensor(0.5), torch.tensor(3, dtype=torch.int32)
    want = torch.tensor(KEPT_BY_USER[rule])
    assert quantize(X * 0.5, one, zero, grid(rule)).tolist() == (want + 3).tolist()
    assert fake_quantize(X * 0.5, one, zero, grid(rule)).tolist() == (want * 0.5).tolist()
    trained = fake_quantize_ste((X * 0.5).requires_grad_(), one, zero, grid(rule))
    assert trained.tolist() == (want * 0.5).tolist()
    compiled = torch.compile(fake_quantize_ste, backend="eager")
    assert compiled(X * 0.5, one, zero, grid(rule)).tolist() == (want * 0.5).tolist()


@pytest.mark.parametrize("rule", KEPT_BY_USER)
def test_keras_rounds_alike(rule):
    ops = pytest.importorskip("keras").ops
    assert ops.convert_to_numpy(ROUNDINGS[rule](ops.convert_to_tensor(X.numpy()), ops)).tolist() == KEPT_BY_USER[rule]


def test_the_number_before_a_half_is_no_half():
    below = torch.tensor([0.49999997, -0.49999997, 8388607.5])  # adding 0.5 in float32 would reach the next integer
    assert ROUNDINGS["half_away"](below).tolist() == [0, 0, 8388608]
    assert ROUNDINGS["half_up"](below).tolist() == [0, 0, 8388608]


def test_a_range_is_searched_for_the_rule_that_the_chip_has():
    x = torch.rand(1, 4000, generator=torch.Generator().manual_seed(0)) * 10
    scales = {r: float(choose(x, grid(r, bits=3, qmin=-4, qmax=3), rule="mse").scale) for r in ("half_even", "trunc")}
    assert scales["trunc"] != scales["half_even"]
    s, z = torch.tensor(scales["trunc"]), torch.tensor(0, dtype=torch.int32)

    def error(scale: float) -> float:
        return float(
            (fake_quantize(x, torch.tensor(scale), z, grid("trunc", bits=3, qmin=-4, qmax=3)) - x).square().mean()
        )

    assert error(float(s)) <= min(error(float(s) * f) for f in (0.8, 0.9, 1.1, 1.2)) * 1.01


def test_halves_round_away_from_zero_as_in_arithmetic_for_every_half_precision_number():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[torch.isfinite(every)]
    away = [math.copysign(math.floor(abs(x) + 0.5), x) for x in finite.tolist()]  # exact in float64
    found = round_by_rule(finite.clone(), "half_away")
    assert found.tolist() == away
    assert torch.equal(found.view(torch.int16), ROUNDINGS["half_away"](finite).view(torch.int16))  # and the sign of 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_of_halves_round_to_the_nearest_integer(dtype):
    halves = torch.tensor([0.5, 1.5, 2.5, 1023.5, 2.0**22 + 0.5, 2.0**23 + 1, 2.0**24 + 2], dtype=dtype)
    below, above = (torch.nextafter(halves, halves.new_tensor(end)) for end in (0.0, math.inf))
    for x in (halves, below, above, -halves, -below, -above):
        exact = [math.copysign(math.floor(abs(Fraction(v)) + Fraction(1, 2)), v) for v in x.tolist()]
        assert round_by_rule(x.clone(), "half_away").tolist() == exact
