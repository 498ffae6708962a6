"""Oscillations by hand: what counts as one, its frequency, freezing, dampening."""

import copy

import pytest
import torch
from torch import nn

from chipfit.errors import ConfigError, UnsupportedError
from chipfit.training import Oscillations, dampening
from tests.build import model_of, quantized
from tests.training.small import DATA, NormedNet, train


@pytest.fixture
def one():
    """Three weights on an 8-bit grid whose scale is made 1."""
    net = model_of(lambda m, x: m.fc(x), fc=nn.Linear(3, 1, bias=False))
    result = quantized(net, torch.randn(8, 3), training="lsq")
    result.model.quantizer_of("fc.weight").scale.data.fill_(1.0)
    return result


@pytest.fixture(scope="module")
def normed():
    return quantized(NormedNet(), DATA)


def walk(result, tracker, *rows):
    """Let the weights be each row of numbers in turn; returns what they are after each step of the tracker."""
    w, out = result.model.weight("fc.weight"), []
    for row in rows:
        w.data.copy_(torch.tensor([row]))
        tracker.step()
        out.append(w.detach()[0].tolist())
    return out


def test_a_change_against_the_last_one_is_an_oscillation(one):
    one.model.weight("fc.weight").data.zero_()
    tracker = Oscillations(one.model, momentum=0.5)
    # goes back and forth; goes on and on; comes back after a rest
    walk(one, tracker, [0.9, 1.2, 0.6], [0.1, 2.2, 0.8], [0.9, 2.9, 1.4], [0.9, 4.2, 0.4])
    by_hand = [0.5 * (0.5 * (0.5 * 0 + 0.5) + 0.5), 0.0, 0.5]
    assert tracker.frequency["fc.weight"][0].tolist() == pytest.approx(by_hand)


def test_a_weight_that_oscillates_too_often_stays_at_the_average_of_its_codes(one):
    w = one.model.weight("fc.weight")
    w.data.zero_()
    tracker = Oscillations(one.model, momentum=0.25, threshold=0.3)
    seen = walk(one, tracker, *[[float(k % 2 == 0), 3.3, 0.2] for k in range(4)])
    # f = 0, 0.25, 0.4375: frozen in the third step; the average is then 0.25, 0.1875, 0.3906, which is nearest to 0
    assert [row[0] for row in seen] == [1.0, 0.0, 0.0, 0.0]
    assert tracker.frozen["fc.weight"][0].tolist() == [True, False, False]
    assert w.detach()[0, 1:].tolist() == pytest.approx([3.3, 0.2])  # the others are left alone
    walk(one, tracker, [7.0, 7.0, 7.0])
    assert w.detach()[0].tolist() == [0.0, 7.0, 7.0]
    w.data.fill_(2.0)
    frozen_at_two = Oscillations(one.model, momentum=0.9, threshold=0.5)
    walk(one, frozen_at_two, [3.0] * 3, [2.0] * 3, [3.0] * 3)
    one.model.quantizer_of("fc.weight").scale.data.mul_(0.5)  # a frozen weight follows its scale
    assert walk(one, frozen_at_two, [9.0] * 3) == [[1.0, 1.0, 1.0]]


def test_what_was_seen_is_saved(one):
    one.model.weight("fc.weight").data.zero_()
    tracker = Oscillations(one.model, momentum=0.5, threshold=0.4)
    walk(one, tracker, [0.9, 1.2, 0.6], [0.1, 2.2, 0.8])
    other = Oscillations(one.model, momentum=0.5, threshold=0.4)
    other.load_state_dict(tracker.state_dict())
    assert torch.equal(other.frozen["fc.weight"], tracker.frozen["fc.weight"]) and tracker.frozen["fc.weight"].any()


def test_dampening_by_hand(one):
    w = one.model.weight("fc.weight")
    w.data.copy_(torch.tensor([[0.25, -2.4, 500.0]]))
    loss = dampening(one.model)
    loss.backward()
    assert loss.item() == pytest.approx(0.0625 + 0.16)
    assert w.grad[0].tolist() == pytest.approx([0.5, -0.8, 0.0], abs=1e-6)
    assert one.model.quantizer_of("fc.weight").scale.grad is None
    for _ in range(60):
        w.grad = None
        dampening(one.model).backward()
        w.data -= 0.1 * w.grad
    assert w.detach()[0].tolist() == pytest.approx([0.0, -2.0, 500.0], abs=1e-3)


def test_weights_beyond_the_ends_of_a_table_are_not_dampened():
    net, four = model_of(lambda m, x: m.fc(x), fc=nn.Linear(4, 1, bias=False)), {"*": {"bits": 4}}
    result = quantized(net, torch.randn(8, 4), "coreml", overrides=four, training={"weights": "lut"})
    q = result.model.quantizer_of("fc.weight")
    levels = q.dequantize(torch.arange(q.trained_grid().levels)[None])[0].detach()
    result.model.weight("fc.weight").data.copy_(torch.stack([levels[0] - 9, levels[1], levels[-1] + 9, levels[2]]))
    assert dampening(result.model).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("bn_fold", [0, 1, 3, 4])
def test_frozen_weights_keep_their_codes_through_training_and_are_deployed(bn_fold, normed):
    result = normed.trains({"method": "lsq", "bn_fold": bn_fold})
    model, free = result.model, copy.deepcopy(result.model)
    tracker = Oscillations(model, momentum=0.5, threshold=0.4)
    held = {}
    train(model, 4, 0.1, momentum=0.9, after=tracker.step)
    for name, track in zip(tracker.frequency, tracker.tracks):  # as if all had oscillated
        folds = model.folds_in_each_step(name)
        track.frozen |= (
            model.normalized_layer(name).norm.gamma.reshape(track_shape(model, name)) != 0 if folds else True
        )
        held[name] = track.codes.clone()
    train(model, 2, 0.1, momentum=0.9, after=tracker.step)
    for steps in (4, 2):
        train(free, steps, 0.1, momentum=0.9)
    after, unfrozen = result.trained(), {}
    for name, codes in held.items():
        frozen = tracker.frozen[name]
        now = after.plan[name].quantize(after.graph.weights[name]).float()
        assert frozen.float().mean() > 0.7 and torch.equal(now[frozen], codes[frozen]), name
        q = free.quantizer_of(name)
        unfrozen[name] = bool((q.quantize(q.reals(free.weight_to_round(name))) != codes).any())
    assert all(unfrozen.values())  # without freezing they went on
    assert after.verify([2 * DATA[2]]).exact


def track_shape(model, name):
    """[C] as it broadcasts against a weight."""
    at = model.normalized_layer(name).at
    return at.factor if len(at.factor) == len(model.weight(name).shape) else (1, at.factor[2], 1, 1)


def test_what_cannot_be_frozen_is_refused(normed):
    with pytest.raises(UnsupportedError, match=r"DoReFa transforms '.*weight' before it is rounded"):
        Oscillations(normed.trains("dorefa").model, threshold=0.1).step()
    Oscillations(normed.trains("dorefa").model).step()
    for wrong in ({"momentum": 0}, {"threshold": 1.5}, {"threshold": 0.0}):
        with pytest.raises(ConfigError, match="shares"):
            Oscillations(normed.model, **wrong)
