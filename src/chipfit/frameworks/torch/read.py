"""Readers of ATen operators: a row of `aten.yaml` where that suffices, else a short function.

A row names the arguments that are operands and those that are attributes. A function maps a `TorchCall` to the name of
the result's value, or to a tuple of names. Either raises `Unreadable` for a call without canonical equivalent; that
call becomes an opaque node.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chipfit.files import package_data
from chipfit.frameworks.torch.call import TorchCall, Unreadable
from chipfit.frameworks.torch.program import SymbolicTensor

Read = Callable[[TorchCall], Any]

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


def _spatial(c: TorchCall) -> int:
    """How many spatial axes the operand has, of an operator that is named for their number."""
    n = c.rank - 2
    if not c.name.endswith(f"{n}d"):
        raise Unreadable  # without a batch
    return n


#: how an argument becomes an attribute
_CONVERSIONS: dict[str, Callable[[TorchCall, Any], Any]] = {
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

    What a row does not name must be left at its default (`TorchCall.says_nothing`).
    """
    taken = [(word.rstrip("?#"), word[-1]) for word in operands.split()]
    kept = []
    for word in attrs.split():
        name, _, conversion = word.partition(":")
        attr, _, argument = name.partition("=")
        kept.append((attr, argument or attr, _CONVERSIONS[conversion]))
    named = {*(k for k, _ in taken), *(k for _, k, _ in kept), *(only or {})}

    def read(c: TorchCall) -> Any:
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
def _conv(c: TorchCall) -> Any:
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


@reads("scaled_dot_product_attention")
def _attention(c: TorchCall) -> Any:
    """Heads that share keys and values get copies of them, which every later step knows how to hold."""
    ins, copies = [c.value("query"), c.value("key"), c.value("value")], 1
    if c.raw("dropout_p"):
        raise Unreadable
    if c.raw("enable_gqa"):
        copies = c.tensor("query").shape[-3] // c.tensor("key").shape[-3]
    for k, key in enumerate(("key", "value") if copies > 1 else (), 1):
        (*outer, n, d), like = c.tensor(key).shape, c.tensor(key)
        one, many = (like.new_empty((*outer, m, n, d)) for m in (1, copies))
        x = c.step("Unsqueeze", [ins[k]], one, axes=(len(outer),))
        x = c.step("Expand", [x], many, shape=(*[-1] * len(outer), copies, -1, -1))
        whole = like.new_empty((*outer[:-1], outer[-1] * copies, n, d))
        inputs, shape = _reshaped(c, x, many, whole)
        ins[k] = c.step("Reshape", inputs, whole, **shape)
    how = {"is_causal": c.raw("is_causal"), "scale": c.raw("scale"), "enable_gqa": False}
    return c.emit("SDPA", [*ins, c.optional("attn_mask")], **how)


@reads("matmul bmm mm")
def _matmul(c: TorchCall) -> Any:
    other = "other" if "other" in c.args else "mat2"
    if min(c.tensor("self").dim(), c.tensor(other).dim()) < 2 or "out_dtype" in c.args:
        raise Unreadable
    return c.emit("MatMul", [c.value("self"), c.value(other)])


@reads("add sub")
def _add(c: TorchCall) -> Any:
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
def _clamp(c: TorchCall) -> Any:
    lo, hi = (c.raw(f"{end}_val" if f"{end}_val" in c.args else end) for end in ("min", "max"))
    if not c.tensor("self").dtype.is_floating_point:  # as torch promotes types; a clip is of floats
        ends = [(op, c.number(v)) for op, v in (("Max", lo), ("Min", hi)) if v is not None]
        x = c.number_or_value("self")
        for op, end in ends[:-1]:
            x = c.step(op, [x, end], c.result)
        return c.emit(ends[-1][0], [x, ends[-1][1]])
    if lo == 0 and hi in (6, None):
        return c.emit("Relu" if hi is None else "Relu6", [c.value("self")])
    bounds = {end: None if v is None else float(v) for end, v in (("min", lo), ("max", hi))}
    return c.emit("Clamp", [c.value("self")], **bounds)


