"""Quantizers of training tools, such as those of QONNX files, as ONNX's own: QuantizeLinear, Clip, DequantizeLinear.

Those without such a form stay as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
from onnx import helper, numpy_helper

from chipfit.errors import CaptureError, first_line, raise_bug
from chipfit.frameworks.onnx.integers import ENDS, Expansion, is_foreign

#: opset from which QuantizeLinear has all that is needed, beside com.microsoft's own
_OPSET = 13
_ROUNDING: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "ROUND": np.rint,
    "HALF_EVEN": np.rint,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "DOWN": np.fix,
    "ROUND_TO_ZERO": np.fix,
}


def with_standard_quantizers(model: onnx.ModelProto, where: str, *, runs: bool = False) -> onnx.ModelProto:
    """Return a model whose quantizers are ONNX's own where their meaning is known.

    Constants become integers. Integers of few bits lie in the next larger type, between the ends that a Clip gives.

    Args:
        runs: return a model that ONNX Runtime can run: of an opset in which Clip takes integers.

    Raises:
        CaptureError: A quantizer is malformed, or the opset cannot be changed.
    """
    if not any(is_foreign(n.op_type, n.domain) for n in model.graph.node):
        return model
    rewriting = _Rewriting(model, where)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes = [m for n in made.graph.node for m in rewriting.nodes_of(n)]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(rewriting.held)
    if any(n.domain == "com.microsoft" for n in nodes) and all(o.domain != "com.microsoft" for o in made.opset_import):
        made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    if runs and rewriting.source.opset < _OPSET:
        try:
            return onnx.version_converter.convert_version(made, _OPSET)
        except Exception as e:  # of onnx's C++ code
            raise_bug(e)
            what, hint = f"The opset of the model cannot be changed: {first_line(e)}", f"export with opset {_OPSET}"
            raise CaptureError(what, where=where, got=rewriting.source.opset, allowed=_OPSET, hint=hint) from e
    return made


@dataclass(frozen=True, eq=False)
class _Grid:
    """The integers that a quantizer makes."""

    kind: str  #: their type
    ends: tuple[int, int]
    scale: np.ndarray  #: float32, [] or [C]
    zero: np.ndarray  #: int64, same shape
    axis: int | None  #: of the channels, counted from behind
    rounding: Callable[[np.ndarray], np.ndarray]

    @staticmethod
    def of(
        r: "_Rewriting", n: onnx.NodeProto, ends: tuple[int, int], zero: np.ndarray, rounding: Any
    ) -> "_Grid | None":
        """Return the grid of a node whose second operand is the scale; None if no type of integers has it."""
        scale, constant = r.source.array(n.input[1]), r.source.array(n.input[0]) is not None
        kinds = ["int8", "int16", *(["int32"] if constant and not zero.any() else [])]
        kinds = kinds if ends[0] < 0 else ["uint8", "uint16", *kinds]
        least, most = min(ends[0], int(zero.min())), max(ends[1], int(zero.max()))
        kind = next((k for k in kinds if ENDS[k][0] <= least and most <= ENDS[k][1]), "")
        axes = [] if scale is None else [k - scale.ndim for k in range(scale.ndim) if scale.shape[k] > 1]
        if scale is None or not kind or len(axes) > 1 or zero.size not in (1, scale.size):
            return None
        flat = scale.astype(np.float32).reshape(-1 if axes else ())
        if not (np.isfinite(flat) & (flat > 0)).all():
            raise r.source.fault(n, "Scale of a quantizer must be positive", f"{flat.min():g}", "finite floats > 0")
        zeros = np.broadcast_to(zero.reshape(-1 if zero.size > 1 else ()), flat.shape).astype(np.int64)
        return _Grid(kind, ends, flat, zeros, axes[0] if axes else None, rounding)

    def quantize(self, array: np.ndarray) -> np.ndarray:
        behind = [1] * (-1 - (self.axis or -1))
        scale, zero = (p.reshape(-1, *behind) if p.ndim else p for p in (self.scale, self.zero))
        return np.clip(self.rounding(array / scale + zero), *self.ends)


class _Rewriting:
    """The quantizers of one model as standard ones, and the constants that these need."""

    def __init__(self, model: onnx.ModelProto, where: str) -> None:
        self.source, self.held = Expansion(model, where), list[onnx.TensorProto]()

    def nodes_of(self, n: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that take the place of one."""
        reader = _READERS.get(n.op_type) if is_foreign(n.op_type, n.domain) else None
        try:
            return (reader(self, n) if reader else None) or [n]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            got = str(e) or type(e).__name__
            raise self.source.fault(n, "A quantizer is malformed", got, "its operands") from e

    def hold(self, wanted: str, array: np.ndarray) -> str:
        """Add a constant, and return its name."""
        name = self.source.fresh(wanted)
        self.held.append(numpy_helper.from_array(array, name))
        return name

    def pair(self, n: onnx.NodeProto, spec: _Grid) -> list[onnx.NodeProto]:
        """Return quantizer and dequantizer of a tensor, or the dequantizer of a constant."""
        x, y, array = n.input[0], n.output[0], self.source.array(n.input[0])
        scale = self.hold(f"{y}/scale", spec.scale)
        own = spec.kind.endswith("16") or self.source.opset < _OPSET
        fields: dict[str, Any] = {"domain": "com.microsoft"} if own else {}
        fields |= {} if spec.axis is None else {"axis": spec.axis}
        if array is not None:
            q = self.hold(f"{x}_quantized", spec.quantize(array).astype(spec.kind))
            zeros = [] if spec.kind == "int32" else [self.hold(f"{y}/zero", spec.zero.astype(spec.kind))]
            return [helper.make_node("DequantizeLinear", [q, scale, *zeros], [y], n.name, **fields)]
        zero, q = self.hold(f"{y}/zero", spec.zero.astype(spec.kind)), self.source.fresh(f"{y}_quantized")
        nodes = [helper.make_node("QuantizeLinear", [x, scale, zero], [q], q, **fields)]
        if spec.ends != ENDS[spec.kind]:
            ends = [self.hold(f"{y}/{end}", np.array(end, spec.kind)) for end in spec.ends]
            nodes.append(helper.make_node("Clip", [q, *ends], [q := self.source.fresh(f"{q}_clipped")], q))
        return [*nodes, helper.make_node("DequantizeLinear", [q, scale, zero], [y], n.name, **fields)]


