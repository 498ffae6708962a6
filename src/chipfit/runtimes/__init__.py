"""Runtimes that load exported files: one a file, registered as "runtime" with what it needs.

A runtime is made of a file and of names of tensors that are to be readable. `run(inputs)` computes one batch and gives,
by name, first the outputs in the model's order, then those tensors that the file holds; `executed()` counts the
operators that it runs. It may have `warnings(platform)`: what a reader of a verification should know about the machine
that it ran on, a list of sentences.

A file may take and give codes in place of floats: a runtime is given floats all the same, and gives floats; the codes
of such an input count as a tensor.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

#: float32 numbers and a scale -> how many steps of it they are, rounded
Steps = Callable[[np.ndarray, Any], np.ndarray]


def divided(x: np.ndarray, scale: Any) -> np.ndarray:
    """x / scale, halves to even: as ONNX says."""
    return np.rint(x / scale)


def to_codes(x: np.ndarray, scale: float, zero_point: int, dtype: np.dtype, steps: Steps = divided) -> np.ndarray:
    """What an app hands over for reals, with the rounding of the runtime's own kernel, within the type."""
    ends = np.iinfo(dtype)
    q = steps(x.astype(np.float32), np.float32(scale)) + np.float32(zero_point)
    return np.clip(q, ends.min, ends.max).astype(dtype)


def to_floats(q: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    """The reals that codes stand for: (q - zero_point) * scale."""
    return (q.astype(np.int32) - np.int32(zero_point)).astype(np.float32) * np.float32(scale)