@reads("masked_fill")
def _masked_fill(c: TorchCall) -> Any:
    """What fills a tensor takes its type."""
    value = c.typed("value") if isinstance(c.args["value"], torch.fx.Node) else c.number(c.raw("value"))
    return c.emit("Where", [c.value("mask"), value, c.value("self")])


@reads("celu")
def _celu(c: TorchCall) -> Any:
    """alpha elu(x / alpha)."""
    x, alpha = c.value("self"), float(c.raw("alpha"))
    if alpha == 1:
        return c.emit("Elu", [x], alpha=1.0)
    shrunk = c.step("Mul", [x, c.draft.scalar(c.node.name, 1 / alpha, c.result)], c.result)
    bent = c.step("Elu", [shrunk], c.result, alpha=1.0)
    return c.emit("Mul", [bent, c.draft.scalar(c.node.name, alpha, c.result)])


# ---------------------------------------------------------------- pooling and reduction


@reads("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d")
def _adaptive_pool(c: TorchCall) -> Any:
    n, kind = _spatial(c), "Avg" if "avg" in c.name else "Max"
    out, spatial = _many(c.raw("output_size"), n), c.tensor("self").shape[2:]
    if kind == "Avg" and out == (1,) * n:
        return c.emit("GlobalAvgPool", [c.value("self")])
    if any(not isinstance(s, int) or s % o for s, o in zip(spatial, out, strict=True)):
        return c.emit(f"Adaptive{kind}Pool", [c.value("self")], output_size=out)
    kernel = tuple(s // o for s, o in zip(spatial, out, strict=True))
    plain = {"padding": ((0, 0),) * n, "ceil_mode": False}
    own: dict[str, Any] = {"count_include_pad": True} if kind == "Avg" else {"dilation": (1,) * n}
    return c.emit(f"{kind}Pool", [c.value("self")], kernel=kernel, stride=kernel, **plain, **own)


_REDUCTIONS = {"mean": "Mean", "sum": "Sum", "amax": "ReduceMax", "amin": "ReduceMin"}


@reads(" ".join(_REDUCTIONS))
def _reduce(c: TorchCall) -> Any:
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
def _length(c: TorchCall) -> Any:
    if c.raw("ord") != 2 or c.raw("dtype") is not None:
        raise Unreadable
    axes = range(c.rank) if c.raw("dim") is None else _many(c.raw("dim"), 1)
    return c.emit("ReduceL2", [c.value("self")], axes=tuple(a % c.rank for a in axes), keepdims=bool(c.raw("keepdim")))


@reads("softmax _softmax log_softmax _log_softmax")
def _softmax(c: TorchCall) -> Any:
    """The operand in the type that `dtype` asks for."""
    return c.emit("LogSoftmax" if "log" in c.name else "Softmax", [c.typed("self")], axis=c.raw("dim"))


@reads("cumsum")
def _cumsum(c: TorchCall) -> Any:
    return c.emit("CumSum", [c.typed("self")], axis=c.raw("dim"))


@reads("max min")
def _largest(c: TorchCall) -> Any:
    """Over an axis, whose places nothing may read; of the whole tensor; or of two."""
    if "other" in c.args:
        return c.emit(c.name.capitalize(), [c.number_or_value("self"), c.number_or_value("other")])
    axes = (c.raw("dim") % c.rank,) if "dim" in c.args else tuple(range(c.rank))
    return c.emit(f"Reduce{c.name.capitalize()}", [c.value("self")], axes=axes, keepdims=bool(c.raw("keepdim")))


@reads("__and__ __or__ bitwise_and bitwise_or bitwise_not")
def _bits(c: TorchCall) -> Any:
    """Of booleans."""
    if c.result.dtype is not torch.bool:
        raise Unreadable
    slots = [c.value(k) for k in ("self", "other") if k in c.args]
    return c.emit(f"Logical{c.name.strip('_').removeprefix('bitwise_').capitalize()}", slots)


# ---------------------------------------------------------------- moving data


def _static_shape(like: SymbolicTensor) -> tuple[int, ...]:
    """A shape for Reshape: at most one unknown entry, written -1."""
    shape = tuple(int(s) if isinstance(s, int) else -1 for s in like.shape)
    if shape.count(-1) > 1 or 0 in shape:
        raise Unreadable
    return shape


def _reshaped(c: TorchCall, x: str, old: SymbolicTensor, like: SymbolicTensor) -> tuple[list[str], dict[str, Any]]:
    """Operands and attributes of a Reshape; of several unknown entries the last is -1."""
    shape: list[Any] = [int(s) if isinstance(s, int) else -1 for s in like.shape]
    sizes = [x]
    for k, s in enumerate(like.shape if shape.count(-1) > 1 else ()):
        if shape[k] == -1 and -1 in shape[k + 1 :]:
            kept = k < old.dim() and c.draft.same(old.shape[k], s)
            shape[k] = 0 if kept else None
            sizes += [] if kept else [c.size(s)]
    return sizes, {"shape": tuple(shape)}


@reads("view reshape flatten unflatten _unsafe_view view_as reshape_as")
def _reshape(c: TorchCall) -> Any:
    if c.result.dtype is not c.tensor("self").dtype or 0 in c.result.shape:
        raise Unreadable  # the bits as another type
    inputs, shape = _reshaped(c, c.value("self"), c.tensor("self"), c.result)
    return c.emit("Reshape", inputs, **shape)


@reads("transpose swapaxes t numpy_T")
def _transpose(c: TorchCall) -> Any:
    perm = list(range(c.rank))
    swapped = [c.raw(k) for k in c.args if k != "self"]
    if swapped:
        a, b = swapped
        perm[a], perm[b] = perm[b], perm[a]
    else:
        perm.reverse()
    return c.emit("Transpose", [c.value("self")], perm=tuple(perm))


@reads("squeeze")
def _squeeze(c: TorchCall) -> Any:
    x, dims = c.tensor("self"), c.raw("dim")
    wanted = range(x.dim()) if dims is None else [d % x.dim() for d in _many(dims, 1)]
    axes = tuple(d for d in wanted if isinstance(x.shape[d], int) and x.shape[d] == 1)
    return c.emit("Squeeze", [c.value("self")], axes=axes)


@reads("slice")
def _slice(c: TorchCall) -> Any:
    axis, start, step = c.raw("dim") % c.rank, c.raw("start") or 0, c.raw("step")
    if (start, step) == (0, 1) and c.is_open("end"):
        return c.emit("Gather", [c.value("self"), c.counted("end")], axis=axis)
    end = c.raw("end")
    if end is not None and end >= 2**62:  # how torch writes "to the end"
        end = None
    if (start, end, step) == (0, None, 1):
        return c.value("self")
    return c.emit("Slice", [c.value("self")], axis=axis, start=start, end=end, step=step)


@reads("arange")
def _arange(c: TorchCall) -> Any:
    if not c.is_open("end") or (c.args.get("start", 0), c.args.get("step", 1)) != (0, 1):
        raise Unreadable
    kind = str(c.result.dtype).removeprefix("torch.")
    return c.counted("end") if kind == "int64" else c.emit("Cast", [c.counted("end")], dtype=kind)


@reads("split split_with_sizes chunk tensor_split")
def _split(c: TorchCall) -> Any:
    axis = c.raw("dim") % c.rank
    sizes = tuple(t.shape[axis] for t in c.result)
    if not all(isinstance(s, int) for s in sizes):
        raise Unreadable
    return c.emit_all("Split", axis=axis, sizes=sizes)


@reads("unbind")
def _unbind(c: TorchCall) -> Any:
    return c.emit_all("Unstack", axis=c.raw("dim") % c.rank)


@reads("cat concat concatenate stack")
def _concat(c: TorchCall) -> Any:
    tensors = c.draft.arg(c.args["tensors"])
    axis = c.raw("dim" if "dim" in c.args else "axis") % c.result.dim()
    return c.emit("Stack" if c.name == "stack" else "Concat", tensors, axis=axis)


@reads("expand expand_as broadcast_to")
def _expand(c: TorchCall) -> Any:
    return _expanded(c, c.value("self"), c.tensor("self").shape)


def _expanded(c: TorchCall, x: str, sizes: Sequence[Any]) -> Any:
    """A tensor of these sizes in the shape of the result."""
    want = c.result.shape
    have = (None,) * (len(want) - len(sizes)) + tuple(sizes)
    shape = tuple(-1 if h is not None and c.draft.same(h, w) else w for h, w in zip(have, want, strict=True))
    sizes = [c.size(s) for s in shape if not isinstance(s, int)]
    return c.emit("Expand", [x, *sizes], shape=tuple(s if isinstance(s, int) else None for s in shape))


@reads("repeat")
def _repeat(c: TorchCall) -> Any:
    """Of an axis of size 1, as often as there are samples, is an Expand."""
    try:
        return c.emit("Tile", [c.value("self")], repeats=c.raw("repeats"))
    except Unreadable:
        sizes = (1,) * (len(c.result.shape) - c.rank) + tuple(c.tensor("self").shape)
        if not all(h == 1 or c.draft.same(h, w) for h, w in zip(sizes, c.result.shape, strict=True)):
            raise
        return _expanded(c, c.value("self"), sizes)


@reads("zeros_like ones_like full_like new_zeros new_ones new_full zeros ones full fill")
def _filled(c: TorchCall) -> Any:
    """One number everywhere."""
    name = c.name.removeprefix("new_").removesuffix("_like")
    if isinstance(c.args.get("value"), torch.fx.Node):
        return _expanded(c, c.typed("value"), ())
    value = c.raw("value" if name == "fill" else "fill_value") if name in ("full", "fill") else float(name == "ones")
    shape = [s if isinstance(s, int) else 1 for s in c.result.shape]
    x = c.draft.constant(f"{c.node.name}.constant", torch.full(shape, value, dtype=c.result.dtype))
    return x if tuple(shape) == tuple(c.result.shape) else _expanded(c, x, shape)


@reads("pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d")
def _pad(c: TorchCall) -> Any:
    modes = {"pad": c.raw("mode"), "constant": "constant", "reflection": "reflect", "replication": "replicate"}
    flat = c.raw("pad" if "pad" in c.args else "padding")  # the last axis first
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)][::-1]
    padding = ((0, 0),) * (c.rank - len(pairs)) + tuple(pairs)
    mode, value = modes[c.name.partition("_")[0]], float(c.raw("value") or 0.0)
    return c.emit("Pad", [c.value("self")], padding=padding, mode=mode, value=value)


