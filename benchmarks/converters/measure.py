"""Signal over noise, and processor time of two programs side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np


def decibels(floats: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> float:
    """Return signal over noise of the worst output [dB]; each output of the float network meets the nearest result."""

    def one(want: np.ndarray, got: np.ndarray) -> float:
        want, got = want.astype(np.float64).ravel(), got.astype(np.float64).ravel()
        noise = float(((want - got) ** 2).sum())
        return 10 * math.log10(max(float((want**2).sum()), 1e-30) / max(noise, 1e-30))

    return round(min(max(one(w, g) for g in results if g.size == w.size) for w in floats), 2)


def times(first: Callable[[], object], second: Callable[[], object], seconds: float = 0.6) -> tuple[float, float]:
    """Return the processor time of a call of each [us], the least of rounds in turn."""
    best = [math.inf, math.inf]
    end = time.process_time() + 2 * seconds
    for f in (first, second):
        f()
    while time.process_time() < end:
        for k, f in enumerate((first, second)):
            start = time.process_time()
            for _ in range(5):
                f()
            best[k] = min(best[k], (time.process_time() - start) / 5)
    return round(1e6 * best[0], 1), round(1e6 * best[1], 1)


def figures(results: Sequence[np.ndarray], floats: Sequence[np.ndarray], float_ops: Sequence[str], size: int) -> dict:
    return {
        "decibels": decibels(floats, results),
        "floats": len(float_ops),
        "float_ops": sorted(set(float_ops)),
        "size": size,
    }
