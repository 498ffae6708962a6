"""Batch norm folded in training, against torch itself, in float64."""

import copy

import pytest
import torch
from torch import nn

from chipfit.errors import ConfigError, DataError, UnsupportedError
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.quantizers.bn_fold import STRATEGIES

#: layer, batch norm, input
LAYERS = {
    "conv": (lambda: nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d, (5, 3, 7, 7)),
    "bias": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d, (5, 3, 7, 7)),
    "group": (lambda: nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d, (5, 4, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d, (5, 6, 7, 7)),
    "1d": (lambda: nn.Conv1d(3, 6, 3), nn.BatchNorm1d, (5, 3, 9)),
    "3d": (lambda: nn.Conv3d(3, 6, 2), nn.BatchNorm3d, (5, 3, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 6, 3, stride=2, output_padding=1), nn.BatchNorm2d, (5, 3, 4, 4)),
    "transposed in groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d, (5, 4, 4, 4)),
    "linear": (lambda: nn.Linear(3, 6), nn.BatchNorm1d, (5, 3)),
}
GAMMA = torch.tensor([1.5, -0.7, 0.3, 1.0, -2.0, 0.9])


def pair(kind: str = "conv", gamma: torch.Tensor = GAMMA):
    torch.manual_seed(0)
    make, norm, shape = LAYERS[kind]
    layer, bn = make().double(), norm(6).double()
    with torch.no_grad():
        bn.weight.copy_(gamma)
        bn.bias.uniform_(-1, 1)
        bn.running_mean.uniform_(-1, 1)
        bn.running_var.uniform_(0.5, 2)
    return layer, bn, torch.randn(shape, dtype=torch.float64)


def coarse(w: torch.Tensor) -> torch.Tensor:
    """To 4 bits, one scale for all, straight through."""
    s = w.detach().abs().max() / 7
    return w + ((w / s).round() * s - w).detach()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", [True, False])