@reads("index")
def _index(c: TorchCall) -> Any:
    indices = c.draft.arg(c.args["indices"])
    given = [i for i, v in enumerate(indices) if v is not None]
    if given == [0, 1] and _counts_samples(c):
        like = c.args["indices"][1].meta["val"]
        if len(like.shape) == len(c.result.shape) - c.rank + 2 and like.shape[0] == 1:
            rows = c.step("Squeeze", [indices[1]], like.new_empty(like.shape[1:]), axes=(0,))
            return c.emit("Gather", [c.value("self"), rows], axis=1)
        if len(like.shape) == 1 and c.draft.same(like.shape[0], c.tensor("self").shape[0]):
            return _one_of_each(c, indices[1], like)
    likes = [c.args["indices"][i].meta["val"] for i in given]
    sizes = c.tensor("self").shape
    if any(like.dtype in (torch.bool, torch.uint8) for like in likes):  # a mask
        raise Unreadable
    if len(given) == 1:
        return c.emit("Gather", [c.value("self"), indices[given[0]]], axis=given[0])
    first, last = given[0], given[-1]
    inner = sizes[first : last + 1]
    if given != list(range(first, last + 1)) or not all(isinstance(s, int) for s in (*inner, *c.result.shape[1:])):
        raise Unreadable
    wide = likes[0]
    where = _from_start(c, indices[first], wide, sizes[first])  # in the axes as one
    for i, like in zip(given[1:], likes[1:], strict=True):
        grown = c.step("Mul", [where, c.draft.scalar(c.node.name, sizes[i], like)], wide)
        wide = like.new_empty(torch.broadcast_shapes(wide.shape, like.shape))
        where = c.step("Add", [grown, _from_start(c, indices[i], like, sizes[i])], wide)
    shape = (*sizes[:first], math.prod(inner), *sizes[last + 1 :])
    like = c.result.new_empty(shape)
    flat = c.step("Reshape", [c.value("self")], like, shape=_static_shape(like))
    return c.emit("Gather", [flat, where], axis=first)


