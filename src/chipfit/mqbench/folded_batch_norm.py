"""A linear layer, the batch norm behind it and the rounding of its weight as one module that trains."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from chipfit.errors import UnsupportedError
from chipfit.frameworks.torch.bn_fold import channels, is_recomputation, update_statistics
from chipfit.plan.training import check_folds
from chipfit.quantizers.bn_fold import Norm, NormalizedLayer, scale_channels, strategy_of
from chipfit.quantizers.ops import TorchOps

Rounding = Callable[[torch.Tensor], torch.Tensor]


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


class FoldedBatchNorm(nn.Module):
    """The module `bn(layer(x))` with rounded weights, folded while it trains by a strategy of `quantizers.bn_fold`.

    `layer` and `bn` are the user's modules, unchanged. Under strategy 0 the layer is a folded copy and `bn` is None.
    `strategy` may be set to 1 later, which freezes the statistics.

    Args:
        layer: convolution, transposed convolution or linear layer, [N, C, ...] to [N, O, ...].
        bn: the batch norm behind it, with running statistics; or None.
        strategy: -1, 0, 1, 2, 3 or 4.
        weight_quantizer: function that rounds a weight; it gets the folded weight, except under strategy -1.

    Raises:
        ConfigError: The strategy is unknown.
        UnsupportedError: The layer is of another kind, or the batch norm has no running statistics.
    """

    def __init__(
        self, layer: nn.Module, bn: _BatchNorm | None, strategy: int, weight_quantizer: Rounding = _identity
    ) -> None:
        super().__init__()
        if not isinstance(layer, (_ConvNd, nn.Linear)):
            raise UnsupportedError(f"A batch norm does not fold into a {type(layer).__name__}")
        if bn is not None and (bn.running_mean is None or bn.running_var is None):
            raise UnsupportedError("A batch norm without running statistics cannot be folded")
        self.strategy = strategy_of(strategy)
        self._previous: dict[str, Any] = {}  #: mean and var before the last step, for its recomputation
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
        training, recomputed = self.training and bn.training, is_recomputation()
        normalized = self._normalized()
        if recomputed and training and self.strategy != 1:  # the first pass has updated the statistics
            normalized = replace(normalized, norm=replace(normalized.norm, **self._previous))
        run = partial(_call, layer, x)
        y, batch = normalized.run(self.strategy, training, run, self.weight_quantizer, _identity)
        if batch is not None and not recomputed:
            self._previous = {"mean": normalized.norm.mean.clone(), "var": normalized.norm.var.clone()}
            update_statistics(bn.running_mean, bn.running_var, batch, self._count_step(), y.numel())
        return y

    def fold(self) -> nn.Module:
        """Return a layer of the class of `layer` with the folded weight, unrounded, and the folded bias.

        Raises:
            UnsupportedError: The strategy is -1, which does not fold.
        """
        if self.bn is not None:
            check_folds(self.strategy)
        layer: nn.Module = copy.deepcopy(self.layer) if self.bn is None else self._folded_layer()
        return layer

    @property
    def channel_axis(self) -> int:
        """The axis of the weight along which scales per channel lie."""
        return 1 if isinstance(self.layer, _ConvTransposeNd) else 0

    def factors(self) -> torch.Tensor:
        """Return gamma / sqrt(var + eps), by which folding multiplies the output channels, [C]."""
        norm = self._normalized().norm
        return (norm.gamma / (norm.var + norm.eps).sqrt()).detach()  # type: ignore[no-any-return]  # a tensor

    @torch.no_grad()
    def set_folded_weight(self, w: torch.Tensor) -> None:
        """Change the weight so that it is w after folding; channels with the factor 0 become 0."""
        if self.bn is not None:
            k = self.factors()
            w = scale_channels(TorchOps, w, torch.where(k == 0, 0.0, 1 / k), self._normalized().at)
        self.layer.weight.copy_(w)

    def _folded_layer(self) -> nn.Module:
        out: Any = copy.deepcopy(self.layer)
        with torch.no_grad():
            w, b = self._normalized().folded()
        out.weight, out.bias = nn.Parameter(w), nn.Parameter(b)
        return out  # type: ignore[no-any-return]  # of the class of the layer

    def _normalized(self) -> NormalizedLayer:
        """Return layer and batch norm in the form that the strategies compute with."""
        layer, bn, mean = self.layer, self.bn, self.bn.running_mean
        gamma, beta = (torch.ones_like(mean), torch.zeros_like(mean)) if bn.weight is None else (bn.weight, bn.bias)
        at = channels(layer.weight, layer.groups if isinstance(layer, _ConvTransposeNd) else None)
        bias = layer.bias if layer.bias is not None else torch.zeros_like(mean)
        return NormalizedLayer(TorchOps, layer.weight, bias, Norm(gamma, beta, mean, bn.running_var, bn.eps), at)

    def _count_step(self) -> Any:
        """Count a step of training and return its momentum; if the user sets none, all steps have the same weight."""
        count = self.bn.num_batches_tracked
        if count is not None:
            count.add_(1)
        return self.bn.momentum if self.bn.momentum is not None else 1.0 / count


def _call(layer: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """Run the layer with another weight and bias, and its own stride, padding and other settings."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, w, b)
    if not isinstance(layer, _ConvTransposeNd):
        return layer._conv_forward(x, w, b)  # type: ignore[no-any-return]  # a tensor
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[w.dim() - 3]
    return convolve(x, w, b, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