def _quant(r: _Rewriting, n: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """QONNX's Quant and IntQuant: x, scale, zero point, bits."""
    if len(n.input) != 4:
        return None
    zero, bits = (r.source.array(i) for i in n.input[2:])
    given = {a.name: helper.get_attribute_value(a) for a in n.attribute}
    signed, narrow = (bool(given.get(k, default)) for k, default in (("signed", 1), ("narrow", 0)))
    rounding = _ROUNDING.get(given.get("rounding_mode", b"ROUND").decode().upper())
    constant = r.source.array(n.input[0]) is not None
    if zero is None or bits is None or bits.size != 1 or rounding is None or not (constant or rounding is np.rint):
        return None
    count = int(bits.item())
    if count != bits or not 1 <= count <= 32 or (zero != np.rint(zero)).any():
        return None
    if signed and count == 1:
        return _bipolar(r, n)
    low = -(1 << count - 1) + narrow if signed else 0
    high = (1 << count - signed) - 1 - (narrow and not signed)
    grid = _Grid.of(r, n, (low, high), zero, rounding)
    return None if grid is None else r.pair(n, grid)


def _bipolar(r: _Rewriting, n: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """QONNX's BipolarQuant: x, scale; the result is the scale, or its negative where x is negative."""
    scale = r.source.array(n.input[1])
    if scale is None:
        return None
    if r.source.array(n.input[0]) is not None:
        grid = _Grid.of(r, n, (-1, 1), np.zeros((), np.int64), lambda x: np.where(x >= 0, 1, -1))
        return None if grid is None else r.pair(n, grid)
    y, below = n.output[0], r.source.fresh(f"{n.output[0]}_negative")
    values = (("zero", np.zeros(())), ("minus", -scale), ("plus", scale))
    zero, minus, plus = (r.hold(f"{y}/{k}", v.astype(np.float32)) for k, v in values)
    less = helper.make_node("Less", [n.input[0], zero], [below], below)
    return [less, helper.make_node("Where", [below, minus, plus], [y], n.name)]


def _linear(r: _Rewriting, n: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Quantizers of other domains with the operands of ONNX's own, where these are integers."""
    kind = r.source.kind(n.input[2]) if len(n.input) > 2 and n.input[2] in r.source.initialisers else ""
    if kind not in ENDS or (kind == "int32" and n.input[0] not in r.source.initialisers):  # no runtime makes those
        return None
    made = onnx.NodeProto()
    made.CopyFrom(n)
    made.op_type = "DequantizeLinear" if "Dequantize" in n.op_type else "QuantizeLinear"
    made.domain = "com.microsoft"
    return [made]


_Reader = Callable[[_Rewriting, onnx.NodeProto], list[onnx.NodeProto] | None]
_READERS: dict[str, _Reader] = {
    **dict.fromkeys(("Quant", "IntQuant"), _quant),
    "BipolarQuant": _bipolar,
    **dict.fromkeys(
        (f"{tool}{op}Linear" for tool in ("Extended", "Vitis") for op in ("Quantize", "Dequantize")), _linear
    ),
}
