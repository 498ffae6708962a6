"""Readers of ONNX operators: a cell of the table of operators where that suffices, else a short function.

The cell is the one that files are written by (`export.onnx.ops`), read in the other direction. A function maps an
`OnnxCall` to the result, or to a list of results: `c.emit` adds the canonical node that computes the result and has its
name, `c.step` one that computes an intermediate value. Either raises `Unreadable` for a node without canonical
equivalent; that node becomes an opaque one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.model import domain_of
from chipfit.frameworks.onnx.runtime import as_tensor
from chipfit.frameworks.reading import Unreadable, chunk_sizes, padded, present, require
from chipfit.operators.table import ATTRIBUTES, OPS, attribute_words, by_name, enters, read_column, reader_of

Reader = Callable[[OnnxCall], Any]

#: ONNX operator -> readers of its cells, of which the first that understands a node counts
READERS: dict[str, list[Reader]] = {}
#: ONNX operator -> the function that reads it in place of cells
_FUNCTIONS: dict[str, Reader] = {}
reads = enters(_FUNCTIONS)


def readers_of(kind: str) -> Sequence[Reader]:
    """Return the readers of an ONNX operator, to be tried in order."""
    return [_FUNCTIONS[kind]] if kind in _FUNCTIONS else READERS.get(kind, ())


def read(c: OnnxCall) -> list[Operand]:
    """Read a node; raises Unreadable where it has no canonical equivalent."""
    why: Unreadable | None = None
    kind = f"{c.node.op_type}@{c.node.domain}" if domain_of(c.node) else c.node.op_type
    for reader in readers_of(kind):
        mark = c.builder.mark()
        try:
            found = reader(c)
            return found if isinstance(found, list) else [found]
        except Unreadable as e:
            c.builder.undo(mark)
            why = e
    raise why or Unreadable


def _as_flag(v: Any) -> bool:
    return bool(v)


#: kind of an attribute -> its conversion from ONNX
_FROM_ATTRIBUTE: dict[str, Callable[[Any], Any]] = {"flag": _as_flag, "int*": tuple, "count*": tuple, "size*": tuple}
#: form of a constant operand -> its conversion from numbers
_FROM_CONSTANT: dict[str, Callable[[Any], Any]] = {
    "real": lambda v: None if v is None else float(v),
    "integer": lambda v: int(np.array(v).item()),  # a number, or a list of one
}


def _enter_cell(
    op: str,
    name: str = "",
    reads: str = "",
    attrs: str = "",
    constants: str = "",
    fixed: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    read: str | Callable[..., Any] = "",
    write: Any = None,
    condition: str = "",
    opset: int = 0,
) -> None:
    """Enter the reader of ONNX operators that become one node: a cell of the table of operators.

    Args:
        op: the canonical operator.
        name, reads: its name in ONNX; `reads` if it is read but not written.
        attrs: "ours=theirs" for each attribute.
        constants: operands behind the data that are constants, as "attribute:form" or "number:form".
        fixed: attributes that the node must have.
        given: attributes of the canonical operator that ONNX does not have.
        read: a reader that takes the place of the fields above, or the name of a function of `_READERS_OF`.
        write, condition, opset: for the writer, see `export.onnx.ops`.
    """
    slots = OPS[op].slots
    words = [
        (ours, theirs, _FROM_ATTRIBUTE.get(ATTRIBUTES.get(ours, ""), lambda v: v))
        for ours, theirs, _ in attribute_words(attrs)
    ]
    trailing = [(ours, _FROM_CONSTANT.get(form)) for ours, _, form in attribute_words(constants)]
    named = {*(theirs for _, theirs, _ in words), *(fixed or {})}

    def read_cell(c: OnnxCall) -> Any:
        require(all(c.attr(k) == v or _equal_in_float32(c.attr(k), v) for k, v in (fixed or {}).items()))
        many = slots[-1].endswith("*")
        count = len(c.inputs) if many else len(slots)
        operands = [c.optional(k) if not many and slots[k].endswith("?") else c.operand(k) for k in range(count)]
        require(all(k in named or c.is_default(k) for k in c.node.attributes))
        values = [(ours, c.attr(theirs), convert) for ours, theirs, convert in words]
        found = {ours: None if value is None else convert(value) for ours, value, convert in values}
        require(None not in found.values() and not any(x is not None for x in c.inputs[count + len(trailing) :]))
        for k, (ours, convert) in enumerate(trailing, count):
            number = present(convert)(c.numbers("", k))
            if ours in OPS[op].attrs:
                found[ours] = number
            elif number != float(ours):
                raise Unreadable
        require(sum(bool(o) for o in c.outputs) == 1)
        return c.emit(op, operands, **found, **(given or {}))

    own = reader_of(op, read, _READERS_OF) if read else read_cell
    for word in (reads or name).split():
        READERS.setdefault(word, []).append(own)


def _equal_in_float32(a: Any, b: Any) -> bool:
    return isinstance(a, float) and isinstance(b, (int, float)) and bool(np.float32(a) == np.float32(b))


# ---------------------------------------------------------------- windows


def _windows(c: OnnxCall, kernel: Sequence[Any], dilation: Sequence[int]) -> tuple[tuple[int, ...], Any]:
    """Return strides and padding ((lo, hi), ...) of a node; `auto_pad` needs spatial axes of known size.

    Raises:
        Unreadable: The padding depends on an open size.
    """
    n = len(kernel)
    stride, auto = tuple(c.attr("strides") or (1,) * n), c.attr("auto_pad") or "NOTSET"
    if auto in ("NOTSET", "VALID"):
        return stride, _explicit_padding(c, n)
    pairs = []
    for k, sizes in enumerate(zip(*(m.shape[2:] for m in c.operand(0).metas), strict=True)):
        total = {max((-(-s // stride[k]) - 1) * stride[k] + dilation[k] * (kernel[k] - 1) + 1 - s, 0) for s in sizes}
        require(len(total) <= 1)
        (t,) = total
        pairs.append((t // 2, t - t // 2) if auto == "SAME_UPPER" else (t - t // 2, t // 2))
    return stride, tuple(pairs)


def _explicit_padding(c: OnnxCall, n: int) -> tuple[tuple[int, int], ...]:
    """Return the padding that a node states, ((lo, hi), ...) of n axes; none with `auto_pad` VALID."""
    pads = (c.attr("pads") if (c.attr("auto_pad") or "NOTSET") == "NOTSET" else None) or [0] * 2 * n
    return tuple((pads[k], pads[k + n]) for k in range(n))


@reads("Conv")
def _conv(c: OnnxCall) -> Any:
    operands, n, attrs = _layer(c)
    stride, padding = _windows(c, operands[1].shape[2:], attrs["dilation"])
    depthwise = n == 2 and attrs["groups"] > 1 and attrs["groups"] == operands[0].shape[1]
    op = "DepthwiseConv2D" if depthwise else f"Conv{n}D"
    return c.emit(op, operands, stride=stride, padding=padding, **attrs)


def _layer(c: OnnxCall) -> tuple[list[Any], int, dict[str, Any]]:
    """Return input, weight and bias of a convolution, its number of spatial axes, and its dilation and groups."""
    x, w = c.operand(0), c.weight(1)
    n = w.rank - 2
    require(x.rank == w.rank and 1 <= n <= 3)
    bias = None if c.optional(2) is None else c.weight(2)
    return [x, w, bias], n, {"dilation": tuple(c.attr("dilations") or (1,) * n), "groups": c.attr("group")}


@reads("ConvTranspose")
def _conv_transpose(c: OnnxCall) -> Any:
    operands, n, attrs = _layer(c)
    x, w, _ = operands
    stride, more = tuple(c.attr("strides") or (1,) * n), tuple(c.attr("output_padding") or (0,) * n)
    auto, sizes, wanted = c.attr("auto_pad") or "NOTSET", x.shape[2:], c.attr("output_shape")
    if auto.startswith("SAME") or wanted:
        require(None not in sizes)
        wanted = wanted or [s * k for s, k in zip(sizes, stride, strict=True)]
        reach = zip(sizes, stride, more, w.shape[2:], attrs["dilation"], wanted, strict=True)
        total = [s * (i - 1) + o + (k - 1) * d + 1 - size for i, s, o, k, d, size in reach]
        more = tuple(o + max(-t, 0) for o, t in zip(more, total, strict=True))
        total = [max(t, 0) for t in total]
        lows = [t // 2 if auto != "SAME_LOWER" else t - t // 2 for t in total]
        padding = tuple((lo, t - lo) for lo, t in zip(lows, total, strict=True))
    else:
        padding = _explicit_padding(c, n)
    return c.emit(f"TransposeConv{n}D", operands, stride=stride, padding=padding, output_padding=more, **attrs)


@reads("MaxPool AveragePool")
def _pool(c: OnnxCall) -> Any:
    kernel = tuple(c.attr("kernel_shape"))
    dilation, ceil_mode = tuple(c.attr("dilations") or (1,) * len(kernel)), bool(c.attr("ceil_mode"))
    require(len(kernel) <= 3 and sum(map(bool, c.outputs)) <= 1 and c.operand(0).rank == len(kernel) + 2)
    stride, padding = _windows(c, kernel, dilation)
    attrs: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    if c.node.op_type == "MaxPool":
        return c.emit("MaxPool", [c.operand(0)], **attrs, dilation=dilation)
    require(all(d == 1 for d in dilation))
    return c.emit("AvgPool", [c.operand(0)], **attrs, count_include_pad=bool(c.attr("count_include_pad")))


@reads("GlobalMaxPool")
def _global_max_pool(c: OnnxCall) -> Any:
    return c.emit("ReduceMax", [c.operand(0)], axes=tuple(range(2, c.operand(0).rank)), keepdims=True)


@reads("LpPool GlobalLpPool")
def _lp_pool(c: OnnxCall) -> Any:
    """Read the root of a sum of powers, over windows as their mean times their size."""
    x, p = c.operand(0), c.attr("p")
    axes, kernel = tuple(range(2, x.rank)), tuple(c.attr("kernel_shape") or ())
    given: dict[str, Any] = {"x": x, "p": _scalar(c, p, "p"), "root": _scalar(c, 1 / p, "root")}
    power, root = {1: ("abs(x)", "{}"), 2: ("x * x", "sqrt({})")}.get(p, ("pow(abs(x), p)", "pow({}, root)"))
    if c.node.op_type == "GlobalLpPool":
        return c.formula(root.format(f"sum({power}, axes=axes, keepdims=True)"), **given, axes=axes)
    dilation = tuple(c.attr("dilations") or (1,) * len(kernel))
    require(not c.attr("ceil_mode") and {*dilation} == {1} and x.rank == len(kernel) + 2 <= 5)
    stride, padding = _windows(c, kernel, dilation)
    how = "kernel=kernel, stride=stride, padding=padding, ceil_mode=False, count_include_pad=True"
    given |= {"kernel": kernel, "stride": stride, "padding": padding, "size": _scalar(c, math.prod(kernel), "size")}
    return c.formula(root.format(f"avgpool({power}, {how}) * size"), **given)


@reads("Pad")
def _pad(c: OnnxCall) -> Any:
    x, mode = c.operand(0), c.attr("mode") or "constant"
    pads, axes = present(c.integers("pads", 1)), c.integers("axes", 3)
    value = c.numbers("value", 2)
    modes = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    require(mode in modes)
    pairs = [(0, 0)] * x.rank
    for k, axis in enumerate(range(x.rank) if axes is None else axes):
        pairs[axis % x.rank] = (pads[k], pads[k + len(pads) // 2])
    require(mode == "constant" or all(lo >= 0 and hi >= 0 for lo, hi in pairs))
    value = value[0] if isinstance(value, list) else value
    columns = [{*size} for size in zip(*(m.shape for m in x.metas), strict=True)]
    require(mode != "wrap" or all(max(ends) <= min(size) for ends, size in zip(pairs, columns, strict=True)))
    sizes = [min(size) if len(size) == 1 else None for size in columns]
    return padded(c, x, pairs, sizes, modes[mode], float(value or 0))


@reads("Col2Im")
def _col2im(c: OnnxCall) -> Any:
    """Read columns [N, C kh kw, patches] as an image, of patches that do not overlap."""
    x, image, kernel = c.operand(0), present(c.integers("", 1)), present(c.integers("", 2))
    require(len(image) == 2 and tuple(c.attr("strides") or (1, 1)) == tuple(kernel))
    require(not any(c.attr("pads") or ()) and {*(c.attr("dilations") or (1,))} == {1})
    (h, w), (kh, kw) = image, kernel
    require(h % kh == 0 and w % kw == 0)
    channels = present(x.shape[1]) // (kh * kw)
    split = [[m.shape[0], channels, kh, kw, h // kh, w // kw] for m in x.metas]
    y = c.step("Transpose", [reshaped_step(c, x, split)], perm=(0, 1, 4, 2, 5, 3))
    return _reshape_to(c, y, [[m.shape[0], channels, h, w] for m in x.metas])


# ---------------------------------------------------------------- products


@reads("Gemm")
def _gemm(c: OnnxCall) -> Any:
    """Read alpha A B + beta C: a Linear if B is a constant, else a MatMul and the steps around it."""
    a, b, alpha, beta = c.operand(0), c.operand(1), c.attr("alpha"), c.attr("beta")
    if c.attr("transA"):
        a = c.step("Transpose", [a], perm=(1, 0))
    if b.constant is None or b.name:
        return _scaled_product(c, a, b)
    straight = bool(c.attr("transB"))
    change = _changed_unless(
        straight and alpha == 1, f"gemm{straight}{alpha}", lambda t: (t if straight else t.t()) * alpha
    )
    w = c.weight(1, *change)
    shift, rows = c.optional(2), w.shape[0]
    if shift is None or beta == 0:
        return c.emit("Linear", [a, w])
    small = shift.constant is not None and shift.constant.size in (1, rows)
    if small and (not shift.rank or shift.shape[-1] in (1, rows)):
        same = beta == 1 and shift.shape == (rows,)
        bias = c.weight(2, *_changed_unless(same, f"{beta}x{rows}", lambda t: (t.reshape(-1) * beta).expand(rows)))
        return c.emit("Linear", [a, w, bias])
    y = c.step("Linear", [a, w])
    return c.emit("Add", [y, shift if beta == 1 else c.step("Mul", [shift, _scalar(c, beta, "beta")])])


def _scaled_product(c: OnnxCall, a: Operand, b: Operand) -> Operand:
    """Read alpha A B + beta C of activations as MatMul, Mul and Add."""
    b, addend = c.step("Transpose", [b], perm=(1, 0)) if c.attr("transB") else b, c.optional(2)
    alpha, beta = c.attr("alpha"), c.attr("beta")
    steps = [("Mul", _scalar(c, alpha, "alpha"))] if alpha != 1 else []
    if addend is not None:
        steps.append(("Add", addend if beta == 1 else c.step("Mul", [addend, _scalar(c, beta, "beta")])))
    y = (c.step if steps else c.emit)("MatMul", [a, b])
    for k, (op, other) in enumerate(steps, 1):
        y = (c.step if k < len(steps) else c.emit)(op, [y, other])
    return y


def _scalar(c: OnnxCall, value: float, name: str) -> Operand:
    return c.new_weight(torch.tensor(value), name)


def _changed_unless(same: bool, form: str, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the arguments of `OnnxCall.weight` that change a weight and name its form; none if it stays the `same`."""
    return () if same else (form, change)


