"""Centring and equalization inside `quantize`: tried where bits are few, kept where held-out images lose no more."""

from pathlib import Path

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.engine.run import run
from tests.build import NEAREST, model_of, quantized, randn

INPUTS = Path(__file__).parents[2] / "benchmarks/platforms/inputs.yaml"
FOUR = {"*": {"bits": 4, "activation_bits": 4}}
OFF = Settings(rounding="gptq", centre="off", equalize_groups="off")
TRIED = "centre and "


def net(groups=12):
    """A bottleneck, a depthwise convolution, and channels of very unlike magnitudes."""
    torch.manual_seed(0)
    layers = {"first": nn.Conv2d(3, 4, 3), "wide": nn.Conv2d(4, 12, 1)}
    layers |= {"filter": nn.Conv2d(12, 12, 3, padding=1, groups=groups), "narrow": nn.Conv2d(12, 4, 1)}
    m = model_of(forward, **layers, last=nn.Conv2d(4, 8, 1), head=nn.Linear(8, 5))
    k = torch.logspace(-1.5, 0.5, 12)[torch.randperm(12)]
    with torch.no_grad():
        m.wide.weight.mul_(k.view(-1, 1, 1, 1))
        m.wide.bias.mul_(k)
        m.filter.weight.div_(k.view(-1, 1, 1, 1) if groups > 1 else k.view(1, -1, 1, 1))
        m.first.bias.copy_(torch.tensor([3.0, -2.0, 1.0, 0.0]))
        m.head.weight.mul_(4.0)
    return m


def forward(m, x):
    x = m.first(x)
    x = x + m.narrow(torch.relu(m.filter(torch.relu(m.wide(x)))))
    return m.head(torch.relu(m.last(x)).mean((2, 3)))


DATA = list(randn(128, 3, 10, 10, seed=1).split(32))
NEW = randn(256, 3, 10, 10, seed=2)


def fitted(model: nn.Module, settings: Settings, data=DATA, overrides=None):
    return quantized(model, data, INPUTS, overrides=overrides or FOUR, settings=settings)


def error(result, model: nn.Module) -> float:
    with torch.no_grad():
        want = model(NEW)
        return float((result.model.eval()(NEW) - want).square().mean() / want.square().mean())


def said(result) -> list[str]:
    return [n for n in result.plan.rewrites if n.startswith(TRIED)]


def test_the_whole_recipe_takes_what_gains():
    model = net()
    plain, best, data = fitted(model, OFF), fitted(model, chipfit.BEST), torch.cat(DATA)
    assert error(best, model) < 0.9 * error(plain, model)
    (note,) = said(best)
    assert note.startswith("centre and equalize_groups taken: on 16 held-out images the loss to the float model is ")
    assert not said(plain)
    assert any(n.startswith("centred the result of 'first'") for n in best.plan.rewrites)
    with torch.no_grad():  # the float network is the same up to the biases and weights that the walk has corrected
        before = best.decision.graph
        (got,) = run(before, [data]).values()
        torch.testing.assert_close(got, model(data), rtol=1e-4, atol=1e-4)
    assert not torch.equal(before.weights["wide.weight"], model.wide.weight)


def test_what_loses_more_is_left_with_both_losses(monkeypatch):
    model = net()
    monkeypatch.setattr("chipfit.adaptation.compare_plans", lambda *a: (False, "the loss is 2, 1 without"))
    result, plain = fitted(model, chipfit.BEST), fitted(model, OFF)
    assert said(result) == [
        "centre and equalize_groups not taken: the loss is 2, 1 without, by rounded activations alone"
    ]
    for k, w in plain.graph.weights.items():
        assert torch.equal(w, result.graph.weights[k])
    scales = {k: t.scale for k, t in plain.plan.tensors.items() if t.quantized}
    assert all(torch.equal(scale, result.plan[k].scale) for k, scale in scales.items())


def test_without_images_to_hold_out_nothing_is_rewritten():
    model = net()
    result = fitted(model, chipfit.BEST, [DATA[0][:4]])
    assert said(result) == ["centre and equalize_groups not taken: there are too few images to hold some out"]
    assert torch.equal(result.decision.graph.weights["wide.weight"], model.wide.weight)


def test_where_no_weight_would_be_changed_nothing_is_tried_or_said(monkeypatch):
    monkeypatch.setattr("chipfit.adaptation.compare_plans", None)  # is not asked
    alone = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Flatten())
    assert not said(fitted(alone, chipfit.BEST))


@pytest.mark.parametrize(
    "model, settings, overrides",
    [
        (net(groups=1), chipfit.BEST, FOUR),
        (net(), chipfit.BEST, {"*": {"bits": 4, "activation_bits": 8}}),
        (net(), NEAREST, FOUR),
        (net(), Settings(rounding="gptq", rounding_guard=False), FOUR),
        (net(), Settings(rounding="gptq", seconds=5), FOUR),
    ],
)
def test_elsewhere_they_are_not_tried(model, settings, overrides):
    result = fitted(model, settings, overrides=overrides)
    before = result.decision.graph
    assert not said(result) and torch.equal(before.weights["wide.weight"], model.wide.weight)


def test_each_can_be_asked_for_and_refused():
    model = net()
    one = fitted(model, Settings(rounding="off", centre="always"))
    assert torch.equal(one.graph.weights["wide.weight"], model.wide.weight)
    assert not torch.equal(one.graph.weights["first.bias"], model.first.bias)
    other = fitted(model, Settings(rounding="off", equalize_groups="always"))
    assert not torch.equal(other.graph.weights["wide.weight"], model.wide.weight)
    half = fitted(model, Settings(rounding="gptq", equalize_groups="off"))
    assert torch.equal(half.decision.graph.weights["wide.weight"], model.wide.weight)
    with pytest.raises(chipfit.errors.PlanError, match="'always', 'off'"):
        Settings(centre="sometimes")
