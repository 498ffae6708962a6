"""What all training algorithms share, by hand."""

from types import SimpleNamespace

import pytest
import torch

from chipfit.errors import ConfigError
from chipfit.quantizers import hosting
from chipfit.quantizers.algorithm import (
    EPS,
    Algorithm,
    algorithm_text,
    clip_quantize,
    positive,
    reach,
    threshold,
    unit_range,
    with_levels,
)
from chipfit.quantizers.algorithms.lsq import LSQ
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import TorchOps
from tests.build import stored as stored_as

S8, A8 = Grid(bits=8, qmin=-128, qmax=127), Grid(bits=8, qmin=0, qmax=255, zero="any")
POT = Grid(bits=8, qmin=-128, qmax=127, pot=True)


def stored(scale, zero=0, grid=S8, axis=None):
    return stored_as(scale, zero, on=grid, axis=axis)


def numbers(scale, zero=0):
    return {"scale": torch.tensor(scale), "zero_point": torch.tensor(zero)}


def test_a_scale_that_trains_stays_above_a_least_one():
    assert Algorithm().constants(stored([1.6, 1e-8], axis=0), None)["least"].tolist() == pytest.approx([EPS, 1e-8 / 16])
    least = torch.tensor(0.5)
    assert [float(positive(TorchOps, torch.tensor(s), least, S8)) for s in (3.0, -3.0, 0.1, -0.1)] == [3, 3, 0.5, 0.5]
    assert [float(positive(TorchOps, torch.tensor(s), least, POT)) for s in (1.4, 1.5, -6.0, 0.1)] == [1, 2, 8, 0.5]
    s = torch.tensor(1.5, requires_grad=True)
    positive(TorchOps, s, least, POT).backward()  # d 2^log2 s = 2 / 1.5
    assert float(s.grad) == pytest.approx(2 / 1.5)


def test_the_greatest_magnitude_that_is_held():
    for scale, zero, grid, want in ((0.5, 0, S8, 64), (0.5, 100, A8, 77.5), (0.5, 200, A8, 100)):
        assert float(reach(TorchOps, numbers(scale, zero), grid)) == want
        assert float(threshold(stored(scale, zero, grid=grid))) == want
    table = Grid(bits=2, qmin=0, qmax=2, kind="lut", table=(-3.0, 0.0, 2.0))
    assert float(threshold(stored(0.5, 0, grid=table))) == 1.5


@pytest.mark.parametrize(
    ("grid", "zero", "scale", "at"),
    [
        (S8, 0, 2 / 255, 0),
        (A8, 7, 2 / 255, 128),
        (Grid(bits=8, qmin=-128, qmax=127, zero="any"), 7, 2 / 255, 0),
        (Grid(bits=8, qmin=0, qmax=255), 0, 1 / 255, 0),
        (Grid(bits=8, qmin=0, qmax=255, zero=128), 128, 2 / 255, 128),
        (Grid(bits=2, qmin=0, qmax=2, zero="any"), 0, 1.0, 1),
    ],
)
def test_the_unit_range_reaches_to_minus_one_where_a_code_does(grid, zero, scale, at):
    s, z = unit_range(TorchOps, numbers(0.1, zero), grid)
    assert float(s) == pytest.approx(scale) and int(z) == at


def test_clipping_has_gradient_one_inside_and_that_of_the_ends_beyond():
    x = torch.tensor([-3.0, -1.0, 0.2, 1.0, 3.0], requires_grad=True)
    low, high = torch.tensor(-1.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    y = clip_quantize(TorchOps, x, low, high, (torch.tensor(0.5), torch.tensor(0.0)), Grid(bits=3, qmin=-2, qmax=2))
    assert y.tolist() == [-1, -1, 0, 1, 1]
    (y * torch.tensor([1.0, 2, 4, 8, 16])).sum().backward()
    assert x.grad.tolist() == [0, 2, 4, 8, 0] and float(low.grad) == 1 and float(high.grad) == 16


def test_an_algorithm_rounds_to_a_grid_whose_scale_trains_unless_it_says_otherwise():
    plain, x = Algorithm(), torch.tensor([0.3, -9.0])
    p = {**Algorithm().constants(stored(0.05), None), "scale": torch.tensor(0.05)}
    assert plain.call(TorchOps, x, p, S8).tolist() == pytest.approx([0.3, -6.4])
    assert plain.rescaled(TorchOps, {"scale": 2.0, "b": 3.0}, 4) == {"scale": 8}
    assert plain.rescaled(TorchOps, {"low": -1.0, "high": 2.0}, 4) == {"low": -4, "high": 8}


def test_levels_of_a_table_are_each_there_once():
    assert with_levels(S8, None) is S8 and with_levels(S8, [1.0, -1.0, 1.0, 0.0]).table == (-1, 0, 1)


def test_quantizers_that_stand_alone_train_or_not():
    calls = []

    class Trains:
        fits = "weights of torch"
        enabled = True

        def initialize_quantization(self, *arguments):
            calls.append(arguments)

        def convert2inferable(self):
            return "inferable"

        def __call__(self, x, training):
            return x, training

    trainable, off = Trains(), SimpleNamespace(convert2inferable=None, enabled=False)
    for quantizer in (trainable, off, abs):
        hosting.initialize(quantizer, (2,), "w", "host", "weights of torch")
    assert calls == [((2,), "w", "host")]
    with pytest.raises(Exception, match="is for another framework or role"):
        hosting.initialize(trainable, (2,), "w", "host", "activations of torch")
    assert [hosting.apply(q, -2, 1) for q in (trainable, off, abs)] == [(-2, True), -2, 2]
    assert [hosting.to_inferable(q) for q in (trainable, off, abs)] == ["inferable", off, abs]


def test_an_algorithm_is_written_as_its_name_and_what_differs_from_its_defaults():
    assert algorithm_text(LSQ()) == "lsq"
    assert algorithm_text(LSQ(use_grad_scaling=False, from_mean=True)) == "lsq(use_grad_scaling=False, from_mean=True)"

    class Own(LSQ):
        pass

    for own in (Own(), Algorithm()):
        with pytest.raises(ConfigError, match=f"{type(own).__name__} is not registered"):
            algorithm_text(own)