@reads("MatMul")
def _mat_mul(c: OnnxCall) -> Any:
    """Read a product; a vector on the left is one row, on the right one column, and the result is without that axis."""
    a, b = c.operand(0), c.operand(1)
    row, column = a.rank == 1, b.rank == 1
    append = c.step if row or column else c.emit
    if b.constant is not None and b.rank <= 2 and not b.name and a.constant is None:
        op, operands = "Linear", [a, c.weight(1, "t", lambda t: t.reshape(1, -1) if column else t.t())]
    else:
        op, operands = "MatMul", [a, c.step("Unsqueeze", [b], axes=(1,)) if column else b]
    if row:
        operands[0] = c.step("Unsqueeze", [a], axes=(0,))
    y = append(op, operands)
    axes = tuple(y.rank - k for k, single in ((2, row), (1, column)) if single)
    return c.emit("Squeeze", [y], axes=axes) if axes else y


# ---------------------------------------------------------------- norms


@reads("Attention")
def _attention(c: OnnxCall) -> Any:
    """Read attention of queries, keys and values by head, or with all heads in one axis, [B, L, heads * size]."""
    q, k, v, mask = (c.optional(i) for i in range(4))
    known = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap", "qk_matmul_output_mode"}
    causal, past = bool(c.attr("is_causal")), [c.optional(i) for i in (4, 5)]
    if (
        None in (q, k, v)
        or set(c.node.attributes) - known
        or c.attr("softcap")
        or any(c.outputs[3:])
        or c.optional(6) is not None
        or (causal and (mask is not None or past != [None, None]))
        or any(x.rank != q.rank for x in (k, v))  # type: ignore[union-attr]  # none is None
    ):
        raise Unreadable
    flat, heads = q.rank == 3, (c.attr("q_num_heads"), *[c.attr("kv_num_heads")] * 2)  # type: ignore[union-attr]
    pairs = zip((q, k, v), heads, strict=True)
    parts = [_split_heads(c, x, h) if x.rank == 3 else x for x, h in pairs if x is not None]
    for i, before in enumerate(past, 1):
        parts[i] = parts[i] if before is None else c.step("Concat", [before, parts[i]], axis=2)
    scale, groups = c.attr("scale"), parts[0].shape[1] != parts[1].shape[1]
    operands = parts if mask is None else [*parts, mask]
    add = c.step if flat else c.emit
    y = add("SDPA", operands, is_causal=causal, scale=scale, enable_gqa=groups)
    if flat:
        y = c.step("Transpose", [y], perm=(0, 2, 1, 3))
        y = _reshape_to(c, y, [[*m.shape[:2], m.shape[2:].numel()] for m in y.metas])
    return [y, parts[1], parts[2]][: len(c.outputs)]


