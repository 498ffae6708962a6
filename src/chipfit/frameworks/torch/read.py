"""Readers of ATen operators: a cell of the table of operators where that suffices, else a short function.

A cell names the arguments that are operands and those that are attributes. A function maps a `TorchCall` to the name of
the result's value, or to a tuple of names. Either raises `Unreadable` for a call without canonical equivalent; that
call becomes an opaque node.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chipfit.errors import RefusedCall
from chipfit.files import package_data
from chipfit.frameworks.reading import Unreadable, padded, per_axis, present, require
from chipfit.frameworks.torch.call import TorchCall
from chipfit.frameworks.torch.program import OpenSize, SymbolicTensor, aten_name
from chipfit.operators.formulas import compute
from chipfit.operators.table import OPS, attribute_words, by_name, enters, read_column, reader_of

Reader = Callable[[TorchCall], Any]

#: ATen operator, without overload -> its reader
READERS: dict[str, Reader] = {}
reads = enters(READERS)
#: ATen's aliases -> its own names
SYNONYMS = dict(word.split("=") for word in package_data("chipfit.frameworks.torch", "aten.yaml")["synonyms"].split())


def _pairs(v: Any, n: int) -> tuple[tuple[int, int], ...]:
    return tuple((p, p) for p in per_axis(v, n))


def _spatial(c: TorchCall) -> int:
    """Return how many spatial axes the operand of an operator "...1d", "...2d" or "...3d" has.

    Raises:
        Unreadable: The operand has no batch axis.
    """
    n = c.rank - 2
    require(c.name.endswith(f"{n}d"))
    return n


#: conversion of an argument to an attribute, by its name in a cell
_CONVERSIONS: dict[str, Callable[[TorchCall, Any], Any]] = {
    "": lambda c, v: v,
    "float": lambda c, v: float(v),
    "bool": lambda c, v: bool(v),
    "axis": lambda c, v: v % c.rank,
    "axes": lambda c, v: tuple(a % c.rank for a in (range(c.rank) if v is None else per_axis(v, 1))),
    "integers": lambda c, v: per_axis(present(v or None), 1),
    "new_axis": lambda c, v: (v % (c.rank + 1),),
    "spatial": lambda c, v: per_axis(v, _spatial(c)),
    "stride": lambda c, v: per_axis(v or c.static("kernel_size"), _spatial(c)),
    "padding": lambda c, v: _pairs(v, _spatial(c)),
}


def enter_cell(
    op: str,
    name: str,
    operands: str = "",
    attrs: str = "",
    only: Mapping[str, Any] | None = None,
    read: str | Reader = "",
) -> None:
    """Enter the reader of ATen operators that become one node: a cell of the table of operators.

    Arguments that the cell does not name must be neutral (`TorchCall.is_neutral`).

    Args:
        op: the canonical operator.
        name: ATen operators, with spaces between.
        operands: their arguments by slot; "?" marks one that may be None, "#" one that may be a number. By default
            "self", or "self# other#" for two operands.
        attrs: "attribute=argument:conversion" for each attribute, by `_CONVERSIONS`.
        only: arguments with the values that have a canonical equivalent; an argument may also be None.
        read: a reader that takes the place of the other fields, or the name of a function of `_READERS_OF`.
    """
    operands = operands or ("self# other#" if OPS[op].slots == ("in0", "in1") else "self")
    slots = [(word.rstrip("?#"), word[-1]) for word in operands.split()]
    attributes = [(attr, argument, _CONVERSIONS[how]) for attr, argument, how in attribute_words(attrs)]
    named = {*(k for k, _ in slots), *(k for _, k, _ in attributes), *(only or {})}

    def read_cell(c: TorchCall) -> Any:
        require(all(c.static(k) in (None, v) for k, v in (only or {}).items()))
        require(all(k in named or c.is_neutral(k) for k in c.args))
        by_mark = {"?": c.optional, "#": c.number_or_value}
        inputs = [by_mark.get(mark, c.value)(k) for k, mark in slots]
        return c.emit(op, inputs, **{attr: convert(c, c.static(k)) for attr, k, convert in attributes})

    READERS.update(dict.fromkeys(name.split(), reader_of(op, read, _READERS_OF) if read else read_cell))


# ---------------------------------------------------------------- products and sums


@reads("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv(c: TorchCall) -> Any:
    if not isinstance(c.args.get("groups", 1), int):  # as in correlations of samples with templates of their own
        raise RefusedCall("The groups of a convolution follow the number of samples")
    x, w = c.tensor("input"), c.tensor("weight")
    n = w.dim() - 2
    require(x.dim() == w.dim())  # else it has no batch axis
    stride, dilation = per_axis(c.static("stride"), n), per_axis(c.static("dilation"), n)
    groups, padding = c.static("groups"), c.static("padding")
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, w.shape[2:], strict=True)]
        pairs = tuple((t // 2, t - t // 2) for t in total)
    else:
        pairs = _pairs(padding, n)
    inputs = [c.value("input"), c.value("weight"), c.optional("bias")]
    attrs = {"stride": stride, "padding": pairs, "dilation": dilation, "groups": groups}
    if "transpose" in c.name or c.static("transposed"):
        return c.emit(f"TransposeConv{n}D", inputs, **attrs, output_padding=per_axis(c.static("output_padding"), n))
    depthwise = n == 2 and groups > 1 and groups == x.shape[1]
    return c.emit("DepthwiseConv2D" if depthwise else f"Conv{n}D", inputs, **attrs)


@reads("scaled_dot_product_attention")
def _attention(c: TorchCall) -> Any:
    """Read attention; heads that share keys and values get copies of them, as later steps expect."""
    ins, copies = [c.value("query"), c.value("key"), c.value("value")], 1
    require(not c.static("dropout_p"))
    if c.static("enable_gqa"):
        copies = c.tensor("query").shape[-3] // c.tensor("key").shape[-3]
    for k, key in enumerate(("key", "value") if copies > 1 else (), 1):
        *outer, n, d = c.tensor(key).shape
        x = c.step("Unsqueeze", [ins[k]], axes=(len(outer),))
        x = c.step("Expand", [x], shape=(*[-1] * len(outer), copies, -1, -1))
        whole = (*outer[:-1], outer[-1] * copies, n, d)
        ins[k] = _reshape_to(c.step, c, x, (*outer, copies, n, d), whole)
    settings = {"is_causal": c.static("is_causal"), "scale": c.static("scale"), "enable_gqa": False}
    return c.emit("SDPA", [*ins, c.optional("attn_mask")], **settings)


@reads("matmul bmm mm")
def _matmul(c: TorchCall) -> Any:
    """Read a product of matrices; a vector becomes a matrix of one row or one column."""
    keys = "self", "other" if "other" in c.args else "mat2"
    inputs = [c.value(k) for k in keys]
    vectors = [k for k, key in enumerate(keys) if c.tensor(key).dim() == 1]
    require(len(vectors) <= 1 and "out_dtype" not in c.args)
    for k in vectors:
        inputs[k] = c.step("Unsqueeze", [inputs[k]], axes=(k,))
        return c.emit("Squeeze", [c.step("MatMul", inputs)], axes=(c.result.dim() - 1 + k,))
    return c.emit("MatMul", inputs)


@reads("add sub")
def _add(c: TorchCall) -> Any:
    if (x := _plus_nothing(c)) is not None:
        return x
    alpha, a = c.static("alpha"), c.number_or_value("self")
    if alpha in (None, 1):
        b = c.number_or_value("other")
    elif isinstance(c.args["other"], torch.fx.Node):
        like = c.tensor("other").to(c.result.dtype)
        b = c.step("Mul", [c.number_or_value("other"), c.builder.scalar(f"{c.node.name}.alpha", alpha, like)])
    else:
        b = c.builder.scalar(c.node.name, c.static("other") * alpha, c.result)
    return c.emit(c.name.capitalize(), [a, b])


def _plus_nothing(c: TorchCall) -> str | None:
    """Return the operand to which the number 0 is added, as Python's `sum` does first; None for other calls."""
    for tensor, number in (("self", "other"), ("other", "self"))[: 2 if c.name == "add" else 1]:
        zero, x = c.args.get(number), c.args.get(tensor)
        if isinstance(zero, (int, float)) and zero == 0 and isinstance(x, torch.fx.Node):
            return c.value(tensor) if c.tensor(tensor).dtype is c.result.dtype else None
    return None