def _from_start(c: TorchCall, index: str, like: SymbolicTensor, size: int) -> str:
    """Indices that do not count from the end."""
    flags = like.to(torch.bool)
    less = c.step("Less", [index, c.draft.scalar(c.node.name, 0, like)], flags)
    raised = c.step("Add", [index, c.draft.scalar(c.node.name, size, like)], like)
    return c.step("Where", [less, raised, index], like)


def _one_of_each(c: TorchCall, index: str, like: SymbolicTensor) -> Any:
    """From every sample x [N, ...] the part that it names itself; an index for each element of it."""
    samples, size, *rest = c.tensor("self").shape
    if isinstance(size, int) and _called(c.args["indices"][1]) != "argmax":  # which is never below 0
        index = _from_start(c, index, like, size)
    narrow, wide = (like.new_empty((samples, 1, *sizes)) for sizes in ([1] * len(rest), rest))
    index = c.step("Reshape", [index], narrow, shape=(-1, *narrow.shape[1:]))
    if rest:
        index = c.step("Expand", [index], wide, shape=(-1, -1, *_static_shape(wide)[2:]))
    part = c.step("GatherElements", [c.value("self"), index], c.result.new_empty(wide.shape), axis=1)
    return c.emit("Squeeze", [part], axes=(1,))


