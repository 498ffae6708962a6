"""How each ATen operator becomes canonical: a row of `aten.yaml` where that says it all, else one short function.

A row names the arguments that are operands and those that are attributes. A function takes a `Call` and returns the
value (or tuple of values) that the call's result is known by. Either raises `Unreadable` for a form that has no
canonical equivalent; the operator then stays opaque.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from chipfit.files import package_data
from chipfit.frameworks.torch.call import Call, Unreadable
from chipfit.frameworks.torch.program import Form

Read = Callable[[Call], Any]

#: ATen operator, without overload -> what reads it
READERS: dict[str, Read] = {}
_ATEN = package_data("chipfit.frameworks.torch", "aten.yaml")
#: ATen's second names -> its own
SYNONYMS = dict(word.split("=") for word in _ATEN["synonyms"].split())


def _many(v: Any, n: int) -> tuple[Any, ...]:
    """One number for each of n axes."""
    v = tuple(v) if isinstance(v, (list, tuple)) else (v,)
    return v * n if len(v) == 1 else v


def _pairs(v: Any, n: int) -> tuple[tuple[int, int], ...]:
    return tuple((p, p) for p in _many(v, n))


def _spatial(c: Call) -> int:
    """How many spatial axes the operand has, of an operator that is named for their number."""
    n = c.rank - 2
    if not c.name.endswith(f"{n}d"):
        raise Unreadable  # without a batch
    return n


#: how an argument becomes an attribute
_CONVERSIONS: dict[str, Callable[[Call, Any], Any]] = {
    "": lambda c, v: v,
    "float": lambda c, v: float(v),
    "bool": lambda c, v: bool(v),
    "axis": lambda c, v: v % c.rank,
    "axes": lambda c, v: tuple(a % c.rank for a in v),
    "new_axis": lambda c, v: (v % (c.rank + 1),),
    "spatial": lambda c, v: _many(v, _spatial(c)),
    "stride": lambda c, v: _many(v or c.raw("kernel_size"), _spatial(c)),
    "padding": lambda c, v: _pairs(v, _spatial(c)),
}


def row(names: str, op: str, operands: str = "self", attrs: str = "", only: Mapping[str, Any] | None = None) -> None:
    """Say how some ATen operators become a canonical one.

    Args:
        names: ATen operators, with spaces between.
        op: the canonical operator.
        operands: their arguments by slot; "?" marks one that may be None, "#" one that may be a number.
        attrs: "attribute=argument:conversion" for each attribute; the argument is left out where it has the same name,
            the conversion (of `_CONVERSIONS`) where it needs none.
        only: arguments with the values that have a canonical equivalent; without a value it may be left out as well.

    What a row does not name must be left at its default (`Call.says_nothing`).
    """
    taken = [(word.rstrip("?#"), word[-1]) for word in operands.split()]
    kept = []
    for word in attrs.split():
        name, _, conversion = word.partition(":")
        attr, _, argument = name.partition("=")
        kept.append((attr, argument or attr, _CONVERSIONS[conversion]))
    named = {*(k for k, _ in taken), *(k for _, k, _ in kept), *(only or {})}

    def read(c: Call) -> Any:
        if any(c.raw(k) not in (None, v) for k, v in (only or {}).items()):
            raise Unreadable
        if not all(k in named or c.says_nothing(k) for k in c.args):
            raise Unreadable
        by_mark = {"?": c.optional, "#": c.number_or_value}
        inputs = [by_mark.get(mark, c.value)(k) for k, mark in taken]
        return c.emit(op, inputs, **{attr: convert(c, c.raw(k)) for attr, k, convert in kept})

    READERS.update(dict.fromkeys(names.split(), read))


def reads(names: str) -> Callable[[Read], Read]:
    """Decorator: the function reads these ATen operators, named with spaces between."""

    def enter(f: Read) -> Read:
        READERS.update(dict.fromkeys(names.split(), f))
        return f

    return enter


# ---------------------------------------------------------------- rows

for _operands, _words in _ATEN["plain"].items():
    for _op, _, _name in (word.partition("=") for word in _words.split()):
        row(_name or _op.lower(), _op, _operands)
for _names, _row in _ATEN["rows"].items():
    row(_names, **_row)


# ---------------------------------------------------------------- products and sums


@reads("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv(c: Call) -> Any:
    x, w = c.tensor("input"), c.tensor("weight")
    n = w.dim() - 2
    if x.dim() != w.dim():
        raise Unreadable  # without a batch
    stride, dilation = _many(c.raw("stride"), n), _many(c.raw("dilation"), n)
    groups, padding = c.raw("groups"), c.raw("padding")
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, w.shape[2:], strict=True)]
        pairs = tuple((t // 2, t - t // 2) for t in total)
    else:
        pairs = _pairs(padding, n)
    inputs = [c.value("input"), c.value("weight"), c.optional("bias")]
    attrs = {"stride": stride, "padding": pairs, "dilation": dilation, "groups": groups}
    if "transpose" in c.name or c.raw("transposed"):
        return c.emit(f"TransposeConv{n}D", inputs, **attrs, output_padding=_many(c.raw("output_padding"), n))
    depthwise = n == 2 and groups > 1 and groups == x.shape[1]
    return c.emit("DepthwiseConv2D" if depthwise else f"Conv{n}D", inputs, **attrs)


@reads("matmul bmm mm")
def _matmul(c: Call) -> Any:
    other = "other" if "other" in c.args else "mat2"
    if min(c.tensor("self").dim(), c.tensor(other).dim()) < 2 or "out_dtype" in c.args:
        raise Unreadable
    return c.emit("MatMul", [c.value("self"), c.value(other)])


@reads("add sub")
def _add(c: Call) -> Any:
    alpha, a = c.raw("alpha"), c.number_or_value("self")
    if alpha in (None, 1):
        b = c.number_or_value("other")
    elif isinstance(c.args["other"], torch.fx.Node):
        like = c.tensor("other").to(c.result.dtype)
        b = c.step("Mul", [c.number_or_value("other"), c.draft.scalar(f"{c.node.name}.alpha", alpha, like)], like)
    else:
        b = c.draft.scalar(c.node.name, c.raw("other") * alpha, c.result)
    return c.emit(c.name.capitalize(), [a, b])


@reads("hardtanh clamp clamp_min clamp_max clip")
def _clamp(c: Call) -> Any:
    lo, hi = (c.raw(f"{end}_val" if f"{end}_val" in c.args else end) for end in ("min", "max"))
    if not all(v is None or isinstance(v, (int, float)) for v in (lo, hi)):
        raise Unreadable
    if not c.tensor("self").dtype.is_floating_point:  # as torch promotes types; a clip is of floats
        ends = [(op, c.draft.scalar(c.node.name, v, c.result)) for op, v in (("Max", lo), ("Min", hi)) if v is not None]
        x = c.number_or_value("self")
        for op, end in ends[:-1]:
            x = c.step(op, [x, end], c.result)
        return c.emit(ends[-1][0], [x, ends[-1][1]])
    if lo == 0 and hi in (6, None):
        return c.emit("Relu" if hi is None else "Relu6", [c.value("self")])
    bounds = {end: None if v is None else float(v) for end, v in (("min", lo), ("max", hi))}
    return c.emit("Clamp", [c.value("self")], **bounds)


# ---------------------------------------------------------------- pooling and reduction


@reads("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
def _adaptive_avg_pool(c: Call) -> Any:
    n = _spatial(c)
    out, spatial = _many(c.raw("output_size"), n), c.tensor("self").shape[2:]
    if out == (1,) * n:
        return c.emit("GlobalAvgPool", [c.value("self")])
    if any(not isinstance(s, int) or s % o for s, o in zip(spatial, out, strict=True)):
        return c.emit("AdaptiveAvgPool", [c.value("self")], output_size=out)
    kernel = tuple(s // o for s, o in zip(spatial, out, strict=True))
    plain = {"padding": ((0, 0),) * n, "ceil_mode": False, "count_include_pad": True}
    return c.emit("AvgPool", [c.value("self")], kernel=kernel, stride=kernel, **plain)


_REDUCTIONS = {"mean": "Mean", "sum": "Sum", "amax": "ReduceMax", "amin": "ReduceMin"}


@reads(" ".join(_REDUCTIONS))
def _reduce(c: Call) -> Any:
    x, axes, keep = c.tensor("self"), c.raw("dim"), bool(c.raw("keepdim"))
    axes = tuple(range(x.dim())) if axes in (None, ()) else tuple(a % x.dim() for a in _many(axes, 1))
    if c.args.get("dtype") not in (None, x.dtype) or (x.dtype is torch.bool and c.name == "sum"):
        raise Unreadable
    if c.name != "mean" or x.dim() != 4 or sorted(axes) != [2, 3]:
        return c.emit(_REDUCTIONS[c.name], [c.value("self")], axes=axes, keepdims=keep)
    if keep:
        return c.emit("GlobalAvgPool", [c.value("self")])
    pooled = c.step("GlobalAvgPool", [c.value("self")], x.new_empty((*x.shape[:2], 1, 1)))
    return c.emit("Reshape", [pooled], shape=_static_shape(c.result))


@reads("linalg_vector_norm")
def _length(c: Call) -> Any:
    if c.raw("ord") != 2 or c.raw("dtype") is not None:
        raise Unreadable
    axes = range(c.rank) if c.raw("dim") is None else _many(c.raw("dim"), 1)
    return c.emit("ReduceL2", [c.value("self")], axes=tuple(a % c.rank for a in axes), keepdims=bool(c.raw("keepdim")))


@reads("softmax _softmax log_softmax _log_softmax")
def _softmax(c: Call) -> Any:
    """The operand in the type that `dtype` asks for."""
    x, kind = c.tensor("self"), c.result.dtype
    v = c.value("self")
    if kind is not x.dtype:
        v = c.step("Cast", [v], x.to(kind), dtype=str(kind).removeprefix("torch."))
    return c.emit("LogSoftmax" if "log" in c.name else "Softmax", [v], axis=c.raw("dim"))


@reads("cumsum")
def _cumsum(c: Call) -> Any:
    if c.result.dtype is not c.tensor("self").dtype:
        raise Unreadable
    return c.emit("CumSum", [c.value("self")], axis=c.raw("dim"))


# ---------------------------------------------------------------- moving data


def _static_shape(like: Form) -> tuple[int, ...]:
    """A shape for Reshape: at most one unknown entry, written -1."""
    shape = tuple(int(s) if isinstance(s, int) else -1 for s in like.shape)
    if shape.count(-1) > 1:
        raise Unreadable
    return shape


@reads("view reshape flatten unflatten _unsafe_view view_as reshape_as")
def _reshape(c: Call) -> Any:
    if c.result.dtype is not c.tensor("self").dtype:
        raise Unreadable  # the bits as another type
    return c.emit("Reshape", [c.value("self")], shape=_static_shape(c.result))


@reads("transpose swapaxes t numpy_T")
def _transpose(c: Call) -> Any:
    perm = list(range(c.rank))
    swapped = [c.raw(k) for k in c.args if k != "self"]
    if swapped:
        a, b = swapped
        perm[a], perm[b] = perm[b], perm[a]
    else:
        perm.reverse()
    return c.emit("Transpose", [c.value("self")], perm=tuple(perm))


@reads("squeeze")
def _squeeze(c: Call) -> Any:
    x, dims = c.tensor("self"), c.raw("dim")
    wanted = range(x.dim()) if dims is None else [d % x.dim() for d in _many(dims, 1)]
    axes = tuple(d for d in wanted if isinstance(x.shape[d], int) and x.shape[d] == 1)
    return c.emit("Squeeze", [c.value("self")], axes=axes)


@reads("slice")
def _slice(c: Call) -> Any:
    axis, start, end, step = c.raw("dim") % c.rank, c.raw("start") or 0, c.raw("end"), c.raw("step")
    if end is not None and end >= 2**62:  # how torch writes "to the end"
        end = None
    if (start, end, step) == (0, None, 1):
        return c.value("self")
    return c.emit("Slice", [c.value("self")], axis=axis, start=start, end=end, step=step)


@reads("split split_with_sizes chunk tensor_split")
def _split(c: Call) -> Any:
    axis = c.raw("dim") % c.rank
    sizes = tuple(t.shape[axis] for t in c.result)
    if not all(isinstance(s, int) for s in sizes):
        raise Unreadable
    return c.emit_all("Split", axis=axis, sizes=sizes)


@reads("unbind")
def _unbind(c: Call) -> Any:
    return c.emit_all("Unstack", axis=c.raw("dim") % c.rank)


@reads("cat concat concatenate stack")
def _concat(c: Call) -> Any:
    tensors = c.draft.arg(c.args["tensors"])
    if not all(isinstance(t, str) for t in tensors):
        raise Unreadable
    axis = c.raw("dim" if "dim" in c.args else "axis") % c.result.dim()
    return c.emit("Stack" if c.name == "stack" else "Concat", tensors, axis=axis)


@reads("expand expand_as")
def _expand(c: Call) -> Any:
    want = c.result.shape
    have = (None,) * (len(want) - c.rank) + tuple(c.tensor("self").shape)
    shape = tuple(-1 if str(h) == str(w) else w for h, w in zip(have, want, strict=True))  # symbols compare as text
    if not all(isinstance(s, int) for s in shape):
        raise Unreadable
    return c.emit("Expand", [c.value("self")], shape=shape)


@reads("pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d")
def _pad(c: Call) -> Any:
    modes = {"pad": c.raw("mode"), "constant": "constant", "reflection": "reflect", "replication": "replicate"}
    flat = c.raw("pad" if "pad" in c.args else "padding")  # the last axis first
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)][::-1]
    padding = ((0, 0),) * (c.rank - len(pairs)) + tuple(pairs)
    mode, value = modes[c.name.partition("_")[0]], float(c.raw("value") or 0.0)
    return c.emit("Pad", [c.value("self")], padding=padding, mode=mode, value=value)


@reads("index")
def _index(c: Call) -> Any:
    indices = c.draft.arg(c.args["indices"])
    given = [i for i, v in enumerate(indices) if v is not None]
    if len(given) != 1 or not isinstance(indices[given[0]], str):
        raise Unreadable
    (axis,) = given
    if c.args["indices"][axis].meta["val"].dtype in (torch.bool, torch.uint8):  # a mask
        raise Unreadable
    return c.emit("Gather", [c.value("self"), indices[axis]], axis=axis)


@reads("roll")
def _roll(c: Call) -> Any:
    if not c.raw("dims"):
        raise Unreadable  # of the flattened tensor
    return c.emit("Roll", [c.value("self")], shifts=_many(c.raw("shifts"), 1), axes=_many(c.raw("dims"), 1))


@reads(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
)
def _resize(c: Call) -> Any:
    method = c.name.removeprefix("upsample_").rstrip("123d")
    data = "input" if "input" in c.args else "self"
    size, scale = c.raw("output_size"), c.raw("scale_factors")
    given = [c.raw(k) for k in c.args if k in ("scales", "scales_d", "scales_h", "scales_w")]
    if any(given):  # beside a size, which must be the one that they make
        made = [f and math.floor(s * f) for s, f in zip(c.tensor(data).shape[2:], given, strict=True)]
        if made != list(size):
            raise Unreadable
        scale = tuple(given)
    mode = {"nearest": "nearest", "bicubic": "cubic"}.get(method, "linear")
    how = {"size": None if scale else size, "scale": scale or None, "align_corners": bool(c.raw("align_corners"))}
    return c.emit("Resize", [c.value(data)], mode=mode, **how)


# ---------------------------------------------------------------- bookkeeping


@reads("clone contiguous alias detach lift_fresh_copy resolve_conj resolve_neg")
def _same(c: Call) -> Any:
    return c.value("self")


@reads("dropout feature_dropout alpha_dropout native_dropout")
def _dropout(c: Call) -> Any:
    c.demand_first_alone()
    p, x = c.raw("p"), c.value("input")
    if p:
        return c.emit("Dropout", [x], p=float(p))
    return (x, None) if c.name == "native_dropout" else x


@reads("to _to_copy type_as")
def _to(c: Call) -> Any:
    if c.tensor("self").dtype is c.result.dtype:
        return c.value("self")
    return c.emit("Cast", [c.value("self")], dtype=str(c.result.dtype).removeprefix("torch."))


@reads("sym_size")
def _size(c: Call) -> Any:
    if isinstance(c.result, int):
        return c.result
    return c.emit("Size", [c.value("self")], axis=c.raw("dim"))