@reads("hardtanh clamp clamp_min clamp_max clip")
def _clamp(c: TorchCall) -> Any:
    if any(isinstance(c.args.get(end), torch.fx.Node) for end in ("min", "max")):
        return _bounded(c)
    lo, hi = (c.static(f"{end}_val" if f"{end}_val" in c.args else end) for end in ("min", "max"))
    lo, hi = None if lo == -math.inf else lo, None if hi == math.inf else hi
    if lo is None and hi is None:
        return c.value("self")
    if not c.tensor("self").dtype.is_floating_point:  # Clamp is for floats; Max and Min promote types as torch does
        limits = [(op, c.constant(v)) for op, v in (("Max", lo), ("Min", hi)) if v is not None]
        x = c.number_or_value("self")
        for op, limit in limits[:-1]:
            x = c.step(op, [x, limit])
        return c.emit(limits[-1][0], [x, limits[-1][1]])
    if lo == 0 and hi in (6, None):
        return c.emit("Relu" if hi is None else "Relu6", [c.value("self")])
    bounds = {end: None if v is None else float(v) for end, v in (("min", lo), ("max", hi))}
    return c.emit("Clamp", [c.value("self")], **bounds)


def _bounded(c: TorchCall) -> Any:
    """Read a clamp between tensors."""
    x = c.cast_to_result("self")
    *first, (op, end) = [(op, end) for op, end in (("Max", "min"), ("Min", "max")) if c.args.get(end) is not None]
    for step, bound in first:
        x = c.step(step, [x, c.number_or_value(bound)])
    return c.emit(op, [x, c.number_or_value(end)])


@reads("lerp")
def _lerp(c: TorchCall) -> Any:
    """Read lerp(a, b, w) as a + w (b - a)."""
    start, end = c.value("self"), c.value("end")
    return c.formula("a + (b - a) * w", a=start, b=end, w=c.number_or_value("weight"))


@reads("log1p expm1")
def _near_zero(c: TorchCall) -> Any:
    """Read functions that PyTorch has for small results by the operators that they stand for."""
    return c.formula("log(x + 1)" if c.name == "log1p" else "exp(x) - 1", x=c.cast_to_result("self"))


_TOWARDS_ZERO = "floor(abs(x)) * sign(x)"  #: x without its fraction


@reads("trunc fix frac")
def _truncated(c: TorchCall) -> Any:
    """Read x without its fraction, or the fraction."""
    require(c.result.dtype.is_floating_point)
    return c.formula(f"x - {_TOWARDS_ZERO}" if c.name == "frac" else _TOWARDS_ZERO, x=c.value("self"))


@reads("floor_divide")
def _floor_divide(c: TorchCall) -> Any:
    """Read a quotient that is rounded down, or towards zero, as that of integers is."""
    a, b = c.number_or_value("self"), c.number_or_value("other")
    if c.static("rounding_mode") != "trunc":
        return c.formula("floordiv(a, b)", a=a, b=b)
    return c.formula(f"x = a / b; {_TOWARDS_ZERO}" if c.result.dtype.is_floating_point else "a / b", a=a, b=b)


def _remainder(c: TorchCall, op: str) -> Any:
    """Read a remainder with the sign of the dividend."""
    a, b = c.number_or_value("self"), c.number_or_value("other")
    return c.formula(f"{op.lower()}(abs(a), abs(b)) * sign(a)", a=a, b=b)


@reads("hypot")
def _hypotenuse(c: TorchCall) -> Any:
    """Read a hypotenuse as the root of the sum of two squares."""
    return c.formula("sqrt(a * a + b * b)", a=c.value("self"), b=c.value("other"))


@reads("masked_fill")
def _masked_fill(c: TorchCall) -> Any:
    """Read `masked_fill`; the value is cast to the type of the tensor that it fills."""
    value = c.cast_to_result("value") if isinstance(c.args["value"], torch.fx.Node) else c.constant(c.static("value"))
    return c.emit("Where", [c.value("mask"), value, c.value("self")])


@reads("tril triu")
def _triangle(c: TorchCall) -> Any:
    """Read a triangle of matrices as a choice by a constant condition."""
    rows, columns = c.tensor("self").shape[-2:]
    require(isinstance(rows, int) and isinstance(columns, int))
    kept = getattr(torch.ones(rows, columns, dtype=torch.bool), c.name)(c.static("diagonal") or 0)
    return c.emit("Where", [c.builder.constant(f"{c.node.name}.kept", kept), c.value("self"), c.constant(0)])


@reads("nan_to_num")
def _nan_to_num(c: TorchCall) -> Any:
    """Read `nan_to_num` as choices of what equals itself and of what lies beyond the largest floats."""
    x, most = c.cast_to_result("self"), torch.finfo(torch.float32).max
    require(c.result.dtype is torch.float32)
    x = c.step("Where", [c.step("Equal", [x, x]), x, c.constant(float(c.static("nan") or 0.0))])
    low, high = (end if v is None else v for v, end in ((c.static("neginf"), -most), (c.static("posinf"), most)))
    if (low, high) == (-most, most):
        return c.emit("Clamp", [x], min=-most, max=most)
    ends = "x = where(x < least, low, x); where(x > most, high, x)"
    return c.formula(ends, x=x, least=-most, most=most, low=low, high=high)


