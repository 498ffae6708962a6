"""Keras models from files. Nothing that a file holds is executed: its layers are checked before Keras makes them."""

import json
from pathlib import Path
from typing import Any

import keras

from chipfit.errors import CaptureError, GraphError, first_line, raised_outside_chipfit
from chipfit.files import ARCHIVE_ERRORS, existing_file, open_zip
from chipfit.frameworks.keras.known import demand_known


def load(path: str | Path) -> Any:
    """The model of a `.keras` file.

    Raises:
        CaptureError: there is no such file, it is damaged, or it holds Python code or classes that are not registered
            here.
    """
    _check(existing_file(path, CaptureError, "The model file"))
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as e:  # Keras raises many types, and so do the classes that are registered
        if not raised_outside_chipfit(e):
            raise
        raise CaptureError(
            "The file is not a Keras model that can be loaded here",
            where=str(path),
            got=first_line(e),
            hint="save it again with model.save('model.keras'); for custom classes give module:factory instead; "
            "lambdas are never executed",
        ) from e


def _check(path: str | Path) -> None:
    """Raise unless the file is an archive whose configuration names nothing but Keras's own and registered classes."""
    try:
        with open_zip(path) as archive:
            config = json.loads(archive.read("config.json"))
            if not isinstance(config, dict):
                raise ValueError("its configuration is no table")
            demand_known({k: v for k, v in config.items() if k != "compile_config"})  # which is not loaded
    except (*ARCHIVE_ERRORS, ValueError, KeyError, RecursionError) as e:
        what, got = "The file is not a Keras model that can be loaded here", f"{type(e).__name__}: {str(e)[:300]}"
        raise CaptureError(what, where=str(path), got=got, hint="save it with model.save('model.keras')") from e
    except GraphError as e:
        hint = "save it again without such layers; for custom classes give module:factory; lambdas are never executed"
        what = f"The file is not data: {e.what}"
        raise CaptureError(what, where=str(path), got=e.got, allowed=e.allowed, hint=hint) from e
