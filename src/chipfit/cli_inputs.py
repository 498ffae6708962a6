"""Models and data as they are named on the command line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit.errors import CaptureError, DataError, PlanError

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp")
_BATCH = 16


def _named(text: str, what: str) -> Any:
    """The object that "module:name" names; modules of the current folder are found."""
    module, _, name = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise CaptureError(
            f"The {what} '{text}' cannot be imported: {e}", allowed="module:name", hint="run from the folder that holds the module"
        ) from e
    finally:
        sys.path.pop(0)


def load_model(text: str, weights: Path | None = None) -> torch.nn.Module:
    """A `.pt2` program or the result of `module:factory`, with weights from a safetensors file.

    Raises:
        CaptureError: there is no such file or factory, or the weights do not fit.
    """
    if text.endswith(".pt2"):
        if not Path(text).is_file():
            raise CaptureError("The model file does not exist", where=text)
        try:
            return torch.export.load(text).module(check_guards=False)
        except Exception as e:  # torch.export.load raises many types
            raise CaptureError(
                "The file is not a program that torch.export.save wrote",
                where=text,
                got=str(e).splitlines()[0][:200] if str(e) else type(e).__name__,
            ) from e
    if ":" not in text:
        raise CaptureError(
            "The model is not understood",
            got=text,
            allowed="a .pt2 file, or module:factory",
            hint="torch.export.save(program, 'model.pt2') writes one",
        )
    thing = _named(text, "model")
    model = thing if isinstance(thing, torch.nn.Module) else thing()
    if weights is not None:
        from safetensors.torch import load_file

        try:
            model.load_state_dict(load_file(str(weights)))
        except Exception as e:  # unreadable file, missing keys, wrong shapes
            raise CaptureError(f"The weights do not fit the model: {str(e).splitlines()[0][:300]}", where=str(weights)) from e
    return model


def load_data(text: str, input_size: int = 224) -> Any:
    """Batches from an `.npz` file, a folder of images, or `module:iterable`.

    Raises:
        DataError: nothing usable is there.
    """
    path = Path(text)
    if text.endswith(".npz"):
        return _npz(path)
    if path.is_dir():
        return _images(path, input_size)
    if ":" not in text:
        raise DataError("The data are not understood", got=text, allowed="an .npz file, a folder of images, or module:iterable")
    thing = _named(text, "data")
    return thing() if callable(thing) else thing


def _npz(path: Path) -> list[Any]:
    try:
        with np.load(path, allow_pickle=False) as f:
            arrays = {k: f[k] for k in f.files}
    except (OSError, ValueError) as e:
        raise DataError(f"The data file cannot be read: {e}", where=str(path)) from e
    x = next((arrays[k] for k in ("x", "inputs", "images", "data") if k in arrays), None)
    y = next((arrays[k] for k in ("y", "labels", "targets") if k in arrays), None)
    if x is None:
        raise DataError(
            "The data file holds no inputs",
            where=str(path),
            got=", ".join(arrays) or "nothing",
            allowed="an array named x (and y for labels)",
        )
    data = torch.from_numpy(x)
    batches: list[Any] = list(data.split(_BATCH))
    if y is not None:
        batches = list(zip(batches, torch.from_numpy(y).split(_BATCH), strict=True))
    return batches


def _images(folder: Path, side: int) -> list[torch.Tensor]:
    from PIL import Image

    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _IMAGES)
    if not files:
        raise DataError("The folder holds no images", where=str(folder), allowed=", ".join(_IMAGES))
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    out = []
    for f in files:
        try:
            with Image.open(f) as image:
                pixels = np.asarray(image.convert("RGB").resize((side, side)), dtype=np.float32) / 255
        except OSError as e:
            raise DataError("An image cannot be read", where=str(f), got=str(e)) from e
        out.append((torch.from_numpy(pixels).permute(2, 0, 1) - mean) / std)
    return list(torch.stack(out).split(_BATCH))


def parse_shape(text: str) -> torch.Tensor:
    """An example of random numbers from "1,3,224,224".

    Raises:
        DataError: not a list of positive integers.
    """
    parts = text.split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise DataError("The shape is not understood", got=text, allowed="positive integers with commas, batch first: 1,3,224,224")
    return torch.randn(*(int(p) for p in parts))


def parse_bits(items: list[str]) -> dict[str, dict[str, int]]:
    """LAYER=BITS pairs as overrides.

    Raises:
        PlanError: not of this form.
    """
    out = {}
    for item in items:
        layer, _, bits = item.rpartition("=")
        if not layer or not bits.isdigit():
            raise PlanError("A --bits option is not understood", got=item, allowed="LAYER=BITS, for example features.0=4")
        out[layer] = {"bits": int(bits)}
    return out
