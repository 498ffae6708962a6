"""Distillation: the loss is that of torch's own functions, the teacher is the float model."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import chipfit
from chipfit.errors import ConfigError, PlanError, UnknownNameError
from chipfit.training import Distillation, divergence, teacher
from tests.build import quantized
from tests.training.small import DATA, Net


@pytest.fixture(scope="module")
def net():
    return Net().eval()


@pytest.fixture(scope="module")
def plain(net):
    return quantized(net, DATA, training="lsq", settings=chipfit.Settings(repairs="off"))


def test_a_divergence_by_hand():
    zero, known = torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]])
    by_hand = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(zero, known).item() == pytest.approx(by_hand, rel=1e-6)
    assert divergence(zero, 4 * known, 4.0).item() == pytest.approx(16 * by_hand, rel=1e-6)


def test_it_is_the_divergence_of_torch_and_its_gradient():
    s, t = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    ours = divergence(s, t, 2.0)
    theirs = 4 * F.kl_div(F.log_softmax(s / 2, -1), F.softmax(t.detach() / 2, -1), reduction="batchmean")
    torch.testing.assert_close(ours, theirs)
    (a,), (b,) = torch.autograd.grad(ours, s, retain_graph=True), torch.autograd.grad(theirs, s)
    torch.testing.assert_close(a, b)
    ours.backward()
    assert t.grad is None
    images = divergence(s.reshape(2, 3, 5).transpose(1, 2), t.reshape(2, 3, 5).transpose(1, 2), 2.0, axis=1)
    torch.testing.assert_close(images, ours)


def test_the_teacher_is_the_float_model_and_keeps_no_second_copy(net, plain):
    result = plain.as_calibrated()
    known = teacher(result)
    torch.testing.assert_close(known(DATA[1]), net(DATA[1]), rtol=1e-4, atol=1e-5)
    assert not list(known.parameters()) and not known.state_dict()
    held = {w.data_ptr() for w in Distillation(result).float_graph.weights.values()}
    assert held == {w.data_ptr() for w in result.graph.weights.values()}


def test_the_loss_is_that_of_both_models_by_themselves(net, plain):
    result = plain.as_calibrated()
    distill = Distillation(result, temperature=3.0, layers={"body": 0.5, "head": 2.0}).train()
    outputs, loss = distill(DATA[0])
    student = copy.deepcopy(result.model)
    seen = {}
    hooks = {"body": net.body, "head": net.head}
    handles = [m.register_forward_hook(lambda *a, k=k: seen.__setitem__(k, a[2])) for k, m in hooks.items()]
    logits, targets = F.log_softmax(student(DATA[0]) / 3, -1), F.softmax(net(DATA[0]) / 3, -1)
    expected = 9 * F.kl_div(logits, targets, reduction="batchmean")
    for h in handles:
        h.remove()
    names = {n.layer: n.output for n in result.graph.nodes}
    ours = student.run_flat([DATA[0]], [names["body"], names["head"]])
    expected = expected + 0.5 * F.mse_loss(ours[1], seen["body"]) + 2.0 * F.mse_loss(ours[2], seen["head"])
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(outputs, student(DATA[0]))
    loss.backward()
    assert result.model.weight("body.weight").grad.abs().max() > 0
    assert result.model.quantizer_of("body.weight").scale.grad.abs().max() > 0


def test_learning_from_the_float_model_brings_the_outputs_nearer(net, plain):
    result = plain.as_calibrated()
    with torch.no_grad():
        result.model.weight("head.weight").add_(torch.randn(5, 6) / 4)
    before = F.mse_loss(result.model(DATA[0]), net(DATA[0]))
    distill = Distillation(result, temperature=2.0, layers=["head"]).train()
    optimizer = torch.optim.Adam([p for p in distill.parameters() if p.requires_grad], 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        distill(DATA[0])[1].backward()
        optimizer.step()
    distill.eval()
    assert F.mse_loss(result.model(DATA[0]), net(DATA[0])) < 0.3 * before
    assert result.trained().verify([DATA[2]]).exact


def test_a_model_that_ends_in_a_softmax_learns_from_its_logarithm(net):
    ending = nn.Sequential(net, nn.Softmax(-1)).eval()
    result = quantized(ending, DATA, overrides={"1": "float"})
    loss = Distillation(result, temperature=2.0)(DATA[0])[1]
    p, q = ending(DATA[0]), result.model(DATA[0])
    torch.testing.assert_close(loss, divergence(q.log(), p.log(), 2.0), rtol=1e-3, atol=1e-6)


def test_what_is_not_understood_is_refused(plain):
    with pytest.raises(UnknownNameError, match="body"):
        Distillation(plain, layers=["bodi"])
    with pytest.raises(ConfigError, match="above 0"):
        Distillation(plain, temperature=0)
    with pytest.raises(PlanError, match="not a quantized model"):
        chipfit.training.EMA(nn.Linear(2, 2))
