"""Sums of |code| over the weights of one output channel, which some chips bound."""

import torch

from chipfit.quantizers.stored import Stored


def code_sums(stored: Stored, w: torch.Tensor, axis: int) -> torch.Tensor:
    """The sum of |code| over each channel along `axis`, [C] float64."""
    return stored.quantize(w.detach()).double().abs().transpose(0, axis).flatten(1).sum(1)


def enlargement(stored: Stored, w: torch.Tensor, most: float, axis: int = 0) -> torch.Tensor | None:
    """The factor, [] or [C], that a scale grows by where sums are above `most`; None where none is.

    A larger scale rounds otherwise, so that sums may still be too large after it.
    """
    sums = code_sums(stored, w, axis if stored.axis is None else stored.axis)
    over = (sums if stored.scale.dim() else sums.max()) / most
    if not bool((over > 1).any()):
        return None
    larger = torch.exp2(torch.ceil(torch.log2(over))) if stored.grid.pot else 1.01 * over
    return torch.where(over > 1, larger, 1)
