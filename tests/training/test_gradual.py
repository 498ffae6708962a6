"""Rounding that comes in little by little is none at share 0 and all of it at share 1, and nothing else is deployed."""

import pytest
import torch

from chipfit.errors import ConfigError, UnsupportedError
from chipfit.training import Gradual
from tests.build import quantized
from tests.training.small import DATA, Net, set_share


@pytest.fixture
def result():
    return quantized(Net(), DATA).trains("lsq")


def shares(model):
    return [q.share for q in model._quant.children()]


def test_from_the_float_model_to_the_quantized_one(result):
    model, x = result.model, DATA[1]
    quantized = model(x)
    set_share(model, 0.0)
    float_ = model(x)
    set_share(model, 1.0)
    gradual = Gradual(model, steps=4, start=2)
    seen = []
    for _ in range(8):
        seen.append(shares(model)[0])
        if seen[-1] == 0:
            assert torch.equal(model(x), float_)
        gradual.step()
    assert seen == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert torch.equal(model(x), quantized)


def test_a_share_of_one_quantizer_by_hand(result):
    q = result.model.quantizer_of("head.weight")
    w = result.model.weight("head.weight")
    whole = q(w)
    q.share = 0.25
    torch.testing.assert_close(q(w), 0.75 * w + 0.25 * whole)
    (g,) = torch.autograd.grad(q(w).sum(), q.scale)
    q.share = 1.0
    (full,) = torch.autograd.grad(q(w).sum(), q.scale)
    torch.testing.assert_close(g, 0.25 * full)


def test_layer_by_layer_in_the_order_of_execution(result):
    model = result.model
    operators = ["x stem.0.weight stem.0.bias", "relu", "body.weight body.bias conv2d_1", "relu_1"]
    operators += ["mean_globalavgpool", "head.weight head.bias"]
    gradual = Gradual(model, steps=2 * len(operators), by_layer=True)
    gradual.step(5)  # two are done, the third half way
    found = [{model.quantizer_of(t).share for t in names.split()} for names in operators]
    assert found == [{1.0}, {1.0}, {0.5}, {0.0}, {0.0}, {0.0}] and len(shares(model)) == 11
    gradual.finish()
    assert set(shares(model)) == {1.0}


def test_a_model_that_is_not_rounded_all_the_way_is_not_deployed(result):
    gradual = Gradual(result.model, steps=10)
    gradual.step(4)
    with pytest.raises(UnsupportedError, match=r"share of 0\.4.*finish"):
        result.trained()
    gradual.finish()
    assert result.trained().verify([DATA[2]]).exact


@pytest.mark.parametrize(("steps", "start"), [(0, 0), (-3, 0), (3, -1)])
def test_a_schedule_has_steps(steps, start, result):
    with pytest.raises(ConfigError, match="1 or more"):
        Gradual(result.model, steps, start)