@reads("logit")
def _logit(c: TorchCall) -> Any:
    """Read log(x / (1 - x)), of x between eps and 1 - eps."""
    x, eps = c.cast_to_result("self"), c.static("eps")
    require(eps is None or eps <= 0.5)  # above it the bounds would change places
    if eps is not None and eps >= 0:  # PyTorch ignores negative ones
        x = c.step("Clamp", [x], min=float(eps), max=1.0 - float(eps))
    return c.formula("log(x / (1 - x))", x=x)


@reads("take_along_dim")
def _take_along(c: TorchCall) -> Any:
    """Read an index for each element, where data and indices have as many elements along the other axes."""
    x, index, dim = c.tensor("self"), c.tensor("indices"), c.static("dim")
    require(dim is not None and x.dim() == index.dim())
    others = [k for k in range(x.dim()) if k != dim % x.dim()]
    require(all(c.builder.same_size(x.shape[k], index.shape[k]) for k in others))
    return c.emit("GatherElements", [c.value("self"), c.value("indices")], axis=dim % x.dim())


#: elements of each row that are written one after the other
_MOST_SELECTIONS = 8


@reads("scatter")
def _scatter_one(c: TorchCall) -> Any:
    """Read elements at fixed places of an axis as those of a part of it, and few of each row as selections.

    Places of the latter may depend on data, as those of `argmax` with `keepdim` and of `topk`.
    """
    x, index = c.tensor("self"), c.tensor("index")
    dim, same = c.static("dim") % max(x.dim(), 1), c.builder.same_size
    require(c.args.get("reduce") is None and x.dim() > 0 and isinstance(x.shape[dim], int))
    require(all(k == dim or same(x.shape[k], index.shape[k]) for k in range(x.dim())))
    if "src" in c.args:
        require(all(map(same, c.tensor("src").shape, index.shape)))
        new = c.value("src")
    else:
        new = c.builder.scalar(c.node.name, c.static("value"), c.result)
    if places := _fixed_places(c, dim):
        return (_replaced if "src" in c.args else _with_number)(c, dim, places, new)
    count, y = index.shape[dim], c.value("self")
    require(count in range(1, _MOST_SELECTIONS + 1))
    every = torch.arange(x.shape[dim], dtype=index.dtype).view([-1 if k == dim else 1 for k in range(x.dim())])
    numbered = c.builder.constant(f"{c.node.name}.places", every)

    def one(value: Any, k: int) -> Any:
        return value if count == 1 else c.step("Slice", [value], axis=dim, start=k, end=k + 1, step=1)

    for k in range(count):
        hit = c.step("Equal", [one(c.value("index"), k), numbered])
        put = c.emit if k == count - 1 else c.step
        y = put("Where", [hit, one(new, k) if "src" in c.args else new, y])
    return y


def _fixed_places(c: TorchCall, dim: int) -> list[int]:
    """Return the places on an axis that a constant index has for all elements of the others; [] if there are none."""
    name, weights = c.value("index"), c.builder.graph.weights
    made = next((n for n in reversed(c.builder.graph.nodes) if name in n.outputs), None)
    index = weights.get(made.inputs[0] or "" if made is not None and made.op == "Expand" else name)
    if index is None or index.dim() != c.rank or not index.numel():
        return []
    line = index.movedim(dim, -1).reshape(-1, index.shape[dim])
    fixed = bool((line == line[0]).all()) and len(line[0].unique()) == line.shape[1] == c.tensor("index").shape[dim]
    return [int(k) for k in line[0]] if fixed else []


@reads("cdist")
def _distances(c: TorchCall) -> Any:
    """Read the lengths of all differences between two sets of vectors, [.., P, D] and [.., R, D]."""
    a, b = c.tensor("x1"), c.tensor("x2")
    require(c.static("p") == 2 and a.dim() == b.dim())
    apart = [c.step("Unsqueeze", [c.value(k)], axes=(a.dim() + at,)) for k, at in (("x1", -1), ("x2", -2))]
    return c.emit("ReduceL2", [c.step("Sub", apart)], axes=(c.result.dim(),), keepdims=False)


def _celu(c: TorchCall, op: str) -> Any:
    """Read celu(x) as alpha elu(x / alpha)."""
    x, alpha = c.value("self"), float(c.static("alpha"))
    if alpha == 1:
        return c.emit(op, [x], alpha=1.0)
    return c.formula(f"{op.lower()}(x * shrink, alpha=1.0) * alpha", x=x, shrink=1 / alpha, alpha=alpha)


def _random_slope(c: TorchCall, op: str) -> Any:
    """Read a leaky ReLU whose slope is random while it trains, and the middle of its range afterwards."""
    require(not c.static("training"))
    return c.emit(op, [c.value("self")], negative_slope=(c.static("lower") + c.static("upper")) / 2)


def _plain_softplus(op: str, x: str) -> str:
    """Return the formula of log(1 + exp(x))."""
    return f"{op.lower()}({x}, beta=1.0, threshold=20.0)"


def _log_sigmoid(c: TorchCall, op: str) -> Any:
    """Read log(sigmoid(x)) as -softplus(-x)."""
    return c.formula(f"-{_plain_softplus(op, '-x')}", x=c.cast_to_result("self"))


def _log_add_exp(c: TorchCall, op: str) -> Any:
    """Read log(exp(a) + exp(b)) as max(a, b) + softplus(-|a - b|)."""
    a, b = c.cast_to_result("self"), c.cast_to_result("other")
    return c.formula(f"gap = -abs(a - b); max(a, b) + {_plain_softplus(op, 'gap')}", a=a, b=b)


# ---------------------------------------------------------------- pooling and reduction


