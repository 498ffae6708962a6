"""A linear layer of PyTorch, the batch norm behind it and the rounding of its weight as one module that trains."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from chipfit.errors import DataError, UnsupportedError
from chipfit.plan.training import check_folds
from chipfit.quantizers.bn_fold import Channels, Norm, folded, forward, remembered, strategy_of
from chipfit.quantizers.ops import TorchOps

Rounding = Callable[[torch.Tensor], torch.Tensor]


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def channels(w: torch.Tensor, groups: int | None) -> Channels:
    """Where a layer with this weight has its output channels; `groups` are those of a transposed convolution."""
    if groups is None:
        return Channels(tuple(w.shape), (len(w), *[1] * (w.dim() - 1)), 1)
    shape = (groups, w.shape[0] // groups, *w.shape[1:])
    return Channels(shape, (groups, 1, w.shape[1], *[1] * (w.dim() - 2)), 1)


@torch.compiler.assume_constant_result
def repeated() -> bool:
    """Whether this forward pass is one that gradient checkpointing repeats while a backward pass runs.

    Its batch has been remembered, and it must compute with what was remembered before.
    """
    return torch._C._current_graph_task_id() != -1


class FoldedBatchNorm(nn.Module):
    """`bn(layer(x))` with rounded weights, folded while it trains by one of the strategies of `quantizers.bn_fold`.

    `layer` and `bn` stay what they are, the user's parameters under their names; under strategy 0 the layer is a folded
    copy and `bn` is None. `strategy` may be set to 1 later, which freezes the statistics.

    Args:
        layer: convolution, transposed convolution or linear layer, [N, C, ...] to [N, O, ...].
        bn: the batch norm behind it, with statistics of its own; None where there is none.
        strategy: -1, 0, 1, 2, 3 or 4.
        weight_quantizer: rounds a weight; it sees the folded one, except under -1.

    Raises:
        ConfigError: another strategy.
        UnsupportedError: another kind of layer, or a batch norm without statistics.
    """

    def __init__(
        self, layer: nn.Module, bn: _BatchNorm | None, strategy: int, weight_quantizer: Rounding = _as_it_is
    ) -> None:
        super().__init__()
        if not isinstance(layer, (_ConvNd, nn.Linear)):
            raise UnsupportedError(f"A batch norm does not fold into a {type(layer).__name__}")
        if bn is not None and (bn.running_mean is None or bn.running_var is None):
            raise UnsupportedError("A batch norm that remembers no statistics cannot be folded")
        self.strategy = strategy_of(strategy)
        self._before: dict[str, torch.Tensor] = {}  #: what was remembered before the last step
        self.layer: Any = layer
        self.bn: Any = bn
        self.weight_quantizer = weight_quantizer
        if strategy == 0 and bn is not None:
            self.layer = self._folded_layer()
            self.bn = None

    def extra_repr(self) -> str:
        return f"strategy={self.strategy}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, bn = self.layer, self.bn
        if bn is None:
            return _call(layer, x, self.weight_quantizer(layer.weight), layer.bias)
        training, again = self.training and bn.training, repeated()
        remembers = training and self.strategy != 1
        bias = layer.bias if layer.bias is not None else torch.zeros_like(bn.running_mean)
        norm = replace(self._norm(), **self._before) if again and remembers else self._norm()
        given = (layer.weight, bias, norm, self._channels(), self.weight_quantizer, _as_it_is)
        y, batch = forward(TorchOps, self.strategy, training, lambda w, b: _call(layer, x, w, b), *given)
        if batch is not None and not again:
            self._before = {"mean": norm.mean.clone(), "var": norm.var.clone()}
            step(bn.running_mean, bn.running_var, batch, self._momentum())
        return y

    def fold(self) -> nn.Module:
        """The layer that inference computes: of the class of `layer`, with folded weight, unrounded, and bias.

        Raises:
            UnsupportedError: strategy -1, which has none.
        """
        if self.bn is not None:
            check_folds(self.strategy)
        layer: nn.Module = copy.deepcopy(self.layer) if self.bn is None else self._folded_layer()
        return layer

    def _folded_layer(self) -> nn.Module:
        out: Any = copy.deepcopy(self.layer)
        bias = self.layer.bias if self.layer.bias is not None else torch.zeros_like(self.bn.running_mean)
        with torch.no_grad():
            w, b = folded(TorchOps, self.layer.weight, bias, self._norm(), self._channels())
        out.weight, out.bias = nn.Parameter(w), nn.Parameter(b)
        return out  # type: ignore[no-any-return]  # of the class of the layer

    def _norm(self) -> Norm:
        bn, one = self.bn, torch.ones_like(self.bn.running_var)
        gamma, beta = (one, one - one) if bn.weight is None else (bn.weight, bn.bias)
        return Norm(gamma, beta, bn.running_mean, bn.running_var, bn.eps)

    def _channels(self) -> Channels:
        return channels(self.layer.weight, self.layer.groups if isinstance(self.layer, _ConvTransposeNd) else None)

    def _momentum(self) -> float:
        """Of this step, which is counted; without one, all steps count the same."""
        count = self.bn.num_batches_tracked
        if count is not None:
            count.add_(1)
        return float(self.bn.momentum if self.bn.momentum is not None else 1.0 / count)


def step(mean: torch.Tensor, var: torch.Tensor, batch: tuple[Any, Any, Any], momentum: float) -> None:
    """Remember the statistics of a batch, in place.

    Raises:
        DataError: it has one number a channel.
    """
    if batch[2] < 2:
        raise DataError("The statistics of a batch norm in training need more than one number for each channel")
    with torch.no_grad():
        new_mean, new_var = remembered(Norm(None, None, mean, var, 0.0), batch, momentum)
        mean.copy_(new_mean)
        var.copy_(new_var)


def _call(layer: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """The layer with other numbers."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, w, b)
    if not isinstance(layer, _ConvTransposeNd):
        return layer._conv_forward(x, w, b)  # type: ignore[no-any-return]  # with its padding mode
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[w.dim() - 3]
    return convolve(x, w, b, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)


class _Sum(torch.autograd.Function):
    """x of all processes added up, and its gradient: each process has its share of every sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _Sum.forward(ctx, grads[0].contiguous())


class SyncedOps(TorchOps):
    """`TorchOps`, whose means and sizes are of the numbers that all processes hold, with the gradients of that.

    Every process must take part in each of them, in the same order.
    """

    @staticmethod
    def mean(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
        total = TorchOps.sum(x, axis, keepdims)
        both: Any = torch.cat([total.reshape(-1), total.new_tensor([x.numel() / total.numel()])])
        both = _Sum.apply(both)  # type: ignore[no-untyped-call]  # torch has no types
        return (both[:-1] / both[-1]).reshape(total.shape)

    @staticmethod
    def size(x: torch.Tensor) -> int:
        return int(_Sum.forward(None, torch.tensor(x.numel(), device=x.device)))
