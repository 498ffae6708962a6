"""Writers of canonical operators in ONNX: a cell of the table of operators, or a function if that takes more.

A function receives the `OnnxBuilder`, the node and the ONNX names of its inputs, and returns the names of its outputs.
Composites without a writer are decomposed before (`passes.decompose`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from chipfit.export.onnx.builder import Names, OnnxBuilder, refuse, require, tensor_type
from chipfit.export.onnx.read_back import to_bytes
from chipfit.export.onnx.recurrent import has_operator, recurrent
from chipfit.graph.ir import OPAQUE, Node
from chipfit.operators.table import attribute_words, by_name, read_column, refused, resolve
from chipfit.passes.decompose import LINEAR_SOFTPLUS


@dataclass(frozen=True, slots=True)
class OnnxOp:
    """An operator that ONNX has, as a writer: a cell of the table of operators."""

    name: str  #: its name in ONNX
    attrs: str = ""  #: its attributes, each as "ours=theirs", or one word if both have one name
    constants: str = ""  #: behind its operands, each as "attribute:form" or "number:form", by `_FORMS`
    fixed: Mapping[str, Any] | None = None  #: further attributes, equal for every node

    def __call__(self, w: OnnxBuilder, n: Node, x: Names, **more: Any) -> list[str]:
        attrs = {theirs: onnx_attribute(n.attrs[ours]) for ours, theirs, _ in attribute_words(self.attrs)}
        values = [_FORMS[form](n.attrs.get(name, name)) for name, _, form in attribute_words(self.constants)]
        constants = [None if v is None else w.const(v) for v in values]
        return w.op_many(self.name, [*x, *constants], len(n.outputs), **attrs, **(self.fixed or {}), **more)


Write = Callable[[OnnxBuilder, Node, Names], str | list[str]]


def onnx_attribute(value: Any) -> Any:
    """Return a value as ONNX has it: True as 1, padding ((lo, hi), ...) as all lows, then all highs."""
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, (tuple, list)):
        return value
    pairs = value and isinstance(value[0], (tuple, list))
    return [end for ends in zip(*value, strict=True) for end in ends] if pairs else list(value)


def _ints(*v: int | None) -> np.ndarray:
    return np.array(v, dtype=np.int64)


_END = np.iinfo(np.int64).max
#: form -> function from an attribute to a constant, or to None if it is left out
_FORMS: dict[str, Callable[[Any], Any]] = {
    "real": lambda v: None if v is None else np.float32(v),
    "integer": np.int64,
    "integers": lambda v: np.atleast_1d(np.asarray(v, np.int64)),
    "end": lambda v: _ints(_END if v is None else v),
}
_SUMS = "stride=strides padding=pads dilation=dilations groups=group"
_WINDOW = "kernel=kernel_shape stride=strides padding=pads ceil_mode"
#: operators that cannot be written, and why
REFUSED = refused("onnx")


# ---------------------------------------------------------------- products


def _conv(w: OnnxBuilder, n: Node, x: Names) -> list[str]:
    return OnnxOp("Conv", _SUMS)(w, n, x, kernel_shape=list(w.shape(n, "w")[2:]))


def _dynamic_quantize(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write DynamicQuantizeLinear, whose integers its readers read; some readers quantize inside."""
    a = n.attrs
    w.floats[n.output] = str(x[0])
    if a["per"] == "block" and (a["qmin"], a["qmax"], a["affine"]) == (-127, 127, False):
        w.dynamic[n.output] = ("", "", "")
        return str(x[0])
    why = f"integers {a['qmin']}..{a['qmax']} with a range for each {a['per']}; ONNX has 0..255 with one range"
    require(n, (a["per"], a["qmin"], a["qmax"], a["affine"]) == ("tensor", 0, 255, True), why)
    q, s, z = w.op_many("DynamicQuantizeLinear", x, 3)
    w.dynamic[n.output] = q, s, z
    centred = w.op("Sub", [w.op("Cast", [v], to=tensor_type("int32")) for v in (q, z)])
    return w.op("Mul", [w.op("Cast", [centred], to=tensor_type("float32")), s])


