"""Ratios of powers in decibels, as every measure of quantization noise is given."""

import math


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio of two powers [dB]: inf without noise, -inf with noise alone.

    >>> decibels(100.0, 1.0), decibels(0.0, 0.0), decibels(0.0, 1.0)
    (20.0, inf, -inf)
    """
    if not noise:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio else -math.inf
