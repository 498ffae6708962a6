"""How each ATen operator becomes canonical: one short reader per operator.

A reader takes a `Reader` and returns the value (or tuple of values) that the operator's result is known by.
It raises `Unreadable` for a form that has no canonical equivalent; the operator then stays opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from chipfit.frameworks.torch.capture import _Capture


class Unreadable(Exception):
    """This form of the operator has no canonical equivalent."""


class Reader:
    """One operator call while it is read."""

    def __init__(self, capture: _Capture, node: torch.fx.Node, args: dict[str, Any]) -> None:
        self.c, self.n, self.a = capture, node, args

    def raw(self, key: str) -> Any:
        """An argument that must be a static Python value (None allowed)."""
        v = self.a.get(key)

        def static(x: Any) -> Any:
            if isinstance(x, torch.fx.Node):
                known = self.c.env.get(x)
                if isinstance(known, (int, float)):
                    return known
                raise Unreadable
            if isinstance(x, (list, tuple)):
                return tuple(static(i) for i in x)
            if isinstance(x, (torch.SymInt, torch.SymFloat)):
                raise Unreadable
            return x

        return static(v)

    def value(self, key: str, optional: bool = False) -> str | None:
        """An argument that is a tensor: its value name."""
        v = self.c.arg(self.a.get(key))
        if v is None and optional:
            return None
        if not isinstance(v, str):
            raise Unreadable
        return v

    def operand(self, key: str) -> str:
        """A tensor, or a Python number as a constant."""
        v = self.c.arg(self.a.get(key))
        if isinstance(v, bool) or v is None:
            raise Unreadable
        if isinstance(v, (int, float)):
            like = self.n.meta["val"]
            if not isinstance(like, torch.Tensor):
                raise Unreadable
            if like.dtype is torch.bool:
                like = self.tensor("self" if key == "other" else "other")
            return self.c.scalar(self.n.name, v, like)
        if not isinstance(v, str) or (v in self.c.graph.values and self.c.graph.values[v].dtype == "int"):
            raise Unreadable
        return self._promoted(key, v)

    def _promoted(self, key: str, v: str) -> str:
        """An operand in the type that torch computes in: mixed types get an explicit Cast."""
        mine, result = self.tensor(key).dtype, self.n.meta["val"].dtype
        if result is torch.bool:
            others = [self.tensor(k).dtype for k in ("self", "other") if isinstance(self.a.get(k), torch.fx.Node)]
            scalar = next((self.a[k] for k in ("self", "other") if isinstance(self.a.get(k), float)), None)
            result = others[0] if len(others) == 1 else torch.promote_types(*others)
            if scalar is not None and not result.is_floating_point:
                result = torch.float32
        if mine is result:
            return v
        return self.step("Cast", [v], self.tensor(key).to(result), dtype=str(result).removeprefix("torch."))

    def tensor(self, key: str) -> torch.Tensor:
        """The fake tensor of an argument, for its shape and dtype."""
        v = self.a[key]
        if not isinstance(v, torch.fx.Node) or not isinstance(v.meta.get("val"), torch.Tensor):
            raise Unreadable
        return v.meta["val"]

    @property
    def rank(self) -> int:
        return self.tensor("self" if "self" in self.a else "input").dim()

    def emit(self, op: str, inputs: Sequence[str | None], **attrs: Any) -> str:
        return self.c.emit(self.n, op, inputs, attrs)

    def step(self, op: str, inputs: Sequence[str | None], like: Any, **attrs: Any) -> str:
        """An extra node before the final one."""
        return self.c.emit(self.n, op, inputs, attrs, like, name=f"{self.n.name}_{op.lower()}")


Read = Callable[[Reader], Any]
READERS: dict[str, Read] = {}


def _reads(*names: str) -> Callable[[Read], Read]:
    def enter(f: Read) -> Read:
        READERS.update(dict.fromkeys(names, f))
        return f

    return enter


def _unary(op: str) -> Read:
    return lambda r: r.emit(op, [r.value("self")])


def _binary(op: str) -> Read:
    return lambda r: r.emit(op, [r.operand("self"), r.operand("other")])


def _many(v: Any, n: int) -> tuple[int, ...]:
    v = tuple(v) if isinstance(v, (list, tuple)) else (v,)
    return v * n if len(v) == 1 else v


def _pairs(v: Any, n: int) -> tuple[tuple[int, int], ...]:
    return tuple((p, p) for p in _many(v, n))


# ---------------------------------------------------------------- weighted operators


@_reads("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv(r: Reader) -> str:
    x, w = r.tensor("input"), r.tensor("weight")
    n = w.dim() - 2
    if x.dim() != w.dim():
        raise Unreadable  # unbatched
    stride, dilation = _many(r.raw("stride"), n), _many(r.raw("dilation"), n)
    name = r.n.target._schema.name
    transposed = "transpose" in name or (name.endswith("convolution") and r.raw("transposed"))
    groups, pad = r.raw("groups"), r.raw("padding")
    if isinstance(pad, str):
        total = [d * (k - 1) if pad == "same" else 0 for d, k in zip(dilation, w.shape[2:], strict=True)]
        padding = tuple((t // 2, t - t // 2) for t in total)
    else:
        padding = _pairs(pad, n)
    inputs = [r.value("input"), r.value("weight"), r.value("bias", optional=True)]
    attrs: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        return r.emit(f"TransposeConv{n}D", inputs, **attrs, output_padding=_many(r.raw("output_padding"), n))
    depthwise = n == 2 and groups > 1 and groups == x.shape[1]
    return r.emit("DepthwiseConv2D" if depthwise else f"Conv{n}D", inputs, **attrs)


@_reads("linear")
def _linear(r: Reader) -> str:
    return r.emit("Linear", [r.value("input"), r.value("weight"), r.value("bias", optional=True)])


@_reads("matmul", "bmm", "mm")
def _matmul(r: Reader) -> str:
    other = "other" if "other" in r.a else "mat2"
    if min(r.tensor("self").dim(), r.tensor(other).dim()) < 2:
        raise Unreadable
    return r.emit("MatMul", [r.value("self"), r.value(other)])


@_reads("batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
def _batch_norm(r: Reader) -> Any:
    if r.a.get("training") not in (None, False) or r.a.get("running_mean") is None:
        raise Unreadable
    ins = [
        r.value("input"),
        r.value("weight", True),
        r.value("bias", True),
        r.value("running_mean"),
        r.value("running_var"),
    ]
    like = r.n.meta["val"]
    if isinstance(like, (tuple, list)):
        return (r.c.emit(r.n, "BatchNorm", ins, {"eps": r.raw("eps")}, like[0]), None, None)
    return r.emit("BatchNorm", ins, eps=r.raw("eps"))


@_reads("layer_norm")
def _layer_norm(r: Reader) -> str:
    return r.emit(
        "LayerNorm",
        [r.value("input"), r.value("weight", True), r.value("bias", True)],
        normalized_shape=r.raw("normalized_shape"),
        eps=r.raw("eps"),
    )


@_reads("rms_norm")
def _rms_norm(r: Reader) -> str:
    return r.emit(
        "RMSNorm",
        [r.value("input"), r.value("weight", True)],
        normalized_shape=r.raw("normalized_shape"),
        eps=r.raw("eps"),
    )


@_reads("group_norm")
def _group_norm(r: Reader) -> str:
    return r.emit(
        "GroupNorm",
        [r.value("input"), r.value("weight", True), r.value("bias", True)],
        groups=r.raw("num_groups"),
        eps=r.raw("eps"),
    )


@_reads("instance_norm")
def _instance_norm(r: Reader) -> str:
    if not r.raw("use_input_stats"):
        raise Unreadable
    return r.emit("InstanceNorm", [r.value("input"), r.value("weight", True), r.value("bias", True)], eps=r.raw("eps"))


@_reads("embedding")
def _embedding(r: Reader) -> str:
    return r.emit("Embedding", [r.value("weight"), r.value("indices")])


@_reads("scaled_dot_product_attention")
def _sdpa(r: Reader) -> str:
    ins = [r.value("query"), r.value("key"), r.value("value"), r.value("attn_mask", True)]
    return r.emit("SDPA", ins, is_causal=r.raw("is_causal"), scale=r.raw("scale"), enable_gqa=r.raw("enable_gqa"))


# ---------------------------------------------------------------- element-wise

for _aten, _op in {
    "relu": "Relu",
    "relu6": "Relu6",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "hardswish": "HardSwish",
    "hardsigmoid": "HardSigmoid",
    "silu": "Swish",
    "mish": "Mish",
    "selu": "Selu",
    "exp": "Exp",
    "log": "Log",
    "abs": "Abs",
    "neg": "Neg",
    "sqrt": "Sqrt",
    "rsqrt": "Rsqrt",
    "sin": "Sin",
    "cos": "Cos",
    "erf": "Erf",
    "floor": "Floor",
    "ceil": "Ceil",
    "sign": "Sign",
    "reciprocal": "Reciprocal",
    "logical_not": "LogicalNot",
}.items():
    READERS[_aten] = _unary(_op)


@_reads("hardtanh", "clamp", "clamp_min", "clamp_max", "clip")
def _clamp(r: Reader) -> str:
    lo = r.raw("min_val" if "min_val" in r.a else "min")
    hi = r.raw("max_val" if "max_val" in r.a else "max")
    if not all(v is None or isinstance(v, (int, float)) for v in (lo, hi)):
        raise Unreadable
    if lo == 0 and hi == 6:
        return r.emit("Relu6", [r.value("self")])
    if lo == 0 and hi is None:
        return r.emit("Relu", [r.value("self")])
    return r.emit(
        "Clamp", [r.value("self")], min=None if lo is None else float(lo), max=None if hi is None else float(hi)
    )


@_reads("leaky_relu")
def _leaky(r: Reader) -> str:
    return r.emit("LeakyRelu", [r.value("self")], negative_slope=float(r.raw("negative_slope")))


@_reads("prelu")
def _prelu(r: Reader) -> str:
    return r.emit("PRelu", [r.value("self"), r.value("weight")])


@_reads("elu")
def _elu(r: Reader) -> str:
    if r.raw("scale") != 1 or r.raw("input_scale") != 1:
        raise Unreadable
    return r.emit("Elu", [r.value("self")], alpha=float(r.raw("alpha")))


@_reads("softplus")
def _softplus(r: Reader) -> str:
    return r.emit("Softplus", [r.value("self")], beta=float(r.raw("beta")), threshold=float(r.raw("threshold")))


@_reads("gelu")
def _gelu(r: Reader) -> str:
    return r.emit("Gelu", [r.value("self")], approximate=r.raw("approximate"))


@_reads("softmax", "_softmax")
def _softmax(r: Reader) -> str:
    return r.emit("Softmax", [r.value("self")], axis=r.raw("dim"))


@_reads("log_softmax", "_log_softmax")
def _log_softmax(r: Reader) -> str:
    return r.emit("LogSoftmax", [r.value("self")], axis=r.raw("dim"))


@_reads("add", "sub")
def _add(r: Reader) -> str:
    op = "Add" if "add" in r.n.target._schema.name else "Sub"
    alpha, a, b = r.raw("alpha"), r.operand("self"), r.operand("other")
    if alpha not in (None, 1):
        like = r.tensor("other") if isinstance(r.a["other"], torch.fx.Node) else r.n.meta["val"]
        b = r.step("Mul", [b, r.c.scalar(f"{r.n.name}.alpha", alpha, like)], like)
    return r.emit(op, [a, b])


@_reads("rsub")
def _rsub(r: Reader) -> str:
    if r.raw("alpha") not in (None, 1):
        raise Unreadable
    return r.emit("Sub", [r.operand("other"), r.operand("self")])


@_reads("div")
def _div(r: Reader) -> str:
    if r.a.get("rounding_mode") is not None:
        raise Unreadable
    return r.emit("Div", [r.operand("self"), r.operand("other")])


for _aten, _op in {
    "mul": "Mul",
    "maximum": "Max",
    "minimum": "Min",
    "eq": "Equal",
    "ne": "NotEqual",
    "lt": "Less",
    "le": "LessEqual",
    "gt": "Greater",
    "ge": "GreaterEqual",
    "logical_and": "LogicalAnd",
    "logical_or": "LogicalOr",
}.items():
    READERS[_aten] = _binary(_op)


@_reads("pow")
def _pow(r: Reader) -> str:
    return r.emit("Pow", [r.operand("self"), r.operand("exponent")])


@_reads("where")
def _where(r: Reader) -> str:
    return r.emit("Where", [r.value("condition"), r.operand("self"), r.operand("other")])


# ---------------------------------------------------------------- pooling and reduction


@_reads("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(r: Reader) -> str:
    n = r.rank - 2
    kernel = _many(r.raw("kernel_size"), n)
    return r.emit(
        "MaxPool",
        [r.value("self")],
        kernel=kernel,
        stride=_many(r.raw("stride") or kernel, n),
        padding=_pairs(r.raw("padding"), n),
        dilation=_many(r.raw("dilation"), n),
        ceil_mode=bool(r.raw("ceil_mode")),
    )


@_reads("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(r: Reader) -> str:
    n = r.rank - 2
    if r.a.get("divisor_override") is not None:
        raise Unreadable
    kernel = _many(r.raw("kernel_size"), n)
    return r.emit(
        "AvgPool",
        [r.value("self")],
        kernel=kernel,
        stride=_many(r.raw("stride") or kernel, n),
        padding=_pairs(r.raw("padding"), n),
        ceil_mode=bool(r.raw("ceil_mode")),
        count_include_pad=bool(r.raw("count_include_pad")),
    )


@_reads("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg(r: Reader) -> str:
    n = r.rank - 2
    out, spatial = _many(r.raw("output_size"), n), r.tensor("self").shape[2:]
    if out == (1,) * n:
        return r.emit("GlobalAvgPool", [r.value("self")])
    if all(isinstance(s, int) and s % o == 0 for s, o in zip(spatial, out, strict=True)):
        kernel = tuple(s // o for s, o in zip(spatial, out, strict=True))
        return r.emit(
            "AvgPool",
            [r.value("self")],
            kernel=kernel,
            stride=kernel,
            padding=((0, 0),) * n,
            ceil_mode=False,
            count_include_pad=True,
        )
    return r.emit("AdaptiveAvgPool", [r.value("self")], output_size=out)


@_reads("adaptive_max_pool1d", "adaptive_max_pool2d")
def _adaptive_max(r: Reader) -> Any:
    like = r.n.meta["val"][0]
    return (
        r.c.emit(
            r.n, "AdaptiveMaxPool", [r.value("self")], {"output_size": _many(r.raw("output_size"), r.rank - 2)}, like
        ),
        None,
    )


@_reads("mean")
def _mean(r: Reader) -> str:
    x = r.tensor("self")
    axes = r.raw("dim")
    axes = tuple(range(x.dim())) if axes is None else tuple(a % x.dim() for a in _many(axes, 1))
    keep = bool(r.raw("keepdim"))
    if r.a.get("dtype") not in (None, x.dtype):
        raise Unreadable
    if x.dim() == 4 and sorted(axes) == [2, 3]:
        if keep:
            return r.emit("GlobalAvgPool", [r.value("self")])
        like = x.new_empty((*x.shape[:2], 1, 1))
        pooled = r.step("GlobalAvgPool", [r.value("self")], like)
        return r.emit("Reshape", [pooled], shape=_static_shape(r.n.meta["val"]))
    return r.emit("Mean", [r.value("self")], axes=axes, keepdims=keep)


def _reduction(op: str) -> Read:
    def read(r: Reader) -> str:
        x = r.tensor("self")
        axes = r.raw("dim")
        axes = tuple(range(x.dim())) if axes is None or axes == () else tuple(a % x.dim() for a in _many(axes, 1))
        if r.a.get("dtype") not in (None, x.dtype) or (x.dtype is torch.bool and op == "Sum"):
            raise Unreadable
        return r.emit(op, [r.value("self")], axes=axes, keepdims=bool(r.raw("keepdim")))

    return read


READERS.update({"sum": _reduction("Sum"), "amax": _reduction("ReduceMax"), "amin": _reduction("ReduceMin")})


@_reads("cumsum")
def _cumsum(r: Reader) -> str:
    if r.n.meta["val"].dtype is not r.tensor("self").dtype:
        raise Unreadable
    return r.emit("CumSum", [r.value("self")], axis=r.raw("dim"))


@_reads("argmax")
def _argmax(r: Reader) -> str:
    return r.emit("ArgMax", [r.value("self")], axis=r.raw("dim"), keepdims=bool(r.raw("keepdim")))


# ---------------------------------------------------------------- moving data


def _static_shape(like: torch.Tensor) -> tuple[int, ...]:
    """A shape for Reshape: at most one unknown entry, written -1."""
    shape = tuple(int(s) if isinstance(s, int) else -1 for s in like.shape)
    if shape.count(-1) > 1:
        raise Unreadable
    return shape


@_reads("view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as")
def _reshape(r: Reader) -> str:
    return r.emit("Reshape", [r.value("self")], shape=_static_shape(r.n.meta["val"]))


@_reads("permute", "transpose", "t", "numpy_T", "swapaxes", "movedim")
def _transpose(r: Reader) -> str:
    rank = r.rank
    if "dims" in r.a:
        perm = tuple(d % rank for d in r.raw("dims"))
    elif "dim0" in r.a or "axis0" in r.a:
        a, b = (r.raw(k) % rank for k in (("dim0", "dim1") if "dim0" in r.a else ("axis0", "axis1")))
        order = list(range(rank))
        order[a], order[b] = order[b], order[a]
        perm = tuple(order)
    elif "source" in r.a:
        raise Unreadable
    else:
        perm = tuple(reversed(range(rank)))
    return r.emit("Transpose", [r.value("self")], perm=perm)


@_reads("squeeze")
def _squeeze(r: Reader) -> str:
    x = r.tensor("self")
    dims = r.raw("dim")
    wanted = range(x.dim()) if dims is None else [d % x.dim() for d in _many(dims, 1)]
    return r.emit(
        "Squeeze", [r.value("self")], axes=tuple(d for d in wanted if isinstance(x.shape[d], int) and x.shape[d] == 1)
    )


@_reads("unsqueeze")
def _unsqueeze(r: Reader) -> str:
    return r.emit("Unsqueeze", [r.value("self")], axes=(r.raw("dim") % (r.rank + 1),))


@_reads("select")
def _select(r: Reader) -> str:
    return r.emit("Select", [r.value("self")], axis=r.raw("dim") % r.rank, index=r.raw("index"))


@_reads("slice")
def _slice(r: Reader) -> str:
    end = r.raw("end")
    axis, start = r.raw("dim") % r.rank, r.raw("start") or 0
    end = None if end is None or end >= 2**62 else end
    if start == 0 and end is None and r.raw("step") == 1:
        value = r.value("self")
        assert value is not None
        return value
    return r.emit("Slice", [r.value("self")], axis=axis, start=start, end=end, step=r.raw("step"))


@_reads("split", "split_with_sizes", "chunk", "tensor_split")
def _split(r: Reader) -> Any:
    likes = list(r.n.meta["val"])
    axis = r.raw("dim") % r.rank
    sizes = tuple(t.shape[axis] for t in likes)
    if not all(isinstance(s, int) for s in sizes):
        raise Unreadable
    return tuple(r.c.emit_many(r.n, "Split", [r.value("self")], {"axis": axis, "sizes": sizes}, likes))


@_reads("unbind")
def _unbind(r: Reader) -> Any:
    return tuple(
        r.c.emit_many(r.n, "Unstack", [r.value("self")], {"axis": r.raw("dim") % r.rank}, list(r.n.meta["val"]))
    )


@_reads("cat", "concat", "concatenate", "stack")
def _concat(r: Reader) -> str:
    tensors = r.c.arg(r.a["tensors"])
    if not all(isinstance(t, str) for t in tensors):
        raise Unreadable
    op = "Stack" if "stack" in r.n.target._schema.name else "Concat"
    rank = r.n.meta["val"].dim()
    return r.emit(op, tensors, axis=r.raw("dim" if "dim" in r.a else "axis") % rank)


@_reads("expand")
def _expand(r: Reader) -> str:
    like = r.n.meta["val"]
    size = r.a["size"]
    shape = tuple(s if isinstance(s, int) else None for s in size)
    if None in shape or any(not isinstance(s, int) and shape[i] != -1 for i, s in enumerate(like.shape)):
        raise Unreadable
    return r.emit("Expand", [r.value("self")], shape=shape)


@_reads("repeat")
def _repeat(r: Reader) -> str:
    return r.emit("Tile", [r.value("self")], repeats=r.raw("repeats"))


@_reads("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def _pad(r: Reader) -> str:
    name = r.n.target._schema.name
    mode = (
        r.raw("mode")
        if "mode" in r.a
        else "reflect"
        if "reflection" in name
        else "replicate"
        if "replication" in name
        else "constant"
    )
    flat = r.raw("pad" if "pad" in r.a else "padding")
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)][::-1]
    pairs = [(0, 0)] * (r.rank - len(pairs)) + pairs
    return r.emit("Pad", [r.value("self")], padding=tuple(pairs), mode=mode, value=float(r.raw("value") or 0.0))


@_reads("index_select")
def _index_select(r: Reader) -> str:
    return r.emit("Gather", [r.value("self"), r.value("index")], axis=r.raw("dim") % r.rank)


@_reads("index")
def _index(r: Reader) -> str:
    indices = r.c.arg(r.a["indices"])
    given = [i for i, v in enumerate(indices) if v is not None]
    if (
        len(given) != 1
        or not isinstance(indices[given[0]], str)
        or r.a["indices"][given[0]].meta["val"].dtype is torch.bool
    ):
        raise Unreadable
    return r.emit("Gather", [r.value("self"), indices[given[0]]], axis=given[0])


@_reads("roll")
def _roll(r: Reader) -> str:
    if not r.raw("dims"):
        raise Unreadable
    return r.emit("Roll", [r.value("self")], shifts=_many(r.raw("shifts"), 1), axes=_many(r.raw("dims"), 1))


@_reads(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
)
def _resize(r: Reader) -> str:
    name = r.n.target._schema.name
    mode = "nearest" if "nearest" in name else "cubic" if "bicubic" in name else "linear"
    size = r.raw("output_size")
    scale = (
        r.raw("scale_factors")
        if "scale_factors" in r.a
        else tuple(v for v in (r.raw("scales_h"), r.raw("scales_w")) if v is not None)
    )
    return r.emit(
        "Resize",
        [r.value("input" if "input" in r.a else "self")],
        mode=mode,
        size=size if not scale else None,
        scale=tuple(scale) if scale else None,
        align_corners=bool(r.raw("align_corners")),
    )


@_reads("pixel_shuffle")
def _pixel_shuffle(r: Reader) -> str:
    return r.emit("DepthToSpace", [r.value("self")], block=r.raw("upscale_factor"))


@_reads("pixel_unshuffle")
def _pixel_unshuffle(r: Reader) -> str:
    return r.emit("SpaceToDepth", [r.value("self")], block=r.raw("downscale_factor"))


@_reads("channel_shuffle")
def _channel_shuffle(r: Reader) -> str:
    return r.emit("ChannelShuffle", [r.value("self")], groups=r.raw("groups"))


# ---------------------------------------------------------------- bookkeeping


@_reads(
    "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "lift_fresh", "_conj", "resolve_conj", "resolve_neg"
)
def _same(r: Reader) -> Any:
    return r.value("self")


@_reads("dropout", "feature_dropout", "alpha_dropout", "native_dropout")
def _dropout(r: Reader) -> Any:
    p = r.raw("p")
    out = (
        r.value("input") if not p else r.c.emit(r.n, "Dropout", [r.value("input")], {"p": float(p)}, r.tensor("input"))
    )
    return (out, None) if r.n.target._schema.name.endswith("native_dropout") else out


@_reads("to", "_to_copy", "type_as", "float")
def _to(r: Reader) -> Any:
    before, after = r.tensor("self").dtype, r.n.meta["val"].dtype
    if before is after:
        return r.value("self")
    return r.emit("Cast", [r.value("self")], dtype=str(after).removeprefix("torch."))


@_reads("sym_size")
def _size(r: Reader) -> Any:
    val = r.n.meta["val"]
    if isinstance(val, int):
        return val
    return r.emit("Size", [r.value("self")], axis=r.raw("dim"))