def _dynamic_product(w: OnnxBuilder, n: Node, x: Names) -> str | None:
    """Write a product of dynamically quantized data or of weights in blocks; return None for any other."""
    name = n.weight_operand or ""
    stored, dynamic = w.plan.stored(name), w.dynamic.get(n.data)
    raw = stored is None or (name, n.name) in w.plan.float_edges
    if stored is None or raw or (dynamic is None and stored.grid.per != "block"):
        return None
    bias = x[2] if len(x) > 2 else None
    if stored.grid.per == "block":
        return _mat_mul_n_bits(w, n, x[0], name, bias, level=1 if dynamic is None else 4)
    if dynamic is None or not dynamic[0]:
        refuse(n, "weights with one scale for each channel multiply data with one for each block")
    require(n, not stored.zero_point.any(), "weights with zero points multiply dynamically quantized data")
    q, (scale, _) = stored.quantize(w.graph.weights[name].detach()), w.qparams(name, stored)
    if n.op == "MatMul":
        integers = w.weight_integers(name, name, q)
    elif all(m.op == n.op for m in w.graph.nodes if name in m.inputs):
        integers = w.weight_integers(name, f"{name}_t1", q.t())
    else:  # also a table, whose rows are gathered
        integers = w.op("Transpose", [w.weight_integers(name, name, q)], perm=[1, 0])
    acc = w.op("MatMulInteger", [dynamic[0], integers, dynamic[2]])
    y = w.op("Mul", [w.op("Cast", [acc], to=tensor_type("float32")), w.op("Mul", [dynamic[1], scale])])
    return y if bias is None else w.op("Add", [y, bias])


