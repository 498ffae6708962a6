"""Logging of the scales, zero points and ranges of a model in training, to TensorBoard or a similar writer."""

from pathlib import Path
from typing import Any

import numpy as np

from chipfit.errors import ConfigError, RuntimeUnavailable, import_optional


def writer(folder: str | Path) -> Any:
    """Return a `SummaryWriter` of `torch.utils.tensorboard` that writes to a folder.

    Raises:
        RuntimeUnavailable: TensorBoard is not installed.
    """
    library = import_optional("torch.utils.tensorboard", "A writer of scalars", RuntimeUnavailable, extra="track")
    return library.SummaryWriter(str(folder))


def write_scales(to: Any, model: Any, step: int) -> None:
    """Write the numbers of every trained quantizer: a scalar or, for numbers of channels, a histogram.

    It calls `add_scalar(name, number, step)` and `add_histogram(name, array, step)`, the latter also for the logarithms
    of all scales.

    The names are `scale/<tensor>`, `zero_point/<tensor>`, `low/<tensor>` and `high/<tensor>`, the last two in the
    tensor's unit, and `log2_scale/all`.

    Args:
        to: an object with these two methods, such as a `SummaryWriter` (see `writer`).
        model: `Result.model`, of PyTorch or Keras.

    Raises:
        ConfigError: `to` has no such methods, or the model no such quantizers.
    """
    bounds = getattr(model, "_bounds", None) or getattr(model, "bounds", None)
    if bounds is None or not all(callable(getattr(to, f"add_{kind}", None)) for kind in ("scalar", "histogram")):
        got = f"{type(to).__name__}, {type(model).__name__}"
        allowed = "a writer with `add_scalar` and `add_histogram`, and the model of a Result"
        raise ConfigError("The scales cannot be written", got=got, allowed=allowed)
    logs = [np.zeros(0)]
    for name, q in bounds.quantizers.items():
        s, z = (_numbers(n) for n in q.numbers())
        g = q.trained_grid()
        low, high = ((g.qmin - z) * s, (g.qmax - z) * s) if g.table is None else (g.table[0] * s, g.table[-1] * s)
        for what, value in (("scale", s), ("zero_point", z), ("low", low), ("high", high)):
            if value.size == 1:
                to.add_scalar(f"{what}/{name}", float(value[0]), step)
            else:
                to.add_histogram(f"{what}/{name}", value, step)
        logs.append(np.log2(s))
    to.add_histogram("log2_scale/all", np.concatenate(logs), step)


def _numbers(x: Any) -> np.ndarray:
    """Return one number, or one per channel, [C], of a tensor of torch or of a backend of Keras."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x, "float32").reshape(-1)
