"""A test of all numbers of a tensor by its extremes."""

from torch import Tensor


def is_finite(x: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; its extremes show that faster than a test of every number."""
    if not x.numel() or not x.is_floating_point():
        return True
    low, high = x.detach().aminmax()
    return bool(low.isfinite() & high.isfinite())