def _mat_mul_n_bits(w: OnnxBuilder, n: Node, x: str, name: str, bias: str | None, level: int) -> str:
    """Write ONNX Runtime's product with weights in blocks, bytes [N, blocks, block * bits / 8], the low half first.

    Args:
        level: 1 computes in float32; 4 quantizes the data to 8 bits, in the same blocks.
    """
    k, bits, block, (rows, *qparams) = _in_blocks(w, n, name)
    weight = w.const(rows.reshape(len(rows), -1, block * bits // 8), f"{name}_q")
    size = {"K": k, "N": len(rows), "bits": bits, "block_size": block}
    return w.op("MatMulNBits@com.microsoft", [x, weight, *qparams, None, bias], accuracy_level=level, **size)


def _in_blocks(w: OnnxBuilder, n: Node, name: str) -> tuple[int, int, int, list[Any]]:
    """Return a weight in blocks: length of a row, bits, block size, and [rows as bytes, scales, zero points or None].

    Signed integers are stored unsigned, shifted by half of the range: without zero points kernels assume that.
    """
    stored, codes = w.plan[name], w.plan[name].quantize(w.graph.weights[name].detach()).int()
    scale, zero, grid = stored.scale, stored.zero_point, stored.grid
    if n.op == "MatMul":
        codes, scale, zero = (v.t() for v in (codes, scale, zero))
    block = codes.shape[1] // scale.shape[1]
    fits = grid.bits in (4, 8) and block >= 16 and not block & (block - 1) and not (grid.signed and zero.any())
    got = f"blocks of {block} {'signed ' * grid.signed}integers of {grid.bits} bits"
    require(n, fits, f"{got}; kernels have powers of two from 16, of 4 or 8 bits, and unsigned zero points")
    middle = 1 << grid.bits - 1 if grid.signed else 0
    zeros = None if grid.signed else w.const(to_bytes(zero, grid.bits), f"{name}_zero_point")
    rows = [to_bytes(codes + middle, grid.bits), w.const(scale, f"{name}_scale"), zeros]
    return codes.shape[1], grid.bits, block, rows


def _linear(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write a Gemm; for inputs of more than two axes, of their rows, or a MatMul."""
    if (product := _dynamic_product(w, n, x)) is not None:
        return product
    *outer, _ = shape = w.shape(n)
    out, k = w.shape(n, "w")
    if len(shape) == 2:
        return w.op("Gemm", x, transB=1)
    if not w.flattens:
        y = w.op("MatMul", [x[0], w.op("Transpose", [x[1] or ""], perm=[1, 0])])
        return y if len(x) < 3 or x[2] is None else w.op("Add", [y, x[2]])
    flat = w.once((x[0], "rows"), lambda: w.pass_through("Reshape", [x[0], w.const(_ints(-1, k))], n))
    y = w.op("Gemm", [flat, *x[1:]], transB=1)
    target = w.const(_ints(*(-1 if s is None else s for s in outer), out))
    if outer.count(None) > 1:
        sizes = w.op("Slice", [w.op("Shape", [x[0]]), w.const(_ints(0)), w.const(_ints(-1))])
        target = w.op("Concat", [sizes, w.const(_ints(out))], axis=0)
    w.defer(n.output, lambda result: w.op("Reshape", [result, target]))
    return y


def _mat_mul(w: OnnxBuilder, n: Node, x: Names) -> str:
    return _dynamic_product(w, n, x) or w.op("MatMul", x)


# ---------------------------------------------------------------- pools


def _pool(w: OnnxBuilder, n: Node, x: Names) -> list[str]:
    """Write a pool; windows beyond the image (`ceil_mode`), on which runtimes disagree, become padding behind it.

    That padding does not count in an average. Where other padding counts, that one becomes a Pad of its own; in files
    for OpenVINO, which pads integers with 0 whatever their zero point, always.
    """
    a, sizes = n.attrs, w.shape(n)[2:]
    if not w.flattens and a.get("count_include_pad") and any(p for pair in a["padding"] for p in pair):
        low, high = zip(*a["padding"], strict=True)
        x = [w.pass_through("Pad", [x[0], w.const(_ints(0, 0, *low, 0, 0, *high))], n)]
        a = {**a, "padding": ((0, 0),) * len(low), "count_include_pad": False}
        n = n.with_(attrs=a)
    results = [s or 0 for s in w.graph.shape(n.output)[2:]]
    if a["ceil_mode"] and None not in sizes and all(results):
        low, high = zip(*a["padding"], strict=True)
        windows = zip(a["kernel"], a["stride"], a.get("dilation", [1] * len(sizes)), strict=True)
        reach = [(o - 1) * s + d * (k - 1) + 1 for o, (k, s, d) in zip(results, windows, strict=True)]
        last = [max(r - i - p, q) for r, i, p, q in zip(reach, sizes, low, high, strict=True)]
        counted = bool(a.get("count_include_pad")) and last != list(high)
        if counted and any(low + high):
            ends = w.const(_ints(0, 0, *low, 0, 0, *high))
            x, last, low = (
                [w.pass_through("Pad", [x[0], ends], n)],
                [q - p for q, p in zip(last, high)],
                (0,) * len(low),
            )
        a = {**a, "ceil_mode": False, "padding": tuple(zip(low, last, strict=True))}
        if counted:
            a["count_include_pad"] = False
        n = n.with_(attrs=a)
    kind, own = ("MaxPool", "dilation=dilations") if n.op == "MaxPool" else ("AveragePool", "count_include_pad")
    return OnnxOp(kind, f"{_WINDOW} {own}")(w, n, x)


# ---------------------------------------------------------------- norms


def _batch_norm(w: OnnxBuilder, n: Node, x: Names) -> str:
    size = w.shape(n, "mean")[0]
    scale = x[1] or w.const(np.ones(size, np.float32))
    shift = x[2] or w.const(np.zeros(size, np.float32))
    return w.op("BatchNormalization", [x[0], scale, shift, x[3], x[4]], epsilon=n.attrs["eps"])


def _layer_norm(w: OnnxBuilder, n: Node, x: Names) -> str:
    return w.op("LayerNormalization", x, axis=-len(n.attrs["normalized_shape"]), epsilon=n.attrs["eps"])


def _instance_norm(w: OnnxBuilder, n: Node, x: Names) -> str:
    channels = w.shape(n)[1]
    scale, shift = (
        p or w.const(np.full(channels, of, np.float32)) for p, of in zip([*x[1:], None, None], (1, 0), strict=False)
    )
    return w.op("InstanceNormalization", [x[0], scale, shift], epsilon=n.attrs["eps"])


def _group_norm(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write the norm of [N, groups, rest]; the shape is restored at run time, so that images may have any size."""
    _, channels, *spatial = w.shape(n)
    groups = n.attrs["groups"]
    y = w.op("Reshape", [x[0], w.const(_ints(0, groups, -1))])
    ones, zeros = (w.const(np.full(groups, neutral, np.float32)) for neutral in (1, 0))
    y = w.op("InstanceNormalization", [y, ones, zeros], epsilon=n.attrs["eps"])
    y = w.op("Reshape", [y, w.op("Shape", [x[0]])])
    for op, p in zip(("Mul", "Add"), x[1:], strict=False):
        if p is not None:
            y = w.op(op, [y, w.op("Reshape", [p, w.const(_ints(1, channels, *[1] * len(spatial)))])])
    return y


def _grid_sample(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write a GridSample, whose modes have other names from opset 20 on."""
    mode = n.attrs["mode"].replace("bi", "") if w.opset >= 20 else n.attrs["mode"]
    corners = int(n.attrs["align_corners"])
    return w.op("GridSample", x, mode=mode, padding_mode=n.attrs["padding_mode"], align_corners=corners)


# ---------------------------------------------------------------- element by element


def _prelu(w: OnnxBuilder, n: Node, x: Names) -> str:
    rank = len(w.shape(n))
    of_channels = rank > 1 and len(w.graph.shape(n.weight)) < 2
    slope = x[1] if not of_channels else w.op("Reshape", [x[1], w.const(_ints(-1, *[1] * (rank - 2)))])
    return w.op(n.op, [x[0], slope])


def _softmax(w: OnnxBuilder, n: Node, x: Names) -> list[str] | str:
    """Write exp(log softmax) where ONNX Runtime would fuse Softmax into its quantized kernel and must not.

    That kernel rounds to 1/256 or fails: over a single element it overflows and gives 0, and for a result scale other
    than 1/256 it is far off. ONNX Runtime fuses no softmax of floats.
    """
    planned = w.plan.nodes.get(n.name)
    fuses = w.plan.quantized(n.output) and not w.computed_in_float(x[0])
    if fuses and (planned is None or planned.exec == "float" or w.shape(n)[n.attrs["axis"]] == 1):
        return w.op("Exp", OnnxOp("LogSoftmax", "axis")(w, n, x))
    return OnnxOp("Softmax", "axis")(w, n, x)


def _cast(w: OnnxBuilder, n: Node, x: Names) -> str:
    return w.op("Cast", x, to=tensor_type(n.attrs["dtype"]))


# ---------------------------------------------------------------- pass-through


def _stack(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write one constant for all operands; the decomposition makes one for each."""
    axis = w.const(_ints(n.attrs["axis"]))
    return w.op("Concat", [w.op("Unsqueeze", [i, axis]) for i in x], axis=n.attrs["axis"])


def _embedding(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write a Gather of integer rows, which are dequantized behind it (in front of it, the whole table would be)."""
    if (stored := w.plan.stored(n.weight)) is not None and stored.grid.per == "block":
        _, bits, block, (rows, *qparams) = _in_blocks(w, n, n.weight)
        require(n, not stored.grid.signed, "its blocks have signed integers")
        how = {"gather_axis": 0, "quantize_axis": 1, "bits": bits, "block_size": block}
        table = w.const(rows, f"{n.weight}_rows_q")
        return w.op("GatherBlockQuantized@com.microsoft", [table, x[1], *qparams], **how)
    dequantize = next((maker for maker in w.nodes if x[0] in maker.output), None)
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return w.op("Gather", x, axis=0)
    integers, scale, zero = dequantize.input
    rows, stored, rank = w.op("Gather", [integers, x[1]], axis=0), w.plan[n.weight], len(w.shape(n, "in0"))
    if stored.scale.dim() and not stored.zero_point.any():  # DequantizeLinear takes six times as long
        if stored.axis == 0:  # one scale for each row
            scale = w.op("Unsqueeze", [w.op("Gather", [scale, x[1]], axis=0), w.const(_ints(rank))])
        return w.op("Mul", [w.op("Cast", [rows], to=tensor_type("float32")), scale])
    require(n, stored.axis != 0, "its rows have zero points of their own")
    return w.op("DequantizeLinear", [rows, scale, zero], **({"axis": rank} if stored.scale.dim() else {}))


def _arg_max(w: OnnxBuilder, n: Node, x: Names) -> str:
    if n.attrs["axis"] is None:
        return w.op(n.op, [w.op("Reshape", [x[0], w.const(_ints(-1))])], axis=0, keepdims=0)
    return w.op(n.op, x, axis=n.attrs["axis"], keepdims=int(n.attrs["keepdims"]))


def _top_k(w: OnnxBuilder, n: Node, x: Names) -> list[str]:
    k, axis = n.attrs["k"], n.attrs["axis"]
    count = w.op("Gather", [w.op("Shape", x), w.const(_ints(axis))]) if k is None else w.const(_ints(k))
    return w.op_many("TopK", [x[0], count], 2, axis=axis, largest=int(n.attrs["largest"]), sorted=1)


def _detections(w: OnnxBuilder, n: Node, x: Names) -> list[str]:
    """Write detections: decoded boxes, NonMaxSuppression, and the best of what it selects in order of the scores.

    Corners are [N, B, 4], scores [N, C, B] with one score for each box where classes do not have selections of their
    own. Places in the result beyond the last detection hold 0.
    """
    a, boxes, classes = n.attrs, w.shape(n)[1] or 0, w.shape(n, "in1")[2] or 0
    most, each = a["max_detections"], a["detections_per_class"] if a["use_regular_nms"] else a["max_detections"]
    least = boxes * (a["num_classes"] if a["use_regular_nms"] else 1)
    require(n, classes and least >= most, f"it has fewer than {most} boxes, or an open number")

    def part(data: str, start: int, end: int) -> str:
        return w.op("Slice", [data, *(w.const(_ints(k)) for k in (start, end, -1))])

    def picked(data: str) -> str:
        chosen = w.op("GatherND", [data, w.op("Unsqueeze", [box, w.const(_ints(-1))])], batch_dims=1)
        return w.op(
            "Mul", [w.op("Cast", [chosen], to=tensor_type("float32")), w.op("Unsqueeze", [found, w.const(_ints(-1))])]
        )

    scale = w.const(np.array([a[f"{axis}_scale"] for axis in "yxhw"], np.float32))
    parts, place, size = w.op("Div", [part(x[0], 0, 4), scale]), part(x[2], 0, 2), part(x[2], 2, 4)
    center = w.op("Add", [w.op("Mul", [part(parts, 0, 2), size]), place])
    extent = w.op("Mul", [w.op("Exp", [part(parts, 2, 4)]), size])
    half = w.op("Mul", [extent, w.const(np.float32(0.5))])
    corners = w.op("Concat", [w.op("Sub", [center, half]), w.op("Add", [center, half])], axis=-1)
    scores = part(x[1], classes - a["num_classes"], classes)
    if not a["use_regular_nms"]:
        several = min(a["max_classes_per_detection"], a["num_classes"])
        ordered, labels = w.op_many("TopK", [scores, w.const(_ints(several))], 2, axis=-1)
        scores = part(ordered, 0, 1)
    scores = w.op("Transpose", [scores], perm=[0, 2, 1])
    limit = np.nextafter(np.float32(a["nms_score_threshold"]), np.float32(-np.inf))  # it is kept, and would not be
    limits = [
        w.const(_ints(min(each, most))),
        w.const(np.array([a["nms_iou_threshold"]], np.float32)),
        w.const(limit[None]),
    ]
    chosen = w.op("NonMaxSuppression", [corners, scores, *limits])
    nothing = w.op("Expand", [w.const(np.float32(-np.inf)), w.op("Shape", [scores])])
    kept = w.op("ScatterND", [nothing, chosen, w.op("GatherND", [scores, chosen])])
    flat = w.op("Reshape", [kept, w.const(_ints(0, -1))])
    values, at = w.op_many("TopK", [flat, w.const(_ints(most))], 2, axis=-1)
    number, count = tensor_type("float32"), w.const(np.float32(boxes))
    is_none = w.op("Equal", [values, w.const(np.float32(-np.inf))])
    found, at = w.op("Cast", [w.op("Not", [is_none])], to=number), w.op("Cast", [at], to=number)
    label = w.op("Floor", [w.op("Div", [at, count])])
    box = w.op("Cast", [w.op("Sub", [at, w.op("Mul", [label, count])])], to=tensor_type("int64"))
    results = [picked(corners), w.op("Mul", [label, found])]
    results.append(w.op("Where", [is_none, w.const(np.float32(0)), values]))
    if not a["use_regular_nms"]:
        repeat = a["max_classes_per_detection"]
        ends = w.const(_ints(0, 0, 0, 0, 0, repeat - several))
        labels, ordered = (w.op("Pad", [picked(y), ends]) for y in (labels, ordered))
        results[1:] = (w.op("Reshape", [y, w.const(_ints(0, -1))]) for y in (labels, ordered))
        rows = w.const(np.repeat(np.arange(most), repeat))
        results[0] = w.op("Gather", [results[0], rows], axis=1)
    return [*results, w.op("ReduceSum", [found], axes=[1], keepdims=0)]


def _pad(w: OnnxBuilder, n: Node, x: Names) -> str:
    mode = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}[n.attrs["mode"]]
    ends = w.const(_ints(*onnx_attribute(n.attrs["padding"])))
    dtype = np.float32 if w.graph.is_float(n.data) else w.graph.values[n.data].dtype
    value = w.const(np.asarray(n.attrs["value"], dtype)) if mode == "constant" else None
    return w.op("Pad", [x[0], ends, value], mode=mode)


def _squeeze(w: OnnxBuilder, n: Node, x: Names) -> str:
    axes = n.attrs["axes"]  # in ONNX, none means every axis of size 1
    return w.op(n.op, [x[0], w.const(_ints(*axes))]) if axes else w.op("Identity", x)


def _expand(w: OnnxBuilder, n: Node, x: Names) -> str:
    shape = [1 if s == -1 and n.op == "Expand" else s for s in n.attrs["shape"]]
    target = w.const(_ints(*(1 if s is None else s for s in shape)))
    for size, k in zip(x[1:], (k for k, s in enumerate(shape) if s is None), strict=True):
        here = w.const(np.arange(len(shape)) == k)
        target = w.op("Where", [here, size, target])
    return w.op(n.op, [x[0], target])


def _mod(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write the remainder with the sign of the divisor; ONNX has that of floats with the sign of the dividend only."""
    rest, zero = w.op(n.op, x, fmod=1), w.const(np.zeros((), w.graph.values[n.output].dtype))
    differ = w.op("Xor", [w.op("Less", [rest, zero]), w.op("Less", [x[1], zero])])
    wraps = w.op("And", [differ, w.op("Not", [w.op("Equal", [rest, zero])])])
    return w.op("Where", [wraps, w.op("Add", [rest, x[1]]), rest])


def _roll(w: OnnxBuilder, n: Node, x: Names) -> str:
    """Write slices rather than an index, so that the axis may have any size."""
    y = x[0]
    for shift, axis in zip(n.attrs["shifts"], n.attrs["axes"], strict=True):
        ends = ((-shift, _END), (0, -shift))
        parts = [w.op("Slice", [y, *(w.const(_ints(v)) for v in (lo, hi, axis))]) for lo, hi in ends]
        y = w.op("Concat", parts, axis=axis)
    return y


def _tile(w: OnnxBuilder, n: Node, x: Names) -> str:
    repeats = n.attrs["repeats"]
    extra = len(repeats) - len(w.shape(n))
    y = w.op("Unsqueeze", [x[0], w.const(_ints(*range(extra)))]) if extra else x[0]
    return w.op("Tile", [y, w.const(_ints(*repeats))])


def _resize(w: OnnxBuilder, n: Node, x: Names) -> str:
    a = n.attrs
    if a["scale"] is not None:
        kept = [1.0] * (len(w.shape(n)) - len(a["scale"]))
        extra = ["", w.const(np.array([*kept, *a["scale"]], np.float32))]
    else:
        shape = w.op("Slice", [w.op("Shape", [x[0]]), w.const(_ints(0)), w.const(_ints(2)), w.const(_ints(0))])
        extra = ["", "", w.op("Concat", [shape, w.const(_ints(*a["size"]))], axis=0)]
    grid = "align_corners" if a["align_corners"] else "pytorch_half_pixel"
    how: dict[str, dict[str, Any]] = {
        "nearest": {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        "nearest_exact": {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"},
        "linear": {"coordinate_transformation_mode": grid},
        "linear_corner": {"coordinate_transformation_mode": "asymmetric"},
        "cubic": {"coordinate_transformation_mode": grid, "cubic_coeff_a": -0.75},
    }
    return w.op("Resize", [x[0], *extra], mode=a["mode"].partition("_")[0], **how[a["mode"]])


def _size_of(w: OnnxBuilder, n: Node, x: Names) -> str:
    axis, rank = n.attrs["axis"], len(w.shape(n, "in0"))
    shape = w.op("Shape", [w.for_size(str(x[0]), axis % rank, rank)])
    return w.op("Gather", [shape, w.const(np.int64(axis))])


# ---------------------------------------------------------------- the column of the table


_BY_NAME = by_name(
    *(_conv, _dynamic_quantize, _linear, _mat_mul, _pool, _batch_norm, _layer_norm, _instance_norm, _group_norm),
    *(_prelu, _softmax, _cast, _stack, _embedding, _arg_max, _top_k, _pad, _squeeze, _expand, _mod, _roll, _tile),
    _detections,
    *(_resize, _grid_sample, _size_of, recurrent),
)
_CONDITIONS: dict[str, Callable[[Node], bool]] = {
    "has_scale": lambda n: n.operand("w") is not None,
    "has_operator": has_operator,
    "is_plain_softplus": lambda n: n.attrs["beta"] == 1.0 and n.attrs["threshold"] >= LINEAR_SOFTPLUS,
}
WRITERS: dict[str, Write] = {}
#: operator -> whether ONNX has a form of a node; it has one of every node of the other operators in `WRITERS`
CONDITIONS: dict[str, Callable[[Node], bool]] = {}
#: operator -> the first opset that has it, if that is later than the lowest one of the files
OPSETS = {OPAQUE: 18}


def _enter_cell(
    op: str,
    name: str = "",
    write: str | Write = "",
    reads: str = "",
    read: Any = None,
    given: Any = None,
    condition: str = "",
    opset: int = 0,
    **form: Any,
) -> None:
    """Enter a cell of the table of operators: fields of `OnnxOp`, or a function `write`.

    Args:
        reads, read, given: for the reader, see `frameworks.onnx.read`; what is read under another name has no writer.
        condition: function of `_CONDITIONS`, as in `CONDITIONS`.
        opset: as in `OPSETS`.
    """
    if not reads:
        WRITERS[op] = resolve(write, _BY_NAME) if write else OnnxOp(name, **form)
    if condition:
        CONDITIONS[op] = _CONDITIONS[condition]
    if opset:
        OPSETS[op] = opset


read_column("onnx", _enter_cell, WRITERS, CONDITIONS, OPSETS)