def _counts_samples(c: TorchCall) -> bool:
    """Whether the first index is 0, 1, 2 ... along axis 0 and varies along no other: each sample is in its place."""
    n, size = c.args["indices"][0], c.tensor("self").shape[0]
    shape = n.meta["val"].shape
    while _called(n) in ("unsqueeze", "view", "reshape", "slice"):
        n = n.args[0]
    whole = c.draft.same(shape[0], size) and math.prod(shape[1:]) == 1 and not isinstance(size, int)
    return whole and _called(n) == "arange" and n.target._overloadname == "default"


def _called(n: Any) -> str:
    return n.target._schema.name.partition("::")[2] if isinstance(n.target, torch._ops.OpOverload) else ""


@reads("slice_scatter select_scatter")
def _scatter(c: TorchCall) -> Any:
    """A part of a tensor in the place of another's: what is before it, it, and what is behind."""
    x, axis = c.tensor("self"), c.raw("dim") % c.rank
    size, part = x.shape[axis], c.value("src")
    if c.name == "slice_scatter" and c.tensor("src").shape == x.shape:
        return part
    if not isinstance(size, int) or c.args.get("step", 1) != 1:
        raise Unreadable
    if c.name == "select_scatter":
        start = c.raw("index") % size
        end = start + 1
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        part = c.step("Unsqueeze", [part], x.new_empty(shape), axes=(axis,))
    else:
        start, end, _ = slice(c.raw("start"), c.raw("end")).indices(size)
    parts = [part] if end > start else []
    for lo, hi, at in ((0, start, 0), (max(start, end), size, len(parts) + 1)):
        if hi > lo:
            kept = x.new_empty((*x.shape[:axis], hi - lo, *x.shape[axis + 1 :]))
            parts.insert(at, c.step("Slice", [c.value("self")], kept, axis=axis, start=lo, end=hi, step=1))
    return parts[0] if len(parts) == 1 else c.emit("Concat", parts, axis=axis)