def _split_heads(c: OnnxCall, x: Operand, heads: int) -> Operand:
    """Return [B, heads, L, size] of [B, L, heads * size]."""
    require(heads and not any(m.shape[2] % heads for m in x.metas))
    sizes = [[*m.shape[:2], heads, m.shape[2] // heads] for m in x.metas]
    return c.step("Transpose", [reshaped_step(c, x, sizes)], perm=(0, 2, 1, 3))


@reads("BatchNormalization")
def _batch_norm(c: OnnxCall) -> Any:
    if c.attr("training_mode") or c.attr("spatial") == 0 or sum(map(bool, c.outputs)) > 1 or c.operand(0).rank < 2:
        raise Unreadable
    statistics = [c.weight(3), c.weight(4)]
    c.builder.graph.trainable -= {s.name for s in statistics}
    return c.emit("BatchNorm", [c.operand(0), c.weight(1), c.weight(2), *statistics], eps=c.attr("epsilon"))


def _layer_norm(c: OnnxCall, op: str) -> Any:
    x = c.operand(0)
    shape = x.shape[(c.attr("axis") if c.attr("axis") is not None else -1) % x.rank :]
    operands = [c.weight(k) for k in (1, 2) if c.optional(k) is not None]
    require(None not in shape and sum(map(bool, c.outputs)) <= 1 and not any(o.shape != shape for o in operands))
    eps = c.attr("epsilon")
    return c.emit(op, [x, *operands], normalized_shape=tuple(shape), eps=1e-5 if eps is None else eps)


def _group_norm(c: OnnxCall, op: str) -> Any:
    groups, channels = c.attr("num_groups"), c.operand(0).shape[1]
    require(channels is not None)
    each = channels // groups if c.opset < 21 else 1
    how = _changed_unless(each == 1, f"each{each}", lambda t: t.repeat_interleave(each))
    return c.emit(op, [c.operand(0), c.weight(1, *how), c.weight(2, *how)], groups=groups, eps=c.attr("epsilon"))


def _lp_norm(c: OnnxCall, op: str) -> Any:
    x, axis = c.operand(0), c.attr("axis")
    if c.attr("p") == 2:
        return c.emit(op, [x], axis=axis, eps=_LEAST_LENGTH)
    formula = "x / clamp(sum(abs(x), axes=axes, keepdims=True), min=least, max=None)"
    return c.formula(formula, x=x, axes=(axis % x.rank,), least=_LEAST_LENGTH)


def _softmax(c: OnnxCall, op: str) -> Any:
    """Read softmax; before opset 13 it is over all axes from `axis` on."""
    x, axis = c.operand(0), c.attr("axis")
    if c.opset >= 13 or axis % x.rank == x.rank - 1:
        return c.emit(op, [x], axis=axis)
    axis %= x.rank
    flat = reshaped_step(c, x, [[*m.shape[:axis], m.shape[axis:].numel()] for m in x.metas])
    y = c.step(op, [flat], axis=-1)
    return _reshape_to(c, y, [[*m.shape] for m in x.metas])


# ---------------------------------------------------------------- element by element


@reads("Identity Dropout")
def _identity(c: OnnxCall) -> Any:
    require(len([o for o in c.outputs if o]) <= 1 and (c.node.op_type != "Dropout" or not _training(c)))
    return c.operand(0)


def _training(c: OnnxCall) -> bool:
    return bool(c.numbers("", 2)) and c.opset >= 12


@reads("Cast CastLike")
def _cast(c: OnnxCall) -> Any:
    """Read a conversion; all float types are read as float32."""
    import onnx_ir as ir

    x = c.operand(0)
    if c.node.op_type == "CastLike":
        dtype = c.operand(1).dtype
    else:
        kind = ir.DataType(c.attr("to"))
        if kind in (ir.DataType.STRING,) or kind.name.startswith(("FLOAT8", "FLOAT4", "INT4", "UINT4", "COMPLEX")):
            raise Unreadable
        dtype = torch.float32 if kind.is_floating_point() else getattr(torch, kind.name.lower())
    if dtype is x.dtype:
        return x
    return c.emit("Cast", [x], dtype=str(dtype).removeprefix("torch."))


#: an end of a range of at least this magnitude bounds nothing
_NO_BOUND = 3e38


@reads("Clip")
def _clip(c: OnnxCall) -> Any:
    given = [(op, c.optional(k)) for k, op in enumerate(("Max", "Min"), 1)]
    if any(x is not None and x.constant is None for _, x in given):  # ends that are computed
        y = c.operand(0)
        for op, end in given:
            unbounded = end is not None and end.constant is not None and (abs(end.constant) > _NO_BOUND).all()
            y = y if end is None or unbounded else c.step(op, [y, end])
        return y
    ends = [c.numbers(name, k) for k, name in enumerate(("min", "max"), 1)]
    low, high = (None if e is None or abs(e) > _NO_BOUND else float(e) for e in ends)
    require(c.operand(0).dtype.is_floating_point)
    if (low, high) in ((0, 6), (0, None)):
        return c.emit("Relu6" if high else "Relu", [c.operand(0)])
    return c.operand(0) if low is None and high is None else c.emit("Clamp", [c.operand(0)], min=low, max=high)


def _prelu(c: OnnxCall, op: str) -> Any:
    x, slope = c.operand(0), c.operand(1)
    count = present(slope.constant).size
    require(x.rank >= 2 or count == 1)
    shape = (1,) * (x.rank - slope.rank) + tuple(slope.shape)
    by_channel = x.rank > 1 and shape[0] == 1 and shape[1] == x.shape[1] and set(shape[2:]) <= {1}
    if count == 1 or by_channel:
        return c.emit(op, [x, c.weight(1, *_changed_unless(slope.rank == 1, "flat", lambda t: t.reshape(-1)))])
    require(shape[0] == 1)
    return c.emit(op, [x, c.weight(1, "sample", lambda t: t.reshape(shape[1:]))])


def _hard_sigmoid(c: OnnxCall, op: str) -> Any:
    """Read max(0, min(1, alpha x + beta)); PyTorch's has alpha 1/6 and beta 1/2."""
    alpha, beta = c.attr("alpha"), c.attr("beta")
    if _equal_in_float32(alpha, 1 / 6) and beta == 0.5:
        return c.emit(op, [c.operand(0)])
    given = {"x": c.operand(0), "alpha": _scalar(c, alpha, "alpha"), "beta": _scalar(c, beta, "beta")}
    return c.formula("clamp(x * alpha + beta, min=0.0, max=1.0)", **given)


def _gelu(c: OnnxCall, op: str) -> Any:
    x = c.operand(0) if c.optional(1) is None else c.step("Add", [c.operand(0), c.operand(1)])
    tanh = "tanh" if "Fast" in c.node.op_type else c.attr("approximate") or "none"
    return c.emit(op, [x], approximate=tanh)


@reads("QuickGelu@com.microsoft")
def _quick_gelu(c: OnnxCall) -> Any:
    alpha = c.attr("alpha")
    x = c.operand(0)
    inner = x if alpha == 1 else c.step("Mul", [x, _scalar(c, 1.702 if alpha is None else alpha, "alpha")])
    return c.emit("Mul", [x, c.step("Sigmoid", [inner])])


@reads("Max Min Sum Mean")
def _variadic(c: OnnxCall) -> Any:
    """Read an operator of any number of operands as a chain of two each."""
    op, (first, *rest) = {"Sum": "Add", "Mean": "Add"}.get(c.node.op_type, c.node.op_type), [*c.inputs]
    require(first is not None and None not in rest)
    if not rest:
        return first
    mean = c.node.op_type == "Mean"
    for k, x in enumerate(rest, 1):
        first = (c.step if mean or k < len(rest) else c.emit)(op, [first, x])
    return c.emit("Mul", [first, _scalar(c, 1 / (len(rest) + 1), "share")]) if mean else first


def _mod(c: OnnxCall, op: str) -> Any:
    """Read a remainder; with fmod it has the sign of the dividend."""
    a, b = c.operand(0), c.operand(1)
    require(a.dtype is b.dtype)
    if not c.attr("fmod"):
        return c.emit(op, [a, b])
    return c.formula(f"{op.lower()}(abs(a), abs(b)) * sign(a)", a=a, b=b)


def _arg_max(c: OnnxCall, op: str) -> Any:
    """Read the index of the first extreme, or that of the last one: the first of the reversed axis."""
    x, attrs = c.operand(0), {"axis": c.attr("axis"), "keepdims": bool(c.attr("keepdims"))}
    if not c.attr("select_last_index"):
        return c.emit(op, [x], **attrs)
    last = present(x.shape[attrs["axis"]]) - 1
    backwards = c.new_weight(torch.arange(last, -1, -1), "backwards")
    first = c.step(op, [c.step("Gather", [x, backwards], axis=attrs["axis"] % x.rank)], **attrs)
    return c.emit("Sub", [c.new_weight(torch.tensor(last), "last"), first])


@reads("Xor")
def _xor(c: OnnxCall) -> Any:
    return c.formula("not a == b", a=c.operand(0), b=c.operand(1))


def _arithmetic(c: OnnxCall, op: str) -> Any:
    a, b = c.operand(0), c.operand(1)
    if a.dtype is not b.dtype:
        require(OPS[op].exponent and a.dtype.is_floating_point)
        held = b.constant
        b = c.step("Cast", [b], dtype="float32") if held is None else c.new_weight(as_tensor(held).float(), "exponent")
    return c.emit(op, [a, b])


# ---------------------------------------------------------------- reductions


#: formulas of reductions that are several operators
_REDUCTIONS = {"ReduceL1": "sum(abs(x), {})", "ReduceSumSquare": "sum(x * x, {})"}
_REDUCTIONS |= {"ReduceLogSum": "log(sum(x, {}))", "ReduceLogSumExp": "log(sum(exp(x), {}))"}


def _reduce(c: OnnxCall, op: str) -> Any:
    kind = c.node.op_type
    x, axes, keepdims = c.operand(0), c.integers("axes", 1), bool(c.attr("keepdims"))
    if not axes and c.attr("noop_with_empty_axes"):
        require(kind not in ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"))
        return x
    axes = tuple(a % x.rank for a in axes) if axes else tuple(range(x.rank))
    require(axes and (x.dtype.is_floating_point or kind not in ("ReduceMean", "ReduceL2", "ReduceSumSquare")))
    if op == "Mean" and keepdims and x.rank > 3 and sorted(axes) == [*range(2, x.rank)]:
        return c.emit("GlobalAvgPool", [x])  # which exporters write so, and runtimes compute in integers
    if op == "Mean" and x.rank == 4 and sorted(axes) == [2, 3]:
        return _reshape_to(c, c.step("GlobalAvgPool", [x]), [m.shape[:2] for m in x.metas])
    if kind not in _REDUCTIONS:
        return c.emit(op, [x], axes=axes, keepdims=keepdims)
    return c.formula(_REDUCTIONS[kind].format("axes=axes, keepdims=keep"), x=x, axes=axes, keep=keepdims)


# ---------------------------------------------------------------- moving data


def _target_sizes(c: OnnxCall, index: int, attribute: str = "") -> list[list[int]]:
    """Return the sizes in an operand, or in an attribute of older versions, as a list for each variant of open sizes.

    Raises:
        Unreadable: It depends on data.
    """
    if attribute in c.node.attributes:
        return [list(c.attr(attribute))] * c.builder.count
    x = c.operand(index)
    require(x.numbers)
    return [[int(s) for s in n.reshape(-1)] for n in x.numbers]


@reads("Reshape")
def _reshape(c: OnnxCall) -> Any:
    x, targets = c.operand(0), _target_sizes(c, 1, "shape")
    if c.builder.fixed and all(t and t[0] == c.builder.fixed for t in targets) and _begins_with_batch(c, x):
        # the size that the file declares stands for the number of samples
        targets = [[rows, *t[1:]] for rows, t in zip(c.builder.batch, targets, strict=True)]
    sizes = []
    for m, target in zip(x.metas, targets, strict=True):
        known = [m.shape[k] if s == 0 and not c.attr("allowzero") else s for k, s in enumerate(target)]
        rest = int(np.prod([s for s in known if s != -1], dtype=object))
        sizes.append([(m.numel() // rest if rest else 0) if s == -1 else s for s in known])
    return _reshape_to(c, x, sizes)


def _begins_with_batch(c: OnnxCall, x: Operand) -> bool:
    return x.rank > 0 and tuple(m.shape[0] for m in x.metas) == c.builder.batch


def _reshape_to(c: OnnxCall, x: Operand, sizes: Sequence[Sequence[int]]) -> Operand:
    operands, attrs = _reshaped(c, x, sizes)
    return c.emit("Reshape", operands, **attrs)


def reshaped_step(c: OnnxCall, x: Operand, sizes: Sequence[Sequence[int]]) -> Operand:
    """Return an operand in sizes by variant, as an intermediate value."""
    if all(list(m.shape) == [*s] for m, s in zip(x.metas, sizes, strict=True)):
        return x
    operands, attrs = _reshaped(c, x, sizes)
    return c.step("Reshape", operands, **attrs)


def _reshaped(c: OnnxCall, x: Operand, sizes: Sequence[Sequence[int]]) -> tuple[list[Operand], dict[str, Any]]:
    """Return operands and attributes of a Reshape to sizes by variant.

    Of several open sizes the last becomes -1; the others become 0 where x has them in the same place, else an operand.
    """
    columns, operands = [*zip(*sizes, strict=True)], [x]
    shape: list[int | None] = [s[0] if len({*s}) == 1 else -1 for s in columns]
    require(0 not in shape)
    for k, s in enumerate(columns if shape.count(-1) > 1 else ()):
        if shape[k] == -1 and -1 in shape[k + 1 :]:
            unchanged = k < x.rank and tuple(m.shape[k] for m in x.metas) == s
            shape[k] = 0 if unchanged else None
            operands += [] if unchanged else [c.size(s)]
    return operands, {"shape": tuple(shape)}


@reads("Flatten")
def _flatten(c: OnnxCall) -> Any:
    x = c.operand(0)
    axis = c.attr("axis")
    axis = axis + x.rank if axis < 0 else axis
    return _reshape_to(c, x, [[m.shape[:axis].numel(), m.shape[axis:].numel()] for m in x.metas])


@reads("Transpose")
def _transpose(c: OnnxCall) -> Any:
    x, perm = c.operand(0), c.attr("perm")
    perm = tuple(perm) if perm else tuple(reversed(range(x.rank)))
    return x if perm == tuple(range(x.rank)) else c.emit("Transpose", [x], perm=perm)


@reads("Squeeze Unsqueeze")
def _squeeze(c: OnnxCall) -> Any:
    x, axes, op = c.operand(0), c.integers("axes", 1), c.node.op_type
    if axes is None:
        axes = tuple(k for k, s in enumerate(x.shape) if s == 1)
    require(op != "Squeeze" or all(x.shape[a] == 1 for a in axes))  # others are for another number of samples
    rank = x.rank + (len(axes) if op == "Unsqueeze" else 0)
    axes = tuple(sorted(a % rank for a in axes)) if rank else axes
    return c.emit(op, [x], axes=axes) if axes else x


@reads("Expand")
def _expand(c: OnnxCall) -> Any:
    x, targets = c.operand(0), _target_sizes(c, 1)
    return _expand_to(c, x, [torch.broadcast_shapes(m.shape, t) for m, t in zip(x.metas, targets, strict=True)])


def _expand_to(c: OnnxCall, x: Operand, results: Sequence[Sequence[int]]) -> Operand:
    """Repeat an operand along axes of size 1, up to sizes by variant."""
    added = len(results[0]) - x.rank
    shape: list[int | None] = []
    operands = [x]
    for k, s in enumerate(zip(*results, strict=True)):
        if k >= added and tuple(m.shape[k - added] for m in x.metas) == s:
            shape.append(-1)
        elif len({*s}) == 1:
            shape.append(s[0])
        else:
            shape.append(None)
            operands.append(c.size(s))
    return x if set(shape) <= {-1} else c.emit("Expand", operands, shape=tuple(shape))


@reads("Slice")
def _slice(c: OnnxCall) -> Any:
    x = c.operand(0)
    starts, ends = _target_sizes(c, 1, "starts"), _target_sizes(c, 2, "ends")
    axes = c.integers("axes", 3) or tuple(range(len(starts[0])))
    steps = c.integers("steps", 4) or (1,) * len(axes)
    todo = list[dict[str, Any]]()
    for k, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        sizes = [m.shape[axis] for m in x.metas]
        start, end = (_slice_end([e[k] for e in which], sizes) for which in (starts, ends))
        if len({*sizes}) == 1 and step > 0:  # beyond the ends of the axis
            start = max(start or 0, -sizes[0])
            start, end = 0 if start == -sizes[0] else start, None if end is not None and end >= sizes[0] else end
        if step < 0:
            require(len({*sizes}) == 1)
            stop = None if present(end) < -sizes[0] else end  # below the first element, which is part of the result
            backwards = np.arange(sizes[0])[start:stop:step]
            x = c.step("Gather", [x, c.builder.constants([backwards])], axis=axis % x.rank)
        elif (start, end, step) != (0, None, 1):
            todo.append({"axis": axis % x.rank, "start": start or 0, "end": end, "step": step})
    for k, attrs in enumerate(todo, 1):
        x = (c.step if k < len(todo) else c.emit)("Slice", [x], **attrs)
    return x


def _slice_end(ends: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Return an end of a slice for every size of the axis: as it is, counted from the end, or None for the end.

    Args:
        ends: by variant of the open sizes, as `sizes` of the axis.

    Raises:
        Unreadable: It depends on an open size in another way.
    """
    if len({*ends}) == 1:
        return ends[0] if ends[0] < 2**31 - 1 else None
    if all(e >= s for e, s in zip(ends, sizes, strict=True)):
        return None
    behind = {e - s for e, s in zip(ends, sizes, strict=True)}
    require(len(behind) <= 1 and min(behind) < 0)
    return behind.pop()


@reads("Split")
def _split(c: OnnxCall) -> Any:
    x, sizes, axis = c.operand(0), c.integers("split", 1), c.attr("axis")
    if "split" not in c.node.attributes and c.optional(1) is None:
        length, parts = present(x.shape[axis]), len(c.outputs)
        sizes = tuple(chunk_sizes(length, -(-length // parts)))
        require(len(sizes) == parts)
    return c.steps("Split", [x], c.outputs, axis=axis, sizes=sizes)


@reads("Gather")
def _gather(c: OnnxCall) -> Any:
    x, axis = c.operand(0), c.attr("axis") % c.operand(0).rank
    index = _nonnegative_index(c, 1, axis)
    if index.rank == 0 and index.constant is not None:
        return c.emit("Select", [x], axis=axis, index=int(index.constant))
    pairs = [*zip(x.metas, index.numbers, strict=False)]
    if pairs and all(n.size == m.shape[axis] and (n.reshape(-1) == np.arange(n.size)).all() for m, n in pairs):
        return _reshape_to(c, x, [[*m.shape[:axis], *n.shape, *m.shape[axis + 1 :]] for m, n in pairs])
    if x.constant is not None and not x.name and x.rank == 2 and axis == 0 and x.dtype.is_floating_point:
        return c.emit("Embedding", [c.weight(0), index])
    return c.emit("Gather", [x, index], axis=axis)


def _grid_sample(c: OnnxCall, op: str) -> Any:
    require(c.operand(0).rank == 4)
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(c.attr("mode"), c.attr("mode"))
    how = {"padding_mode": c.attr("padding_mode"), "align_corners": bool(c.attr("align_corners"))}
    return c.emit(op, [c.operand(0), c.operand(1)], mode=mode, **how)


def _gather_elements(c: OnnxCall, op: str) -> Any:
    axis = c.attr("axis") % c.operand(0).rank
    return c.emit(op, [c.operand(0), _nonnegative_index(c, 1, axis)], axis=axis)


def _nonnegative_index(c: OnnxCall, index: int, axis: int) -> Operand:
    """Return an operand with indices of an axis; constant ones below 0, which count from its end, become positive."""
    x, size = c.operand(index), c.operand(0).shape[axis]
    if x.constant is None or x.constant.min(initial=0) >= 0 or size is None:
        return x
    return c.builder.constants([np.where(x.constant < 0, x.constant + size, x.constant)])


@reads("GatherND")
def _gather_nd(c: OnnxCall) -> Any:
    """Read indices of the first axis, or constant ones of several axes, as indices of these axes in one."""
    x, index = c.operand(0), c.operand(1)
    count = present(index.shape[-1])
    require(not c.attr("batch_dims") and count)
    if index.constant is not None and None not in x.shape[:count]:
        sizes = np.array(x.shape[:count], int)
        places = np.moveaxis(index.constant % sizes, -1, 0)
        flat = c.builder.constants([np.ravel_multi_index(tuple(places), tuple(sizes))])
        y = reshaped_step(c, x, [[int(sizes.prod()), *m.shape[count:]] for m in x.metas])
    elif count > 1:
        return _with_repeated_axes(c, x, index)
    else:
        flat, y = reshaped_step(c, index, [m.shape[:-1] for m in index.metas]), x
    return c.emit("Gather", [y, flat], axis=0)


def _with_repeated_axes(c: OnnxCall, x: Operand, index: Operand) -> Operand:
    """Read a GatherND whose indices count every axis of x along an axis of the result, as exported masks do.

    Such a result is x, repeated along further axes.
    """
    require(index.numbers and index.shape[-1] == x.rank)
    axes = [_counting(c, [n[..., k] for n in index.numbers], k) for k in range(x.rank)]
    require(sorted({*axes}) == axes)
    added = tuple(k for k in range(index.rank - 1) if k not in axes)
    y = c.step("Unsqueeze", [x], axes=added) if added else x
    return _expand_to(c, y, [n.shape[:-1] for n in index.numbers])


def _counting(c: OnnxCall, numbers: Sequence[np.ndarray], k: int) -> int:
    """Return the axis along which indices of axis k of the operand are 0, 1, 2 ..., and on no other.

    Raises:
        Unreadable: There is none.
    """
    for axis in range(numbers[0].ndim):
        sides = [[-1 if a == axis else 1 for a in range(n.ndim)] for n in numbers]
        counted = [np.arange(m.shape[k]).reshape(s) for m, s in zip(c.operand(0).metas, sides, strict=True)]
        pairs = [*zip(numbers, counted, strict=True)]
        if all(n.shape[axis] == o.size and bool((n == o).all()) for n, o in pairs) and any(
            o.size > 1 for _, o in pairs
        ):
            return axis
    raise Unreadable


@reads("Trilu")
def _trilu(c: OnnxCall) -> Any:
    """Read a triangle as a product with ones and zeros."""
    x, k, upper = c.operand(0), c.integers("", 1) or (0,), bool(c.attr("upper"))
    require(None not in x.shape[-2:] and x.dtype is not torch.bool)
    ones = torch.ones(x.metas[0].shape[-2:], dtype=x.dtype)
    kept = ones.triu(k[0]) if upper else ones.tril(k[0])
    return c.emit("Mul", [x, c.new_weight(kept, "triangle")])


@reads("IsNaN")
def _is_nan(c: OnnxCall) -> Any:
    return c.emit("NotEqual", [c.operand(0), c.operand(0)])


@reads("TopK")
def _top_k(c: OnnxCall) -> Any:
    x, count, axis, largest = c.operand(0), c.optional(1), c.attr("axis"), c.attr("largest")
    every = count is not None and [n.item() for n in count.numbers] == [m.shape[axis] for m in x.metas]
    k = None if every else c.integers("k", 1)
    require((k is not None or every) and c.attr("sorted") != 0)
    attrs = {"k": k and k[0], "axis": axis, "largest": largest is None or bool(largest)}
    names = [o or f"{c.name}_{k}" for k, o in enumerate(c.outputs)]
    return c.steps("TopK", [x], names, **attrs)


@reads("Tile")
def _tile(c: OnnxCall) -> Any:
    repeats = present(c.integers("", 1))
    return c.operand(0) if set(repeats) <= {1} else c.emit("Tile", [c.operand(0)], repeats=repeats)


@reads("DepthToSpace")
def _depth_to_space(c: OnnxCall) -> Any:
    """Read the exchange of channels and space; DCR is CRD with another order of channels."""
    x, block = c.operand(0), c.attr("blocksize")
    channels = x.shape[1]
    if c.attr("mode") != "CRD":
        order = torch.arange(present(channels)).reshape(block * block, -1).t().reshape(-1)
        x = c.step("Gather", [x, c.new_weight(order, "order")], axis=1)
    return c.emit("DepthToSpace", [x], block=block)


def _space_to_depth(c: OnnxCall, op: str) -> Any:
    x, block = c.operand(0), c.attr("blocksize")
    if c.attr("mode") == "CRD":
        return c.emit(op, [x], block=block)
    require(x.shape[1] is not None)
    y = c.step(op, [x], block=block)
    order = torch.arange(x.shape[1] * block * block).reshape(-1, block * block).t().reshape(-1)
    return c.emit("Gather", [y, c.new_weight(order, "order")], axis=1)


#: vectors of at most this length become no longer by their normalization
_LEAST_LENGTH = 1e-12
#: functions of a call and its canonical operator that cells name
_READERS_OF = by_name(
    *(_layer_norm, _group_norm, _lp_norm, _softmax, _prelu, _hard_sigmoid, _gelu, _mod, _arg_max, _arithmetic, _reduce),
    *(_gather_elements, _space_to_depth, _grid_sample),
)
read_column("onnx", _enter_cell, READERS)
