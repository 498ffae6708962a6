"""Metrics of tasks: from outputs of the float and of the quantized network, and labels, to two numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Outputs = Sequence[np.ndarray]


def accuracy(want: Outputs, got: Outputs, labels: np.ndarray) -> tuple[float, float]:
    """Return the shares of samples whose largest output is the label's."""
    tops = [y[0].reshape(len(labels), -1).argmax(1) for y in (want, got)]
    return float((tops[0] == labels).mean()), float((tops[1] == labels).mean())


def agreement(
    want: Outputs, got: Outputs, labels: np.ndarray | None, output: int = 0, axis: int = -1
) -> tuple[float, float]:
    """Return 1, and the share of places whose largest value along an axis stands where it does in float."""
    w, g = (y[output].argmax(axis) for y in (want, got))
    return 1.0, float((w.ravel() == g.ravel()).mean())


def overlap(
    want: Outputs, got: Outputs, labels: np.ndarray | None, output: int = 0, above: float = 0.5, last: int | None = None
) -> tuple[float, float]:
    """Return 1, and intersection over union of the elements above a threshold in float and quantized.

    Elements are scores of anchors, pixels of masks or detections; `last` takes one index of the last axis.
    """
    w, g = (y[output] if last is None else y[output][..., last] for y in (want, got))
    w, g = (y.ravel() > above for y in (w, g))
    return 1.0, float((w & g).sum() / (w | g).sum()) if (w | g).any() else 1.0


def cosine(want: Outputs, got: Outputs, labels: np.ndarray | None, output: int = 0) -> tuple[float, float]:
    """Return 1, and the mean cosine between the vectors of the last axis in float and quantized."""
    w, g = (y[output].reshape(-1, y[output].shape[-1]).astype(np.float64) for y in (want, got))
    norms = np.linalg.norm(w, axis=1) * np.linalg.norm(g, axis=1)
    return 1.0, float(((w * g).sum(1) / np.maximum(norms, 1e-12)).mean())
