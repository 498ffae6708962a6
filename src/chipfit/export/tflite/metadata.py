"""Metadata of a `.tflite` file for Android's libraries: the metadata schema of TensorFlow Lite, version M001."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import flatbuffers

_LABELS = "labels.txt"  #: the file of labels in the zip archive behind the model
_AXIS_LABELS, _FEATURE, _IMAGE, _NORMALIZATION = 2, 1, 2, 1  #: numbers of the schema
_COLORS = {3: 1, 1: 2}  #: channels of an image -> RGB, or shades of grey


def metadata(inputs: Sequence[str], outputs: Sequence[str], notes: Mapping[str, Any], channels: int = 0) -> bytes:
    """Return the flatbuffer that describes inputs and outputs, by name.

    Args:
        notes: "labels" of the first output; "mean" and "std" of the first input.
        channels: of the first input if it is an image; else 0.
    """
    content = {0: (_FEATURE, "byte"), 1: {}}  # a union is its kind and its table
    takes: list[dict[int, Any]] = [{0: name, 3: content} for name in inputs]
    if channels in _COLORS:
        takes[0][3] = {0: (_IMAGE, "byte"), 1: {0: (_COLORS[channels], "byte")}}
    gives: list[dict[int, Any]] = [{0: name, 3: content} for name in outputs]
    if "mean" in notes:
        takes[0][4] = [{0: (_NORMALIZATION, "byte"), 1: {0: [*notes["mean"]], 1: [*notes["std"]]}}]
    if "labels" in notes:
        gives[0][6] = [{0: _LABELS, 2: (_AXIS_LABELS, "byte")}]
    b = flatbuffers.Builder(1024)
    b.Finish(_table(b, {3: [{2: takes, 3: gives}], 7: "1.0.0"}), file_identifier=b"M001")
    return bytes(b.Output())


def labels_archive(notes: Mapping[str, Any]) -> bytes:
    """Return the archive behind the model, which holds the labels; empty if there are none."""
    if "labels" not in notes:
        return b""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:  # ZipInfo has a fixed date: equal models make equal files
        archive.writestr(zipfile.ZipInfo(_LABELS), "".join(f"{name}\n" for name in notes["labels"]))
    return out.getvalue()


def _table(b: Any, fields: Mapping[int, Any]) -> Any:
    """Add a table by the numbers of its fields: text, tables, lists of floats or tables, (number, "byte")."""
    ready = {k: v if isinstance(v, tuple) else _value(b, v) for k, v in fields.items()}
    b.StartObject(max(fields, default=-1) + 1)
    for k, v in ready.items():
        if isinstance(v, tuple):
            b.PrependInt8Slot(k, v[0], 0)
        else:
            b.PrependUOffsetTRelativeSlot(k, v, 0)
    return b.EndObject()


def _value(b: Any, value: Any) -> Any:
    if isinstance(value, str):
        return b.CreateString(value)
    if isinstance(value, dict):
        return _table(b, value)
    floats = isinstance(value[0], float)
    items = value if floats else [_table(b, v) for v in value]
    b.StartVector(4, len(items), 4)
    for item in reversed(items):
        (b.PrependFloat32 if floats else b.PrependUOffsetTRelative)(item)
    return b.EndVector()
