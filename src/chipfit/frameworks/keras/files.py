"""Keras models from files. Nothing that a file holds is executed: Keras's safe mode is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from chipfit.errors import CaptureError


def load(path: str | Path) -> Any:
    """The model of a `.keras` file.

    Raises:
        CaptureError: there is no such file, it is damaged, or it holds Python code or classes that are not registered
            here.
    """
    if not Path(path).is_file():
        raise CaptureError("The model file does not exist", where=str(path))
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as e:  # Keras raises many types
        first = (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
        raise CaptureError(
            "The file is not a Keras model that can be loaded here",
            where=str(path),
            got=first,
            hint="save it again with model.save('model.keras'); for custom classes give module:factory instead; "
            "lambdas are never executed",
        ) from e
