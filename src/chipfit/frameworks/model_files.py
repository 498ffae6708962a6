"""The error for a file or name that cannot be loaded as a model: what it is, and how its model gets here.

Nothing in the file is executed.
"""

import os
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from chipfit.errors import CaptureError
from chipfit.files import ARCHIVE_ERRORS, package_data

_FACTORY = "write its two lines as a factory, `def build(): ...` in net.py, and give net:build"
_WEIGHTS = "model = Net(); model.load_state_dict(torch.load(file, weights_only=True))"
_PROGRAM = "torch.export.save(torch.export.export(model, (example,)), 'model.pt2')"


class _Kind(NamedTuple):
    """A kind of file, and what makes its model loadable."""

    what: str
    hint: str


_STATE_DICT = _Kind("a state dictionary: weights without a model", f"{_WEIGHTS}; {_FACTORY}")
_SCRIPT = _Kind(
    "a TorchScript program, which would be run to be read",
    "if you trust it, write the factory `def build(): return torch.jit.load(file)` in net.py, and give net:build",
)
_POINTER = _Kind("a pointer of Git LFS, not the file itself", "git lfs pull, or download the file from its web page")
_PAGE = _Kind("a web page, perhaps of an error, not the file itself", "download the file again")
_BY_SUFFIX = {
    ".safetensors": _Kind(
        "weights without a model",
        f"model = Net(); safetensors.torch.load_model(model, file); {_FACTORY}, or add --weights",
    ),
    ".pb": _Kind("a frozen graph of TensorFlow 1", "convert it to a float .tflite or .onnx file with TensorFlow"),
    ".ckpt": _Kind("a checkpoint: weights without a model", f"model = Net(); load its state dictionary; {_FACTORY}"),
    **{suffix: _Kind(*texts) for suffix, texts in package_data(__package__, "other_files.yaml").items()},
}
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
#: names in a pickle of tensors and their containers
_PLAIN = re.compile(
    r"(collections|torch(\._utils|\.storage|\.serialization|\._tensor)?|numpy.*|_codecs) "
    r"|_*builtins?_* (set|bytearray)$"
)


def refused_file(text: str, allowed: str, hint: str) -> CaptureError:
    """Return the error for a text that names no model that can be loaded.

    Args:
        allowed, hint: what can be loaded, and how to make it, for texts of no known kind.
    """
    path = Path(text)
    kind = _kind_of(path) if os.path.exists(path) else _BY_SUFFIX.get(path.suffix.lower())
    script = path if path.suffix == ".py" or not path.name else path.with_name(f"{path.name}.py")
    if kind is None and os.path.isfile(script):
        hint = f"{script.stem}:build, if {script.name} has a function build() that returns the model"
    if kind is None:
        return CaptureError("Model must be a file or module:factory", got=text, allowed=allowed, hint=hint)
    return CaptureError(f"'{text}' is {kind.what}", allowed=allowed, hint=kind.hint)


def check_downloaded(path: Path) -> None:
    """Check that a file is not what stands in its place where a download went wrong.

    Raises:
        CaptureError: It is a pointer of Git LFS, or a web page.
    """
    kind = _kind_of_placeholder(path)
    if kind is not None:
        raise CaptureError(f"'{path}' is {kind.what}", hint=kind.hint)


def _kind_of_placeholder(path: Path) -> _Kind | None:
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except (OSError, ValueError):  # the latter for a path with a null character
        return None
    if start.startswith(b"version https://git-lfs"):
        return _POINTER
    return _PAGE if start.startswith((b"<!doctype html", b"<html")) else None


def _kind_of(path: Path) -> _Kind | None:
    if os.path.isdir(path):  # False for a path that cannot exist
        return _kind_of_folder(path)
    if (placeholder := _kind_of_placeholder(path)) is not None:
        return placeholder
    return (_kind_of_pickle(path) if path.suffix.lower() in _PICKLES else None) or _BY_SUFFIX.get(path.suffix.lower())


def _kind_of_folder(path: Path) -> _Kind | None:
    if (path / "plan.json").exists():
        return _Kind("a saved result of chipfit", "chipfit.load(folder)")
    return None


def _kind_of_pickle(path: Path) -> _Kind | None:
    """Tell a state dictionary from a module by the names in its pickle, which is not executed."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                if any(n.endswith("constants.pkl") for n in names):
                    return _SCRIPT
                inside = next((n for n in names if n.endswith("data.pkl")), None)
                if inside is None:
                    return None
                with archive.open(inside) as file:
                    classes = [*_classes(pickletools.genops(file.read(1 << 24)))]
        else:
            with path.open("rb") as file:  # a magic number, a version, a description of the system, the object
                classes = [c for _ in range(4) for c in _classes(pickletools.genops(file))]
    except (*ARCHIVE_ERRORS, ValueError, IndexError, KeyError):
        return None
    own = next((c for c in classes if not _PLAIN.match(c)), "")
    if not own:
        return _STATE_DICT
    what = f"a pickled {own.replace(' ', '.')}, which could run any code when it is loaded"
    return _Kind(what, f"build the model in Python: {_WEIGHTS}; {_FACTORY}; or {_PROGRAM} where it was trained")


def _classes(operations: Iterable[tuple[pickletools.OpcodeInfo, object, int | None]]) -> Iterator[str]:
    """Yield "module name" of each class or function that a pickle calls."""
    texts: list[str] = []
    for op, argument, _ in operations:
        if op.name == "GLOBAL":
            yield str(argument)
        elif op.name == "STACK_GLOBAL" and len(texts) > 1:
            yield f"{texts[-2]} {texts[-1]}"
        elif isinstance(argument, str):
            texts.append(argument)