@reads("copy")
def _copy(c: TorchCall) -> Any:
    """Numbers of another tensor in the shape and type of this one."""
    new, like = c.typed("src"), c.tensor("src")
    return new if like.shape == c.result.shape else _expanded(c, new, like.shape)


@reads("flip")
def _flip(c: TorchCall) -> Any:
    x, shape = c.value("self"), c.tensor("self").shape
    for axis in (a % c.rank for a in c.raw("dims")):
        if not isinstance(shape[axis], int):
            raise Unreadable
        back = c.draft.constant(f"{c.node.name}.{axis}", torch.arange(shape[axis] - 1, -1, -1))
        x = c.step("Gather", [x, back], c.result, axis=axis)
    return x


@reads("unfold")
def _windows(c: TorchCall) -> Any:
    """Windows along an axis, and their elements as the last one."""
    x, axis, size, step = c.tensor("self"), c.raw("dimension") % c.rank, c.raw("size"), c.raw("step")
    if not isinstance(x.shape[axis], int):
        raise Unreadable
    count = (x.shape[axis] - size) // step + 1
    index = torch.arange(count)[:, None] * step + torch.arange(size)
    taken = x.new_empty((*x.shape[:axis], count, size, *x.shape[axis + 1 :]))
    y = c.step("Gather", [c.value("self"), c.draft.constant(f"{c.node.name}.index", index)], taken, axis=axis)
    order = list(range(c.rank + 1))
    order.append(order.pop(axis + 1))
    return c.emit("Transpose", [y], perm=tuple(order))


@reads("im2col col2im")
def _patches(c: TorchCall) -> Any:
    """Patches that do not overlap, to columns [N, C kh kw, patches] and back."""
    kernel, image = c.raw("kernel_size"), (c.tensor("self") if c.name == "im2col" else c.result).shape
    sizes = image[2:]
    plain = c.raw("stride") == kernel and set(c.raw("padding")) == {0} and set(c.raw("dilation")) == {1}
    if c.result.dim() + c.rank != 7 or not plain or not all(isinstance(s, int) for s in image[1:]):
        raise Unreadable
    if any(s % k for s, k in zip(sizes, kernel, strict=True)):
        raise Unreadable
    (h, w), (kh, kw), like = (s // k for s, k in zip(sizes, kernel)), kernel, c.result
    split, columns = (image[1], h, kh, w, kw), (image[1], kh, kw, h, w)
    first, perm = (split, (0, 1, 3, 5, 2, 4)) if c.name == "im2col" else (columns, (0, 1, 4, 2, 5, 3))
    y = c.step("Reshape", [c.value("self")], like.new_empty((image[0], *first)), shape=(-1, *first))
    moved = (image[0], *(first[p - 1] for p in perm[1:]))
    y = c.step("Transpose", [y], like.new_empty(moved), perm=perm)
    return c.emit("Reshape", [y], shape=_static_shape(like))


@reads("roll")
def _roll(c: TorchCall) -> Any:
    if not c.raw("dims"):
        raise Unreadable  # of the flattened tensor
    return c.emit("Roll", [c.value("self")], shifts=_many(c.raw("shifts"), 1), axes=_many(c.raw("dims"), 1))


@reads(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
)
def _resize(c: TorchCall) -> Any:
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
def _same(c: TorchCall) -> Any:
    return c.value("self")


@reads("dropout feature_dropout alpha_dropout native_dropout")
def _dropout(c: TorchCall) -> Any:
    c.check_first_alone()
    p, x = c.raw("p"), c.value("input" if "input" in c.args else "self")
    if p:
        return c.emit("Dropout", [x], p=float(p))
    return (x, None) if c.name == "native_dropout" else x


@reads("to _to_copy type_as")
def _to(c: TorchCall) -> Any:
    if c.tensor("self").dtype is c.result.dtype:
        return c.value("self")
    return c.emit("Cast", [c.value("self")], dtype=str(c.result.dtype).removeprefix("torch."))


@reads("sym_size")
def _size(c: TorchCall) -> Any:
    return c.emit("Size", [c.value("self")], axis=c.raw("dim"))
