"""The least version of each operator that its operands and options need, by TensorFlow Lite's own rules."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ai_edge_litert import schema_py_generated as schema

#: place of the data among an operator's operands, where it is not the first
_DATA = {"SPLIT": 1, "TRANSPOSE_CONV": 2}
_TYPES = {name.lower(): number for name, number in vars(schema.TensorType).items() if isinstance(number, int)}


class _Call:
    """An operator under construction: its operands, its results and its options."""

    def __init__(self, kind: str, ins: Sequence[Any], outs: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.ins, self.outs, self.options = ins, outs, options
        self.data = ins[min(_DATA.get(kind, 0), len(ins) - 1)]
        self.ranks = [len(t.shape) for t in ins]

    def scale(self, k: int) -> Any:
        """Return the scales of an operand, or of the result (-1)."""
        quantization = (self.outs[0] if k < 0 else self.ins[k]).quantization
        return () if quantization is None or quantization.scale is None else quantization.scale

    def grows(self) -> bool:
        """Return whether the product of the operands' scales is at least the result's scale."""
        scales = [self.scale(0), self.scale(1), self.scale(-1)]
        return all(len(s) == 1 for s in scales) and math.prod(float(s[0]) for s in scales[:2]) >= float(scales[2][0])


#: words for conditions in the table of versions; every other word is a type of the data
_CONDITIONS: dict[str, Callable[[_Call], bool]] = {
    "rank5": lambda c: len(c.data.shape) > 4,
    "rank6": lambda c: len(c.data.shape) > 5,
    "rank7": lambda c: len(c.data.shape) > 6,
    "broadcast5": lambda c: list(c.ins[0].shape) != list(c.ins[1].shape) and max(c.ranks) > 4,
    "grows": _Call.grows,
    "w4": lambda c: c.ins[1].type == _TYPES["int4"],
    "w8": lambda c: c.ins[1].type == _TYPES["int8"],
    "channels": lambda c: any(len(c.scale(k)) > 1 for k in range(len(c.ins))),
    "grouped": lambda c: c.ins[0].shape[-1] != c.ins[1].shape[-1],
    "biased": lambda c: len(c.ins) > 3,
    "to16": lambda c: c.outs[0].type == _TYPES["int16"],
    "dilated": lambda c: {c.options.get(f"dilation{axis}Factor", 1) for axis in "HW"} != {1},
    "keeps": lambda c: bool(c.options.get("keepNumDims")),
    "fused": lambda c: bool(c.options.get("fusedActivationFunction")),
    "half": lambda c: bool(c.options.get("halfPixelCenters")),
    "corners": lambda c: bool(c.options.get("alignCorners")),
    "batches": lambda c: bool(c.options.get("batchDims")),
}


def least_version(
    table: Mapping[str, str], kind: str, ins: Sequence[Any], outs: Sequence[Any], options: Mapping[str, Any]
) -> int:
    """Return the version of an operator: that of the first entry whose conditions hold, else 1.

    Args:
        table: operator -> entries "condition+condition=version", in their order.
        ins, outs: tensors of the schema, without operands that are left out.

    Source: TensorFlow Lite, tools/versioning/op_version.cc, GetBuiltinOperatorVersion; for 8-bit weights beside 16-bit
    data, of which that file knows nothing, the converter's tools/optimize/operator_property.cc.
    """
    call = _Call(kind, ins, outs, options)
    for entry in table.get(kind, "").split():
        words, _, version = entry.partition("=")
        if all(_CONDITIONS[w](call) if w in _CONDITIONS else call.data.type == _TYPES[w] for w in words.split("+")):
            return int(version)
    return 1