def test_without_rounding_it_is_the_batch_norm(strategy, kind, training):
    layer, bn, x = pair(kind)
    own = copy.deepcopy(nn.Sequential(layer, bn)).train(training and strategy not in (0, 1))
    given, like = x.clone().requires_grad_(), x.clone().requires_grad_()
    module = FoldedBatchNorm(layer, bn, strategy).train(training)
    y, expected = module(given), own(like)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(given.grad, like.grad, rtol=1e-9, atol=1e-11)
    if strategy != 0:
        torch.testing.assert_close(bn.weight.grad, own[1].weight.grad, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(layer.weight.grad, own[0].weight.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("strategy", [1, 2, 3, 4])
def test_inference_is_the_rounded_fold(strategy, kind):
    layer, bn, x = pair(kind)
    module = FoldedBatchNorm(layer, bn, strategy, coarse).train()
    module(x)
    module.eval()
    alone = module.fold()
    with torch.no_grad():
        # folded by torch, which neither knows our formula nor our layouts
        if kind != "transposed in groups":
            own, norm = (layer.weight, layer.bias), (bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias)
            w, b = nn.utils.fuse_conv_bn_weights(*own, *norm, transpose=isinstance(layer, nn.ConvTranspose2d))
            torch.testing.assert_close(alone.weight, w, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(alone.bias, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(alone(x), nn.Sequential(layer, bn).eval()(x), rtol=1e-12, atol=1e-12)
        alone.weight.copy_(coarse(alone.weight))
        torch.testing.assert_close(module(x), alone(x), rtol=1e-12, atol=1e-12)
    assert type(alone) is type(layer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statistics_move_once_a_step_or_never(strategy):
    layer, bn, x = pair("bias")
    before, own = copy.deepcopy(bn), copy.deepcopy(nn.Sequential(layer, bn)).train()
    module = FoldedBatchNorm(layer, bn, strategy).train()
    for _ in range(2):
        module(x), own(x)
    expected = before if strategy in (0, 1) else own[1]
    torch.testing.assert_close(bn.running_mean, expected.running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bn.running_var, expected.running_var, rtol=1e-12, atol=1e-12)
    assert bn.num_batches_tracked == expected.num_batches_tracked


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gamma_of_zero_gives_beta_and_finite_gradients(strategy, kind):
    layer, bn, x = pair(kind, torch.tensor([1.0, 0.0, -1.0, 0.0, 2.0, -0.5]))
    module = FoldedBatchNorm(layer, bn, strategy, coarse).train()
    y = module(x)
    for c in (1, 3):
        torch.testing.assert_close(y[:, c], bn.bias[c].expand_as(y[:, c]))
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    if strategy in (1, 2, 3, 4):
        assert bn.weight.grad[1] != 0  # it can come back
    assert bn.running_var.isfinite().all()


@pytest.mark.parametrize("strategy", [-1, 1, 2, 3, 4])
def test_rounded_weights_are_trained_by_the_formula_of_the_strategy(strategy):
    """-1: BN(conv(x, Q(w)) + b); 1: conv(x, Q(w k)) + (b - mean) k + beta; 2: the same with numbers of the batch;
    3: conv(x, Q(w k)) sd / s + (b - m) gamma / s + beta; 4: BN(conv(x, Q(w k)) / k + b).
    """
    layer, bn, x = pair("group")
    w, b, gamma, beta = (p.detach() for p in (layer.weight, layer.bias, bn.weight, bn.bias))
    mean, sd = bn.running_mean.clone(), (bn.running_var + bn.eps).sqrt()
    k = gamma / sd

    def conv(weight):
        return torch.nn.functional.conv2d(x, coarse(weight), None, groups=2)

    def along(v):
        return v.view(1, -1, 1, 1)

    def normed(y):
        return torch.nn.functional.batch_norm(y, None, None, gamma, beta, training=True, eps=bn.eps)

    exact = layer(x).detach()
    m, s = exact.mean((0, 2, 3)), (exact.var((0, 2, 3), unbiased=False) + bn.eps).sqrt()
    want = {
        -1: lambda: normed(conv(w) + along(b)),
        1: lambda: conv(w * k.view(-1, 1, 1, 1)) + along((b - mean) * k + beta),
        2: lambda: conv(w * (gamma / s).view(-1, 1, 1, 1)) + along((b - m) * gamma / s + beta),
        3: lambda: conv(w * k.view(-1, 1, 1, 1)) * along(sd / s) + along((b - m) * gamma / s + beta),
        4: lambda: normed(conv(w * k.view(-1, 1, 1, 1)) / along(k) + along(b)),
    }
    found = FoldedBatchNorm(layer, bn, strategy, coarse).train()(x).detach()
    same = {n for n, formula in want.items() if torch.allclose(found, formula(), rtol=1e-9, atol=1e-9)}
    assert same == {strategy}


def test_a_batch_norm_in_eval_mode_stays_so():
    layer, bn, x = pair()
    before = bn.running_mean.clone()
    module = FoldedBatchNorm(layer, bn, 4).train()
    bn.eval()
    module(x)
    assert torch.equal(bn.running_mean, before)


def test_one_number_a_channel_has_no_statistics():
    layer, bn, x = pair("linear")
    with pytest.raises(DataError, match="more than one"):
        FoldedBatchNorm(layer, bn, 3).train()(x[:1])


def test_what_cannot_be_folded_is_refused():
    layer, bn, _ = pair()
    with pytest.raises(ConfigError, match="-1, 0, 1, 2, 3, 4"):
        FoldedBatchNorm(layer, bn, 5)
    with pytest.raises(UnsupportedError, match="Embedding"):
        FoldedBatchNorm(nn.Embedding(3, 3), bn, 1)
    with pytest.raises(UnsupportedError, match="statistics"):
        FoldedBatchNorm(layer, nn.BatchNorm2d(6, track_running_stats=False), 1)
    with pytest.raises(UnsupportedError, match="without their batch norm"):
        FoldedBatchNorm(layer, bn, -1).fold()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_folded_weight_can_be_set(kind):
    layer, bn, _ = pair(kind)
    module, wanted = FoldedBatchNorm(layer, bn, 1), torch.rand_like(layer.weight)
    module.set_folded_weight(wanted)
    torch.testing.assert_close(module.fold().weight, wanted)
