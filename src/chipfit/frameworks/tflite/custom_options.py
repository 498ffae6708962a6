"""Options of custom operators, which LiteRT reads on trust when it opens a file: a map of numbers, as a FlexBuffer.

Source: https://flatbuffers.dev/flexbuffers. The last three bytes are the offset of the map, its type and the width of
the offset; a map is the offset and the width of its keys, its size, its values and their types.
"""

from __future__ import annotations

import struct
from typing import Any

from chipfit.errors import CaptureError

DETECTIONS = "TFLite_Detection_PostProcess"
#: custom operators for which LiteRT has kernels that read options, without readers here
_OTHERS = ("AudioSpectrogram", "Mfcc", "NumericVerify", "aeq.hadamard_rotation")
#: options of the detections' operator that may be left out, as in old files -> their value then
_LEFT_OUT = {"detections_per_class": 100, "use_regular_nms": False}
#: options that are numbers of things
_COUNTS = ("max_detections", "max_classes_per_detection", "detections_per_class", "num_classes")
_MOST = 1 << 20
_WIDTHS = (1, 2, 4, 8)
_MAP = 9
#: type of a value -> format of its number, by the bytes that it has; of the second row, values are offsets of numbers
_INT, _UINT, _FLOAT = dict(zip(_WIDTHS, "bhiq", strict=True)), dict(zip(_WIDTHS, "BHIQ", strict=True)), {4: "f", 8: "d"}
_INLINE, _INDIRECT = {1: _INT, 2: _UINT, 3: _FLOAT, 26: _UINT}, {6: _INT, 7: _UINT, 8: _FLOAT}
_NULL, _BOOL = 0, 26


def numbers_of(data: bytes) -> dict[str, int | float | bool]:
    """Return the numbers of a map by name.

    Raises:
        ValueError: It is malformed, or has other values than numbers.
    """

    def number(at: int, width: int, formats: dict[int, str]) -> int | float:
        if width not in formats or not 0 <= at <= len(data) - width:
            raise ValueError(f"a number of {width} bytes at byte {at} of {len(data)}")
        found: int | float = struct.unpack_from("<" + formats[width], data, at)[0]
        return found

    def offset(at: int, width: int) -> int:
        return at - int(number(at, width, _UINT))

    def width_of(kind: int) -> int:
        return 1 << (kind & 3)

    if len(data) < 3 or data[-2] >> 2 != _MAP:
        raise ValueError("the options are not a map")
    width, start = width_of(data[-2]), offset(len(data) - 2 - data[-1], data[-1])
    size = int(number(start - width, width, _UINT))
    keys, key_width = offset(start - 3 * width, width), int(number(start - 2 * width, width, _UINT))
    if size > len(data) or number(keys - key_width, key_width, _UINT) != size:
        raise ValueError(f"{size} values, and not as many names")
    names, out = [], dict[str, int | float | bool]()
    for k in range(size):
        at = offset(keys + k * key_width, key_width)
        if at < 0 or (end := data.find(b"\0", at)) < 0:
            raise ValueError(f"a name at byte {at} of {len(data)}")
        names.append(data[at:end])
        place, kind = start + k * width, int(number(start + size * width + k, 1, _UINT))
        if kind >> 2 in _INLINE:
            value = number(place, width, _INLINE[kind >> 2])
        elif kind >> 2 in _INDIRECT:
            value = number(offset(place, width), width_of(kind), _INDIRECT[kind >> 2])
        elif kind >> 2 == _NULL:
            continue
        else:
            raise ValueError(f"'{names[-1].decode('ascii', 'replace')}' is not a number")
        out[names[-1].decode("ascii", "replace")] = bool(value) if kind >> 2 == _BOOL else value
    if names != sorted({*names}):  # LiteRT bisects them
        raise ValueError("names that are not in order")
    return out


def detections(data: bytes) -> dict[str, int | float | bool]:
    """Return the options of the detections' operator.

    Raises:
        ValueError: They are malformed, or count what LiteRT's kernel would take memory for without a check.
    """
    options = _LEFT_OUT | numbers_of(data)
    for name in _COUNTS:
        if not (isinstance(options.get(name), int) and 1 <= options[name] <= _MOST):
            raise ValueError(f"'{name}' is {options.get(name)}, not a count from 1 to {_MOST:,}")
    return options


def check_custom_options(model: Any, where: str) -> None:
    """Check custom operators with options in a file's `Model`, which LiteRT has not opened.

    Raises:
        CaptureError: Options are malformed, or those of an operator without a reader.
    """
    names = [(model.OperatorCodes(k).CustomCode() or b"").decode() for k in range(model.OperatorCodesLength())]
    if others := [name for name in names if name in _OTHERS]:
        hint = "start from the model that the file was converted from, behind its features"
        raise CaptureError(f"The operator {others[0]} has no reader", where=where, hint=hint)
    for graph in map(model.Subgraphs, range(model.SubgraphsLength() if DETECTIONS in names else 0)):
        for op in map(graph.Operators, range(graph.OperatorsLength())):
            if names[op.OpcodeIndex()] == DETECTIONS:
                try:
                    detections(op.CustomOptionsAsNumpy().tobytes() if op.CustomOptionsLength() else b"")
                except ValueError as e:
                    what, allowed = f"The options of {DETECTIONS} are malformed", "numbers by name, as a FlexBuffer"
                    raise CaptureError(what, where=where, got=str(e), allowed=allowed) from e
