"""Gradient accumulation and gradient checkpointing change neither losses, gradients, scales nor statistics."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from tests.build import quantized
from tests.training.small import DATA, LABELS, NormedNet, train


class Drops(NormedNet):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.2, self.training))


@pytest.fixture(scope="module")
def plain():
    return quantized(Drops(), DATA)


def trained(model, forward=None):
    """Losses, and what the model holds after three steps: numbers, and gradients of the last step."""
    torch.manual_seed(0)
    losses = train(model, 3, 0.1, momentum=0.9, forward=forward)
    grads = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, {**grads, **model.state_dict()}


def same(one, other):
    (losses, a), (others, b) = one, other
    return losses == others and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("bn_fold", [0, -1, 1, 2, 3, 4])
def test_checkpointing_changes_nothing(bn_fold, plain):
    model = plain.trains({"method": "lsq", "bn_fold": bn_fold}).model
    expected = trained(copy.deepcopy(model))
    assert sum(name.startswith("gradient") for name in expected[1]) > 8
    for reentrant in (False, True):
        net = copy.deepcopy(model)
        given = trained(net, lambda x, net=net, r=reentrant: checkpoint(net, x.requires_grad_(r), use_reentrant=r))
        assert same(given, expected), reentrant
        assert net.steps == 3
    DATA[0].requires_grad_(False)
    model.segments = 3
    assert same(trained(model), expected)


def test_statistics_that_are_frozen_later_are_those_of_both_passes(plain):
    """Repeated passes use what was remembered a step before only where the step itself remembered something."""
    model = plain.trains({"method": "lsq", "bn_fold": 4, "bn_momentum": 0.9}).model
    trained(model)
    model.bn_fold = 1
    expected = trained(copy.deepcopy(model))
    assert same(trained(model, lambda x: checkpoint(model, x, use_reentrant=False)), expected)


def test_without_that_care_it_would(plain, monkeypatch):
    """The repeated pass would round by the statistics that the first one left, and remember its batch twice."""
    model = plain.trains({"method": "lsq", "bn_fold": 4}).model
    expected = trained(copy.deepcopy(model))
    monkeypatch.setattr("chipfit.frameworks.torch.lower.is_recomputation", lambda: False)
    assert not same(trained(model, lambda x: checkpoint(model, x, use_reentrant=False)), expected)


def test_segments_keep_less_for_the_backward_pass(plain):
    def kept(segments):
        model, total = plain.as_calibrated().trains("lsq").model.train(), []
        model.segments = segments
        with torch.autograd.graph.saved_tensors_hooks(lambda t: total.append(t.numel()) or t, lambda t: t):
            model(DATA[0])
        return sum(total)

    assert kept(4) < 0.2 * kept(1)


def test_a_layer_by_hand_is_repeated_alike():
    torch.manual_seed(0)
    layer = FoldedBatchNorm(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), 3, lambda w: w + ((w * 8).round() / 8 - w).detach())
    with torch.no_grad():
        layer.train()(DATA[1])
    found = []
    for forward in (lambda m: m(DATA[0]), lambda m: checkpoint(m, DATA[0], use_reentrant=False)):
        m = copy.deepcopy(layer)
        forward(m).square().sum().backward()
        found.append([*(p.grad for p in m.parameters()), *m.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_accumulated_gradients_are_those_of_the_whole_batch(plain):
    """LSQ's factor counts the numbers of a batch that share a scale: with it, parts count for more."""
    model = plain.trains("lsq(use_grad_scaling=False)").model
    x, y = DATA[0], LABELS
    nn.functional.cross_entropy(model(x), y).backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for part in (slice(0, 2), slice(2, 8)):
        share = (part.stop - part.start) / len(x)
        (share * nn.functional.cross_entropy(model(x[part]), y[part])).backward()
    for n, g in whole.items():
        found = model.get_parameter(n).grad  # sums in another order let a number round to the other side
        torch.testing.assert_close(found, g, rtol=0.01, atol=0.01 * g.abs().max().item())