@reads("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d")
def _adaptive_pool(c: TorchCall) -> Any:
    n, kind = _spatial(c), "Avg" if "avg" in c.name else "Max"
    out, spatial = per_axis(c.static("output_size"), n), c.tensor("self").shape[2:]
    if kind == "Avg" and out == (1,) * n:
        return c.emit("GlobalAvgPool", [c.value("self")])
    if any(not isinstance(s, int) or s % o for s, o in zip(spatial, out, strict=True)):
        return c.emit(f"Adaptive{kind}Pool", [c.value("self")], output_size=out)
    kernel = tuple(s // o for s, o in zip(spatial, out, strict=True))
    plain = {"padding": ((0, 0),) * n, "ceil_mode": False}
    own: dict[str, Any] = {"count_include_pad": True} if kind == "Avg" else {"dilation": (1,) * n}
    return c.emit(f"{kind}Pool", [c.value("self")], kernel=kernel, stride=kernel, **plain, **own)


def _reduce(c: TorchCall, op: str) -> Any:
    x, axes, keep = c.tensor("self"), _axes(c), bool(c.static("keepdim"))
    require(c.name != "sum" or torch.promote_types(c.result.dtype, torch.int64) is c.result.dtype)
    data = c.cast_to_result("self")
    if c.name != "mean" or x.dim() != 4 or sorted(axes) != [2, 3]:
        return c.emit(op, [data], axes=axes, keepdims=keep)
    if keep:
        return c.emit("GlobalAvgPool", [data])
    return c.emit("Reshape", [c.step("GlobalAvgPool", [data])], shape=_reshape_target(c.result.shape))


def _any(c: TorchCall, op: str) -> Any:
    """Read whether any, or all, of some conditions hold: the largest, or least, of zeros and ones is above a half."""
    x, dim = c.tensor("self"), c.args.get("dim")
    require(x.dtype is torch.bool and x.dim() != 0)
    axes = tuple(range(x.dim())) if dim is None else tuple(a % x.dim() for a in per_axis(c.static("dim"), 1))
    ones = c.step("Cast", [c.value("self")], dtype="float32")
    most = c.step(op, [ones], axes=axes, keepdims=bool(c.args.get("keepdim")))
    return c.formula("most > half", most=most, half=c.builder.scalar(c.node.name, 0.5, c.result.to(torch.float32)))


_BAGS = ("Sum", "Mean", "ReduceMax")  #: by the number of `mode`
_FLATTENS = ("reshape", "view", "flatten")


@reads("embedding_bag")
def _embedding_bag(c: TorchCall) -> Any:
    """Read bags of as many indices each, which PyTorch flattens, as rows of a table that are reduced."""
    flat, offsets = c.args["indices"], c.args["offsets"]
    require(aten_name(flat.target) in _FLATTENS and aten_name(offsets.target) == "arange" and len(offsets.args) == 3)
    index, (start, _, size) = flat.args[0], offsets.args
    like, special = index.meta["val"], ("per_sample_weights", "include_last_offset", "padding_idx")
    if (*like.shape[1:],) != (size,) or start != 0 or any(c.args.get(k) not in (None, False) for k in special):
        raise Unreadable
    rows = c.step("Embedding", [c.value("weight"), c.builder.arg(index)])
    return c.emit(_BAGS[c.static("mode")], [rows], axes=(1,), keepdims=False)


#: formulas of vector norms by their order
_NORMS = {1: "sum(abs(x), {})", 2: "reducel2(x, {})", math.inf: "reducemax(abs(x), {})"}


@reads("linalg_vector_norm")
def _vector_norm(c: TorchCall) -> Any:
    require(c.static("ord") in _NORMS and c.static("dtype") is None)
    norm = _NORMS[c.static("ord")].format("axes=axes, keepdims=keep")
    return c.formula(norm, x=c.value("self"), axes=_axes(c), keep=bool(c.static("keepdim")))


@reads("cosine_similarity")
def _cosine_similarity(c: TorchCall) -> Any:
    """Read the sum of products of two operands, each divided by its length."""
    rank = c.result.dim() + 1
    require(all(c.tensor(k).dim() == rank for k in ("x1", "x2")))
    unit = "({0} / clamp(reducel2({0}, axes=axes, keepdims=True), min=eps, max=None))"
    cosine = f"sum({unit.format('a')} * {unit.format('b')}, axes=axes, keepdims=False)"
    axes = (c.static("dim") % rank,)
    return c.formula(cosine, a=c.value("x1"), b=c.value("x2"), axes=axes, eps=float(c.static("eps")))


@reads("pairwise_distance")
def _pairwise_distance(c: TorchCall) -> Any:
    require(c.static("p") == 2)
    a, b, last = c.value("x1"), c.value("x2"), max(c.tensor(k).dim() for k in ("x1", "x2")) - 1
    given = {"eps": c.static("eps"), "axes": (last,), "keep": bool(c.static("keepdim"))}
    return c.formula("reducel2(a - b + eps, axes=axes, keepdims=keep)", a=a, b=b, **given)


def _axes(c: TorchCall) -> tuple[int, ...]:
    """Return the axes of a reduction; all of them where the call leaves them out."""
    dim = c.static("dim")
    return tuple(range(c.rank)) if dim in (None, ()) else tuple(a % c.rank for a in per_axis(dim, 1))


@reads("var std var_mean std_mean")
def _spread(c: TorchCall) -> Any:
    """Read variances and standard deviations as means of squared deviations from the mean."""
    axes, keep, (deviation, *mean) = _axes(c), bool(c.static("keepdim")), c.name.split("_")
    correction = c.static("correction" if "correction" in c.args else "unbiased")
    correction = 1 if correction is None else float(correction)
    x, sizes = c.value("self"), [c.tensor("self").shape[a] for a in axes]
    require(not correction or all(isinstance(s, int) for s in sizes))
    given, like = {"x": x, "axes": axes, "keep": keep}, c.result[0] if mean else c.result
    spread = "mean(gap * gap, axes=axes, keepdims=keep)"
    if correction:
        count = math.prod(sizes)
        require(count > correction)
        given["factor"] = c.builder.scalar(c.node.name, count / (count - correction), like)
        spread = f"{spread} * factor"
    spread = f"gap = x - mean(x, axes=axes, keepdims=True); {f'sqrt({spread})' if deviation == 'std' else spread}"
    if not mean:
        return c.formula(spread, **given)
    return compute(spread, c.step, **given), c.step("Mean", [x], axes=axes, keepdims=keep)


@reads("logsumexp")
def _log_sum_exp(c: TorchCall) -> Any:
    """Read the logarithm of a sum of exponentials, which the greatest of them bounds."""
    top = "top = reducemax(x, axes=axes, keepdims=True)"
    logs = "log(sum(exp(x - top), axes=axes, keepdims=True)) + top"
    logs = logs if c.static("keepdim") else f"squeeze({logs}, axes=axes)"
    return c.formula(f"{top}; {logs}", x=c.cast_to_result("self"), axes=_axes(c))


def _instance_norm(c: TorchCall, op: str) -> Any:
    """Read the norm of each sample's channels, or of all samples' channels by running statistics."""
    by_sample = c.static("use_input_stats")
    statistics = [] if by_sample else [c.value("running_mean"), c.value("running_var")]
    inputs = [c.value("input"), c.optional("weight"), c.optional("bias"), *statistics]
    return c.emit(op if by_sample else "BatchNorm", inputs, eps=float(c.static("eps")))


def _along_axis(c: TorchCall, op: str) -> Any:
    """Read a softmax or running sum of the operand in the type of the argument `dtype`."""
    return c.emit(op, [c.cast_to_result("self")], axis=c.static("dim"))


@reads("max min")
def _max_min(c: TorchCall) -> Any:
    """Read `max` and `min`: of two tensors, along an axis (with the indices if they are used), or of a whole tensor."""
    if "other" in c.args:
        return c.emit(c.name.capitalize(), [c.number_or_value("self"), c.number_or_value("other")])
    axes = _axes(c)
    x, keep, kind = c.value("self"), bool(c.static("keepdim")), c.name.capitalize()
    if not isinstance(c.result, (tuple, list)) or c.only_first_result_is_read:
        return c.emit(f"Reduce{kind}", [x], axes=axes, keepdims=keep)
    values = c.step(f"Reduce{kind}", [x], axes=axes, keepdims=keep)
    return values, c.step(f"Arg{kind}", [x], axis=axes[0], keepdims=keep)


def _top_k(c: TorchCall, op: str) -> Any:
    """Read `topk`, `sort` and `argsort` as the operator that orders equal values by their index as runtimes do."""
    require(isinstance(c.static("k") or 0, int) and c.rank)
    largest = bool(c.static("largest" if c.name == "topk" else "descending"))
    how = {"k": c.static("k"), "axis": c.static("dim") % c.rank, "largest": largest}
    if c.name != "argsort":
        return c.emit_all(op, **how)
    likes = [c.tensor("self"), c.result]
    return c.builder.append(c.node, op, [c.value("self")], how, likes)[1]


@reads("kthvalue median")
def _kth_smallest(c: TorchCall) -> Any:
    """Read the k-th smallest value, of n, as the last of the n - k + 1 largest; the median is the lower one of two."""
    require("dim" in c.args and c.rank)  # else it is of a whole tensor
    c.require_only_first_result()
    x, axis = c.tensor("self"), c.static("dim") % c.rank
    n = x.shape[axis]
    require(isinstance(n, int))
    count = n + 1 - (c.static("k") if c.name == "kthvalue" else (n + 1) // 2)
    last = {"axis": axis, "start": count - 1, "end": count, "step": 1}
    y = c.step("TopK", [c.value("self")], k=count, axis=axis, largest=True)
    if c.static("keepdim"):
        return c.emit("Slice", [y], **last)
    return c.emit("Squeeze", [c.step("Slice", [y], **last)], axes=(axis,))


@reads("one_hot")
def _one_hot(c: TorchCall) -> Any:
    """Read one-hot rows as a comparison with every class."""
    count = c.static("num_classes")
    require(count >= 0)  # below 0 it is one more than the greatest class
    wide = c.step("Unsqueeze", [c.value("self")], axes=(c.rank,))
    classes = c.builder.constant(f"{c.node.name}.classes", torch.arange(count))
    return c.emit("Cast", [c.step("Equal", [wide, classes])], dtype="int64")


@reads("__and__ __or__ bitwise_and bitwise_or bitwise_not")
def _bitwise(c: TorchCall) -> Any:
    """Read bitwise operators of booleans as logical ones."""
    require(c.result.dtype is torch.bool)
    slots = [c.value(k) for k in ("self", "other") if k in c.args]
    return c.emit(f"Logical{c.name.strip('_').removeprefix('bitwise_').capitalize()}", slots)


@reads("isnan")
def _is_nan(c: TorchCall) -> Any:
    """Read NaN as what does not equal itself."""
    return c.formula("not x == x", x=c.value("self"))


# ---------------------------------------------------------------- moving data


def _reshape_target(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return a shape for Reshape, with -1 for the open size.

    Raises:
        Unreadable: Several sizes are open, or one is 0.
    """
    shape = tuple(int(s) if isinstance(s, int) else -1 for s in sizes)
    require(shape.count(-1) <= 1 and 0 not in shape)
    return shape


def _reshape_to(put: Callable[..., str], c: TorchCall, x: str, old: Sequence[Any], new: Sequence[Any]) -> str:
    """Append a Reshape from old sizes to new ones.

    Of several open sizes the last becomes -1; the others become 0 where the old shape has them in the same place, else
    an operand.

    Args:
        put: `c.emit`, or `c.step` if it is not the last node of the call.
    """
    shape: list[Any] = [int(s) if isinstance(s, int) else -1 for s in new]
    operands = [x]
    for k, s in enumerate(new if shape.count(-1) > 1 else ()):
        if shape[k] == -1 and -1 in shape[k + 1 :]:
            unchanged = k < len(old) and c.builder.same_size(old[k], s)
            shape[k] = 0 if unchanged else None
            operands += [] if unchanged else [c.size(s)]
    return put("Reshape", operands, shape=tuple(shape))


@reads("view reshape flatten unflatten _unsafe_view view_as reshape_as")
def _reshape(c: TorchCall) -> Any:
    if c.result.dtype is not c.tensor("self").dtype or 0 in c.result.shape:
        raise Unreadable  # reinterprets the bits as another type
    return _reshape_to(c.emit, c, c.value("self"), c.tensor("self").shape, c.result.shape)


@reads("transpose swapaxes t numpy_T")
def _transpose(c: TorchCall) -> Any:
    perm = list(range(c.rank))
    swapped = [c.static(k) for k in c.args if k != "self"]
    if swapped:
        a, b = swapped
        perm[a], perm[b] = perm[b], perm[a]
    else:
        perm.reverse()
    return c.emit("Transpose", [c.value("self")], perm=tuple(perm))


@reads("squeeze")
def _squeeze(c: TorchCall) -> Any:
    x, dims = c.tensor("self"), c.static("dim")
    wanted = range(x.dim()) if dims is None else [d % x.dim() for d in per_axis(dims, 1)]
    axes = tuple(d for d in wanted if isinstance(x.shape[d], int) and x.shape[d] == 1)
    return c.emit("Squeeze", [c.value("self")], axes=axes)


@reads("slice")
def _slice(c: TorchCall) -> Any:
    axis, step, first = c.static("dim") % c.rank, c.static("step"), c.args.get("start") or 0
    start = first if isinstance(first, OpenSize) else c.static("start") or 0
    if (start, step) == (0, 1) and c.is_open("end"):
        return c.emit("Gather", [c.value("self"), c.index_range("end")], axis=axis)
    if isinstance(start, OpenSize) or isinstance(c.args.get("end"), OpenSize):
        part = c.result.shape[axis]
        index = start.multiple_of(part) if isinstance(start, OpenSize) else 0 if start == 0 else None
        require(step == 1 and index is not None)
        return c.emit("Select", [_parts_apart(c, axis, part)[0]], axis=axis, index=index)
    end = c.static("end")
    if end is not None and end >= 2**62:  # torch's "to the end"
        end = None
    if (start, end, step) == (0, None, 1):
        return c.value("self")
    return c.emit("Slice", [c.value("self")], axis=axis, start=start, end=end, step=step)


@reads("arange")
def _arange(c: TorchCall) -> Any:
    require(c.is_open("end") and (c.args.get("start", 0), c.args.get("step", 1)) == (0, 1))
    kind = str(c.result.dtype).removeprefix("torch.")
    return c.index_range("end") if kind == "int64" else c.emit("Cast", [c.index_range("end")], dtype=kind)


@reads("split split_with_sizes chunk tensor_split")
def _split(c: TorchCall) -> Any:
    axis = c.static("dim") % c.rank
    sizes = tuple(t.shape[axis] for t in c.result)
    if all(isinstance(s, int) for s in sizes):
        return c.emit_all("Split", axis=axis, sizes=sizes)
    whole, count = _parts_apart(c, axis, sizes[0])
    require(sizes == (sizes[0],) * count)
    return tuple(c.step("Select", [whole], axis=axis, index=k) for k in range(count))


def _parts_apart(c: TorchCall, axis: int, part: Any) -> tuple[str, int]:
    """Reshape an axis of several times an open size to [count, size], and return the value and the count."""
    shape = c.tensor("self").shape
    count = present(shape[axis].multiple_of(part) if isinstance(shape[axis], OpenSize) else None)
    sizes = _reshape_target(shape)
    return c.step("Reshape", [c.value("self")], shape=(*sizes[:axis], count, -1, *sizes[axis + 1 :])), count


def _unbind(c: TorchCall, op: str) -> Any:
    return c.emit_all(op, axis=c.static("dim") % c.rank)


_STACKS = {"vstack": 0, "hstack": 1, "column_stack": 1, "dstack": 2}


def _concat(c: TorchCall, op: str) -> Any:
    # `cat` leaves out empty vectors beside tensors of more axes, with which caches begin
    given = [x for x in c.args["tensors"] if c.result.dim() == 1 or tuple(x.meta["val"].shape) != (0,)]
    tensors, axis = c.builder.arg(given), _STACKS.get(c.name)
    if axis is None:
        axis = c.static("dim" if "dim" in c.args else "axis") % c.result.dim()
    elif any(x.meta["val"].dim() <= max(axis, 1) for x in given):  # they get further axes
        raise Unreadable
    return tensors[0] if len(tensors) == 1 < len(c.args["tensors"]) else c.emit(op, tensors, axis=axis)


@reads("expand expand_as broadcast_to")
def _expand(c: TorchCall) -> Any:
    return _expand_to_result(c, c.value("self"), c.tensor("self").shape)


def _expand_to_result(c: TorchCall, x: str, sizes: Sequence[Any]) -> Any:
    """Broadcast a tensor of these sizes to the shape of the result."""
    want = c.result.shape
    have = (None,) * (len(want) - len(sizes)) + tuple(sizes)
    shape = tuple(-1 if h is not None and c.builder.same_size(h, w) else w for h, w in zip(have, want, strict=True))
    sizes = [c.size(s) for s in shape if not isinstance(s, int)]
    return c.emit("Expand", [x, *sizes], shape=tuple(s if isinstance(s, int) else None for s in shape))


@reads("repeat")
def _repeat(c: TorchCall) -> Any:
    """Read `repeat`; an axis of size 1, repeated as often as there are samples, is an Expand.

    A longer one, repeated so, is an Expand along a new axis in front of it, which a Reshape then joins to it.
    """
    counts, x = c.args["repeats"], c.value("self")
    with contextlib.suppress(Unreadable):
        return c.emit("Tile", [x], repeats=c.static("repeats"))
    sizes = (1,) * (len(c.result.shape) - c.rank) + tuple(c.tensor("self").shape)
    if all(h == 1 or c.builder.same_size(h, w) for h, w in zip(sizes, c.result.shape, strict=True)):
        return _expand_to_result(c, x, sizes)
    require(all(n == 1 or not isinstance(n, int) for n in counts) and all(isinstance(s, int) for s in sizes))
    new = [[] if isinstance(n, int) else [n] for n in counts]
    apart = [s for n, size in zip(new, sizes, strict=True) for s in (*[1] * len(n), size)]
    times = [s for n, size in zip(new, sizes, strict=True) for s in (*[None] * len(n), size)]
    operands = [c.step("Reshape", [x], shape=tuple(apart)), *(c.size(n[0]) for n in new if n)]
    whole = c.step("Expand", operands, shape=tuple(times))
    return c.emit("Reshape", [whole], shape=_reshape_target(c.result.shape))


@reads("zeros_like ones_like full_like new_zeros new_ones new_full zeros ones full fill")
def _full(c: TorchCall) -> Any:
    """Read a tensor filled with one number."""
    name = c.name.removeprefix("new_").removesuffix("_like")
    if isinstance(c.args.get("value"), torch.fx.Node):
        return _expand_to_result(c, c.cast_to_result("value"), ())
    value = c.static("value" if name == "fill" else "fill_value") if name in ("full", "fill") else float(name == "ones")
    shape = [s if isinstance(s, int) else 1 for s in c.result.shape]
    x = c.builder.constant(f"{c.node.name}.constant", torch.full(shape, value, dtype=c.result.dtype))
    return x if tuple(shape) == tuple(c.result.shape) else _expand_to_result(c, x, shape)


@reads("pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d")
def _pad(c: TorchCall) -> Any:
    modes = {"pad": c.static("mode"), "constant": "constant", "reflection": "reflect", "replication": "replicate"}
    flat = c.static("pad" if "pad" in c.args else "padding")  # the last axis first
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)][::-1]
    padding = ((0, 0),) * (c.rank - len(pairs)) + tuple(pairs)
    mode, value = modes[c.name.partition("_")[0]], float(c.static("value") or 0.0)
    sizes = [n if isinstance(n, int) else None for n in c.tensor("self").shape]
    return padded(c, c.value("self"), padding, sizes, mode, value)


@reads("index")
def _index(c: TorchCall) -> Any:
    indices = c.builder.arg(c.args["indices"])
    given = [i for i, v in enumerate(indices) if v is not None]
    if given == [0, 1] and _is_sample_index(c):
        like = c.args["indices"][1].meta["val"]
        if len(like.shape) == len(c.result.shape) - c.rank + 2 and like.shape[0] == 1:
            rows = c.step("Squeeze", [indices[1]], axes=(0,))
            return c.emit("Gather", [c.value("self"), rows], axis=1)
        if len(like.shape) == 1 and c.builder.same_size(like.shape[0], c.tensor("self").shape[0]):
            return _one_per_sample(c, indices[1], like)
    likes = [c.args["indices"][i].meta["val"] for i in given]
    sizes = c.tensor("self").shape
    require(all(like.dtype not in (torch.bool, torch.uint8) for like in likes))  # these are masks
    if len(given) == 1:
        return c.emit("Gather", [c.value("self"), indices[given[0]]], axis=given[0])
    first, last = given[0], given[-1]
    inner = sizes[first : last + 1]
    require(given == list(range(first, last + 1)) and all(isinstance(s, int) for s in (*inner, *c.result.shape[1:])))
    joint = _non_negative(c, indices[first], likes[0], sizes[first])  # index into the merged axes
    for i, like in zip(given[1:], likes[1:], strict=True):
        grown = c.step("Mul", [joint, c.builder.scalar(c.node.name, sizes[i], like)])
        joint = c.step("Add", [grown, _non_negative(c, indices[i], like, sizes[i])])
    shape = (*sizes[:first], math.prod(inner), *sizes[last + 1 :])
    flat = c.step("Reshape", [c.value("self")], shape=_reshape_target(shape))
    return c.emit("Gather", [flat, joint], axis=first)


def _non_negative(c: TorchCall, index: str, like: SymbolicTensor, size: int) -> str:
    """Return indices in which those below 0, which count from the end, have become positive."""
    zero, size_of_axis = (c.builder.scalar(c.node.name, k, like) for k in (0, size))
    return c.step("Where", [c.step("Less", [index, zero]), c.step("Add", [index, size_of_axis]), index])


def _one_per_sample(c: TorchCall, index: str, like: SymbolicTensor) -> Any:
    """Select x[n, index[n]] from every sample of x [N, size, ...]; every element of the part gets the index."""
    _, size, *rest = c.tensor("self").shape
    if isinstance(size, int) and aten_name(c.args["indices"][1].target) != "argmax":  # which is never below 0
        index = _non_negative(c, index, like, size)
    index = c.step("Reshape", [index], shape=(-1, 1, *[1] * len(rest)))
    if rest:
        index = c.step("Expand", [index], shape=(-1, -1, *_reshape_target(rest)))
    return c.emit("Squeeze", [c.step("GatherElements", [c.value("self"), index], axis=1)], axes=(1,))


def _is_sample_index(c: TorchCall) -> bool:
    """Return whether the first index is 0, 1, 2 ... along axis 0 and constant along others: sample n reads row n."""
    n, size = c.args["indices"][0], c.tensor("self").shape[0]
    shape = n.meta["val"].shape
    while aten_name(n.target) in ("unsqueeze", "view", "reshape", "slice"):
        n = n.args[0]
    whole = c.builder.same_size(shape[0], size) and math.prod(shape[1:]) == 1 and not isinstance(size, int)
    return whole and aten_name(n.target) == "arange" and n.target._overloadname == "default"


@reads("slice_scatter select_scatter")
def _scatter(c: TorchCall) -> Any:
    """Read a tensor with one part replaced, as a Concat of the values before, the new part and the values behind."""
    x, axis = c.tensor("self"), c.static("dim") % c.rank
    size, part = x.shape[axis], c.value("src")
    if c.name == "slice_scatter" and c.tensor("src").shape == x.shape:
        return part
    require(isinstance(size, int))
    if c.args.get("step", 1) != 1:
        return _replaced(c, axis, range(size)[c.static("start") : c.static("end") : c.static("step")], part)
    if c.name == "select_scatter":
        start = c.static("index") % size
        end = start + 1
        part = c.step("Unsqueeze", [part], axes=(axis,))
    else:
        start, end, _ = slice(c.static("start"), c.static("end")).indices(size)
    parts = [part] if end > start else []
    for lo, hi, at in ((0, start, 0), (max(start, end), size, len(parts) + 1)):
        if hi > lo:
            parts.insert(at, c.step("Slice", [c.value("self")], axis=axis, start=lo, end=hi, step=1))
    return parts[0] if len(parts) == 1 else c.emit("Concat", parts, axis=axis)


def _replaced(c: TorchCall, axis: int, places: Sequence[int], part: str) -> Any:
    """Read a tensor with other values at fixed places of one axis, as a Gather from the two, joined along the axis."""
    order = torch.arange(c.tensor("self").shape[axis])
    order[list(places)] = len(order) + torch.arange(len(places))
    joined = c.step("Concat", [c.value("self"), part], axis=axis)
    return c.emit("Gather", [joined, c.builder.constant(f"{c.node.name}.order", order)], axis=axis)


def _with_number(c: TorchCall, axis: int, places: Sequence[int], number: str) -> Any:
    """Read a tensor with one number at fixed places of one axis, as a selection."""
    mask = torch.zeros(c.tensor("self").shape[axis], dtype=torch.bool)
    mask[list(places)] = True
    mask = mask.reshape(-1, *[1] * (c.rank - axis - 1))
    return c.emit("Where", [c.builder.constant(f"{c.node.name}.places", mask), number, c.value("self")])


@reads("index_put")
def _put(c: TorchCall) -> Any:
    """Read values, or one number, that are put at constant places of one axis."""
    x, value, given = c.tensor("self"), c.tensor("values"), dict(enumerate(c.builder.arg(c.args["indices"])))
    (axis, index), *others = ((k, i) for k, i in given.items() if i is not None)
    places = c.builder.graph.weights.get(index)
    if others or places is None or places.dim() != 1 or not isinstance(x.shape[axis], int) or c.static("accumulate"):
        raise Unreadable
    chosen, part = torch.arange(x.shape[axis])[places], c.cast_to_result("values")
    if not value.shape:
        return _with_number(c, axis, chosen.tolist(), part)
    shape = (*x.shape[:axis], len(chosen), *x.shape[axis + 1 :])
    require(len(value.shape) == c.rank and all(map(c.builder.same_size, value.shape, shape)))
    return _replaced(c, axis, chosen.tolist(), part)


@reads("copy")
def _copy(c: TorchCall) -> Any:
    """Read `copy`: the values of `src` in the shape and type of `self`."""
    new, like = c.cast_to_result("src"), c.tensor("src")
    return new if like.shape == c.result.shape else _expand_to_result(c, new, like.shape)


@reads("flip")
def _flip(c: TorchCall) -> Any:
    x, shape = c.value("self"), c.tensor("self").shape
    for axis in (a % c.rank for a in c.static("dims")):
        require(isinstance(shape[axis], int))
        back = c.builder.constant(f"{c.node.name}.{axis}", torch.arange(shape[axis] - 1, -1, -1))
        x = c.step("Gather", [x, back], axis=axis)
    return x


@reads("unfold")
def _unfold(c: TorchCall) -> Any:
    """Read sliding windows along an axis, whose elements are the new last axis, as Gather and Transpose."""
    x, axis, size, step = c.tensor("self"), c.static("dimension") % c.rank, c.static("size"), c.static("step")
    require(isinstance(x.shape[axis], int))
    count = (x.shape[axis] - size) // step + 1
    index = torch.arange(count)[:, None] * step + torch.arange(size)
    y = c.step("Gather", [c.value("self"), c.builder.constant(f"{c.node.name}.index", index)], axis=axis)
    order = list(range(c.rank + 1))
    order.append(order.pop(axis + 1))
    return c.emit("Transpose", [y], perm=tuple(order))


@reads("im2col")
def _columns(c: TorchCall) -> Any:
    """Read an image as columns [N, C kh kw, patches]: what each row, then each column of a patch holds is gathered."""
    kernel, stride, padding, dilation = (c.static(k) for k in ("kernel_size", "stride", "padding", "dilation"))
    x, (_, channels, *sizes) = c.value("self"), c.tensor("self").shape
    require(c.rank == 4 and all(isinstance(s, int) for s in (channels, *sizes)))
    if any(padding):
        sizes = [s + 2 * p for s, p in zip(sizes, padding, strict=True)]
        x = c.step("Pad", [x], padding=((0, 0), (0, 0), *_pairs(padding, 2)), mode="constant", value=0.0)
    steps = list(zip(sizes, kernel, stride, dilation, strict=True))
    h, w = counts = [(s - d * (k - 1) - 1) // t + 1 for s, k, t, d in steps]
    split = (channels, h, kernel[0], w, kernel[1])
    if all(t == k and d == 1 and s == n * k for (s, k, t, d), n in zip(steps, counts, strict=True)):
        x = c.step("Reshape", [x], shape=(-1, *split))
    else:
        for k, (n, (_, size, step, apart)) in enumerate(zip(counts, steps, strict=True)):
            index = torch.arange(n)[:, None] * step + torch.arange(size) * apart
            x = c.step("Gather", [x, c.builder.constant(f"{c.node.name}.index_{k}", index)], axis=2 + 2 * k)
    x = c.step("Transpose", [x], perm=(0, 1, 3, 5, 2, 4))
    return c.emit("Reshape", [x], shape=_reshape_target(c.result.shape))


@reads("col2im")
def _image(c: TorchCall) -> Any:
    """Read columns [N, C kh kw, patches] as an image, of patches that do not overlap."""
    kernel, image = c.static("kernel_size"), c.result.shape
    plain = c.static("stride") == kernel and set(c.static("padding")) == {0} and set(c.static("dilation")) == {1}
    require(c.rank == 3 and plain and all(isinstance(s, int) for s in image[1:]))
    require(all(s % k == 0 for s, k in zip(image[2:], kernel, strict=True)))
    blocks = (s // k for s, k in zip(image[2:], kernel, strict=True))
    y = c.step("Reshape", [c.value("self")], shape=(-1, image[1], *kernel, *blocks))
    y = c.step("Transpose", [y], perm=(0, 1, 4, 2, 5, 3))
    return c.emit("Reshape", [y], shape=_reshape_target(image))


def _grid_sample(c: TorchCall, op: str) -> Any:
    require(c.tensor("input").dim() == 4)
    mode = ("bilinear", "nearest", "bicubic")[c.static("interpolation_mode")]
    padding = ("zeros", "border", "reflection")[c.static("padding_mode")]
    how = {"mode": mode, "padding_mode": padding, "align_corners": bool(c.static("align_corners"))}
    return c.emit(op, [c.value("input"), c.value("grid")], **how)


@reads(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
)
def _resize(c: TorchCall) -> Any:
    method = c.name.lstrip("_").removeprefix("upsample_").rstrip("123d")
    data = "input" if "input" in c.args else "self"
    size, scale = c.static("output_size"), c.static("scale_factors")
    given = [c.static(k) for k in c.args if k in ("scales", "scales_d", "scales_h", "scales_w")]
    if any(given):  # the size must be the one that follows from the factors
        made = [f and math.floor(s * f) for s, f in zip(c.tensor(data).shape[2:], given, strict=True)]
        require(made == list(size))
        scale = tuple(given)
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(method, method)
    settings = {
        "size": None if scale else size,
        "scale": scale or None,
        "align_corners": bool(c.static("align_corners")),
    }
    return c.emit("Resize", [c.value(data)], mode=mode, **settings)


# ---------------------------------------------------------------- bookkeeping


@reads("clone contiguous alias detach lift_fresh_copy resolve_conj resolve_neg")
def _identity(c: TorchCall) -> Any:
    return c.value("self")


@reads("dropout feature_dropout alpha_dropout native_dropout")
def _dropout(c: TorchCall) -> Any:
    c.require_only_first_result()
    p, x = c.static("p"), c.value("input" if "input" in c.args else "self")
    if p:
        return c.emit("Dropout", [x], p=float(p))
    return (x, None) if c.name == "native_dropout" else x


@reads("to _to_copy type_as")
def _to(c: TorchCall) -> Any:
    if c.tensor("self").dtype is c.result.dtype:
        return c.value("self")
    return c.emit("Cast", [c.value("self")], dtype=str(c.result.dtype).removeprefix("torch."))


#: functions of a call and its canonical operator that cells name
_READERS_OF = by_name(
    *(_remainder, _celu, _random_slope, _log_sigmoid, _log_add_exp, _reduce, _any, _instance_norm, _along_axis),
    *(_top_k, _unbind, _concat, _grid_sample),
)
read_column("torch", enter_cell, READERS)


def _divided(read: Reader) -> Reader:
    """Return the reader of average pools that may divide the sum of a window by another number than its size."""

    def read_pool(c: TorchCall) -> Any:
        divisor = c.static("divisor_override")
        if divisor is None or c.static("ceil_mode"):
            return read(c)
        words = ("kernel", "kernel_size", "spatial"), ("stride", "stride", "stride"), ("padding", "padding", "padding")
        how = {attr: _CONVERSIONS[kind](c, c.static(key)) for attr, key, kind in words}
        mean = c.step("AvgPool", [c.value("self")], **how, ceil_mode=False, count_include_pad=True)
        return c.emit("Mul", [mean, c.builder.scalar(c.node.name, math.prod(how["kernel"]) / divisor, c.result)])

    return read_pool


def _rounded(read: Reader) -> Reader:
    """Return the reader of quotients, which may be rounded."""
    return lambda c: read(c) if c.static("rounding_mode") is None else _floor_divide(c)


READERS |= {name: _divided(READERS[name]) for name in ("avg_pool2d", "avg_pool3d")}
READERS["div"] = _rounded(READERS["div"])
