"""The average of parameters is that of torch; scales stay within the platform's bounds; what it gives is deployed."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from chipfit.errors import ConfigError
from chipfit.training import EMA
from tests.build import quantized
from tests.training.small import DATA, Net, train
from tests.training.test_scale_bounds import bounded, broken


@pytest.fixture(scope="module")
def plain():
    return quantized(Net(), DATA, training="lsq")


def test_the_average_is_that_of_torch_and_is_deployed(plain):
    result = plain.as_calibrated()
    ema, theirs = EMA(result.model, 0.7), AveragedModel(result.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    train(result.model, 6, 0.05, after=lambda: (ema.step(), theirs.update_parameters(result.model)))
    expected = [p for p in theirs.module.parameters() if p.requires_grad]
    for a, b in zip(ema.averages, expected, strict=True):
        torch.testing.assert_close(a.data, b.data)
    last = result.model(DATA[1])
    with ema.swapped() as averaged:
        theirs.module.eval()
        out = averaged(DATA[1])
        assert torch.equal(out, theirs.module(DATA[1])) and not torch.equal(out, last)
        deployed = result.trained()
    assert torch.equal(result.model(DATA[1]), last)  # it has its own numbers again
    assert torch.equal(deployed.model(DATA[1]), out)
    assert deployed.verify([2 * DATA[2]]).exact
    other = EMA(plain.as_calibrated().model, 0.7)
    other.load_state_dict(ema.state_dict())
    assert other.steps == 6 and all(torch.equal(a, b) for a, b in zip(other.averages, ema.averages, strict=True))


def test_averages_that_break_a_bound_of_the_platform_are_brought_back():
    result = bounded("qnnpack")
    plan, model, ema = result.plan, result.model, EMA(result.model, 0.5)
    ema.step()
    for p, a in zip(ema.trained, ema.averages, strict=True):
        if any(p is q.scale for name, q in model._bounds.quantizers.items() if name.endswith("weight")):
            a.data.mul_(2.0**12)
    own = [p.detach().clone() for p in ema.trained]
    with torch.no_grad():
        for p, a in zip(ema.trained, ema.averages, strict=True):
            p.copy_(a)
        assert broken(plan, model.scale)
        for p, before in zip(ema.trained, own, strict=True):
            p.copy_(before)
    with ema.swapped():
        assert not broken(plan, model.scale) and not broken(result.trained().plan)
    assert all(torch.equal(p, o) for p, o in zip(ema.trained, own, strict=True))


@pytest.mark.parametrize("decay", [1, -0.1, 2])
def test_a_decay_is_a_share(decay, plain):
    with pytest.raises(ConfigError, match="0 to 1"):
        EMA(plain.model, decay)
