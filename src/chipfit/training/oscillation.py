"""Oscillation of weights between two quantized values: its frequency, a loss against it, and freezing of weights.

Source: Nagel et al. 2022, arXiv:2203.11086, sections 4.1 to 4.3 and algorithm 1.
"""

from typing import Any

import torch
from torch import nn

from chipfit.errors import ConfigError, UnsupportedError
from chipfit.frameworks.torch.lower import as_quantized_module
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.quantizers.algorithm import Algorithm
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.pairs import bounded


def dampening(model: nn.Module) -> torch.Tensor:
    """Return the sum of squared distances of all weights, clipped to their grids, from their quantized values.

    Gradients pull weights to the middle of their steps, where they do not flip; scales get no gradient. With scale 1
    and codes -2 to 1, [0.25, -0.5, 3] gives 0.0625 + 0.25 + 0. Multiply it by a factor that grows during training.

    Args:
        model: `Result.model`, of PyTorch.

    Raises:
        PlanError: it is another model.
    """
    total: Any = 0.0
    for name, q in (model := as_quantized_module(model)).rounded_weights():
        x = q.reals(model.weight_to_round(name))
        codes = q.quantize(x)
        rounded, g = q.dequantize(codes), q.trained_grid()
        low, high = (g.qmin, g.qmax) if g.table is None else (0, g.levels - 1)
        beyond = ((codes == low) & (x < rounded)) | ((codes == high) & (x > rounded))
        total = total + torch.where(beyond, 0.0, rounded - x).square().sum()
    return torch.as_tensor(total)


class _Track(nn.Module):
    """The codes of one weight [*dims], and statistics of their changes."""

    codes: torch.Tensor  #: of the last step, or frozen, float32
    direction: torch.Tensor  #: sign of the last change; 0 before the first
    frequency: torch.Tensor  #: moving average of how often a change reverses the last one
    average: torch.Tensor  #: of the codes
    frozen: torch.Tensor  #: bool

    def __init__(self, codes: torch.Tensor) -> None:
        super().__init__()
        for name, value in (("codes", codes), ("average", codes.clone())):
            self.register_buffer(name, value)
        for name in ("direction", "frequency"):
            self.register_buffer(name, torch.zeros_like(codes))
        self.register_buffer("frozen", torch.zeros_like(codes, dtype=torch.bool))

    def step(self, now: torch.Tensor, momentum: float, threshold: float | None) -> None:
        now = torch.where(self.frozen, self.codes, now)
        change = torch.sign(now - self.codes)
        self.frequency.lerp_((change * self.direction == -1).to(now.dtype), momentum)
        self.direction.copy_(torch.where(change == 0, self.direction, change))
        self.average.lerp_(now, momentum)
        self.codes.copy_(now)
        if threshold is not None:
            new = (self.frequency > threshold) & ~self.frozen
            self.codes.copy_(torch.where(new, self.average.round(), self.codes))
            self.frozen |= new


def _held(q: FakeQuantizer, track: _Track, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of a track's codes, and which to keep: frozen ones, and neighbours that would move them.

    Args:
        x: the weight that is rounded.
    """
    if (limit := q.grid.pair_limit) is None:
        return q.dequantize(track.codes), track.frozen
    track.codes.copy_(bounded(TorchOps, track.codes, limit, q.axis))
    held = q.dequantize(track.codes)
    step = shape_for(q.numbers()[0], x, q.axis)
    return held, track.frozen | ((x - held).abs() > 0.51 * step)


class Oscillations(nn.Module):
    """Statistics of the oscillation of all trained weights, which freeze weights that oscillate too often.

    A change of a code opposite in sign to the last change is an oscillation o; its frequency is the moving average
    f = momentum o + (1 - momentum) f. A weight whose frequency exceeds the threshold is frozen at the code nearest to
    the moving average of its codes; from then on only its scale moves it.

    Where batch norms fold in each step, the folded weight is frozen, by their running statistics; with `bn_fold=2`,
    which rounds by the statistics of the batch, a code may still change during training.

    It is a module so that it is saved and moved like one.

    Args:
        model: `Result.model`, of PyTorch.
        momentum: weight of one step in the averages.
        threshold: frequency from which weights are frozen, several times the momentum; an attribute that may be lowered
            during training. None: nothing is frozen.

    Raises:
        PlanError: it is another model.
        ConfigError: a number is out of bounds.
    """

    def __init__(self, model: nn.Module, momentum: float = 0.01, threshold: float | None = None) -> None:
        super().__init__()
        if not 0 < momentum <= 1 or (threshold is not None and not 0 < threshold < 1):
            got = f"momentum={momentum}, threshold={threshold}"
            raise ConfigError("Momentum and threshold must be shares", got=got, allowed="above 0, at most 1")
        model = as_quantized_module(model)
        self._model, self._weights = (model,), list(model.rounded_weights())
        self.momentum, self.threshold = momentum, threshold
        self.tracks: Any = nn.ModuleList(_Track(self._codes(name, q)) for name, q in self._weights)

    @property
    def frequency(self) -> dict[str, torch.Tensor]:
        """Frequency of oscillation of each weight [*dims], as a share of the steps, by name."""
        return {name: t.frequency for (name, _), t in zip(self._weights, self.tracks, strict=True)}

    @property
    def frozen(self) -> dict[str, torch.Tensor]:
        """Masks of frozen weights [*dims], by name."""
        return {name: t.frozen for (name, _), t in zip(self._weights, self.tracks, strict=True)}

    @torch.no_grad()
    def step(self) -> None:
        """Update the statistics and put frozen weights back; call it after the step of the optimizer.

        Raises:
            TrainingError: a number is not finite.
            UnsupportedError: a weight to freeze is transformed before it is rounded.
        """
        model = self._model[0]
        model.enforce_bounds()  # first: where a bound moves a scale, frozen weights follow
        model._bounds.settled = True
        for (name, q), track in zip(self._weights, self.tracks, strict=True):
            if self.threshold is not None and type(q.algorithm).reals is not Algorithm.reals:
                algorithm = type(q.algorithm).__name__
                what = f"{algorithm} transforms '{name}' before it is rounded, so that it cannot be frozen"
                raise UnsupportedError(what, hint="train it with ste or lsq, or use `dampening`")
            track.step(self._codes(name, q), self.momentum, self.threshold)
            if self.threshold is not None:
                w, held, keep = model.weight(name), *_held(q, track, q.reals(model.weight_to_round(name)))
                if model.folds_in_each_step(name):
                    held = model.normalized_layer(name).unfolded(held)
                w.copy_(torch.where(keep, held.to(w.dtype), w))

    @torch.no_grad()
    def _codes(self, name: str, q: FakeQuantizer) -> torch.Tensor:
        return q.quantize(q.reals(self._model[0].weight_to_round(name))).float()
