"""Operations and layers of Keras without a reader, by simpler ones: what they compute, in keras.ops.

A formula receives the operation, whose settings it reads, and the arguments of the call. It is traced on symbolic
tensors, whose sizes other than the batch are known; an error in it leaves the operation to the next way of reading.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from chipfit.frameworks.reading import require
from chipfit.graph.einsum import letters_of

Formula = Callable[..., Any]


def _axes(axis: Any, x: Any) -> tuple[int, ...]:
    rank = len(x.shape)
    return tuple(range(rank)) if axis is None else tuple(a % rank for a in ((axis,) if isinstance(axis, int) else axis))


def _mean_and_variance(x: Any, axes: tuple[int, ...], keepdims: bool) -> list[Any]:
    """Return the mean and mean((x - mean)^2)."""
    mean = ops.mean(x, axes, keepdims=True)
    away = x - mean
    return [mean if keepdims else ops.squeeze(mean, axes), ops.mean(away * away, axes, keepdims=keepdims)]


def _var(o: Any, x: Any) -> Any:
    return _mean_and_variance(x, _axes(o.axis, x), o.keepdims)[1]


def _log_sum_exp(o: Any, x: Any) -> Any:
    """m + log(sum(exp(x - m))), m being the maximum"""
    axes = _axes(o.axis, x)
    top = ops.max(x, axes, keepdims=True)
    logs = ops.log(ops.sum(ops.exp(x - top), axes, keepdims=True))
    return logs + top if o.keepdims else ops.squeeze(logs + top, axes)


def _reduced(o: Any, x: Any, function: Callable[..., Any]) -> Any:
    """Return the greatest or least of ones and zeros, where conditions hold and where not."""
    return function(ops.cast(x, "float32"), _axes(o.axis, x), keepdims=o.keepdims)


def _triangle(o: Any, x: Any, function: Callable[..., Any]) -> Any:
    """x where a constant matrix of ones and zeros holds"""
    kept = function(np.ones(x.shape[-2:], bool), o.k)
    return ops.where(kept, x, 0.0)


def _shrink_hard(o: Any, x: Any) -> Any:
    return ops.where(ops.abs(x) > o.threshold, x, 0.0)


def _shrink_soft(o: Any, x: Any) -> Any:
    """relu(x - t) - relu(-x - t)"""
    return ops.relu(x - o.threshold) - ops.relu(-x - o.threshold)


def _relu_from(o: Any, x: Any) -> Any:
    """clip(x where x > threshold else 0, 0, max_value) - negative_slope relu(threshold - x)"""
    require(bool(o.threshold))  # without a threshold, it is an operator
    y = ops.where(x > o.threshold, x, 0.0)
    y = y if o.max_value is None else ops.clip(y, 0.0, o.max_value)
    return y - ops.relu(o.threshold - x) * o.negative_slope if o.negative_slope else y


def _celu(o: Any, x: Any) -> Any:
    """max(x, 0) + alpha (exp(min(x, 0) / alpha) - 1)"""
    return ops.maximum(x, 0.0) + o.alpha * (ops.exp(ops.minimum(x, 0.0) / o.alpha) - 1.0)


def _sparse_plus(o: Any, x: Any) -> Any:
    """0 below -1, x above 1, (x + 1)^2 / 4 between"""
    inner = ops.clip(x, -1.0, 1.0) + 1.0
    return 0.25 * inner * inner + ops.relu(x - 1.0)


def _glu(o: Any, x: Any) -> Any:
    a, b = ops.split(x, 2, o.axis)
    return a * ops.sigmoid(b)


def _log_of_sum(o: Any, a: Any, b: Any) -> Any:
    top = ops.maximum(a, b)
    return top + ops.log(ops.exp(ops.subtract(a, top)) + ops.exp(ops.subtract(b, top)))


def _filled(value: float) -> Formula:
    """Return the formula of a constant that is repeated for each sample."""

    def formula(o: Any, x: Any, dtype: Any = None) -> Any:
        one = np.full((1, *x.shape[1:]), value, dtype or o.dtype or x.dtype)
        return ops.broadcast_to(one, x.shape)

    return formula


def _time_distributed(o: Any, x: Any) -> Any:
    """the layer on all steps of all samples at once, [N, T, ...] as [N T, ...]"""
    steps, *sizes = x.shape[1:]
    y = o.layer(ops.reshape(x, (-1, *sizes)))
    return ops.reshape(y, (-1, steps, *y.shape[1:]))


def _unrolled(o: Any, x: Any) -> Any:
    """the cell of a recurrent layer, called for one step after the other from states of zeros"""
    sizes = o.cell.state_size if isinstance(o.cell.state_size, (list, tuple)) else [o.cell.state_size]
    steps = range(x.shape[1] or _MOST_STEPS + 1)
    if len(steps) > _MOST_STEPS or not all(isinstance(n, int) for n in sizes):
        raise NotImplementedError
    of_images = len(x.shape) > 3
    shapes = [s.shape for s in o.cell.get_initial_state(1)] if of_images else [(1, n) for n in sizes]
    one_each = x[(slice(None), 0, *[slice(1)] * (len(x.shape) - 2))]
    states = [ops.zeros_like(one_each) + np.zeros(shape, "float32") for shape in shapes]
    made = []
    for t in reversed(steps) if o.go_backwards else steps:
        y, states = o.cell(x[:, t], states)
        made.append(y)
    result = ops.stack(made, 1) if o.return_sequences else made[-1]
    return [result, *states] if o.return_state else result


def _patches(o: Any, x: Any) -> Any:
    """[N, H, W, C] as [N, rows, columns, kh kw C]: what each row, then each column of a patch holds is gathered"""
    sizes, kernel = x.shape[1:3], o.size
    if len(kernel) != 2 or len(x.shape) != 4 or o.data_format != "channels_last":
        raise NotImplementedError
    strides, apart = ((v, v) if isinstance(v, int) else tuple(v) for v in (o.strides, o.dilation_rate))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, apart, strict=True)]
    if o.padding == "same":
        total = [max((-(-s // t) - 1) * t + k - s, 0) for s, t, k in zip(sizes, strides, spans, strict=True)]
        x = ops.pad(x, ((0, 0), *((t // 2, t - t // 2) for t in total), (0, 0))) if any(total) else x
        sizes = x.shape[1:3]
    h, w = counts = [(s - k) // t + 1 for s, t, k in zip(sizes, strides, spans, strict=True)]
    split = (h, kernel[0], w, kernel[1], x.shape[-1])
    if strides == tuple(kernel) and all(s == n * k for s, n, k in zip(sizes, counts, kernel, strict=True)):
        x = ops.reshape(x, (-1, *split))
    else:
        for axis, n, k, t, d in zip((1, 3), counts, kernel, strides, apart, strict=True):
            x = ops.take(x, np.arange(n)[:, None] * t + np.arange(k) * d, axis=axis)
    return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, h, w, kernel[0] * kernel[1] * x.shape[-1]))


def _adaptive(pool: Callable[..., Any], reduce: Callable[..., Any]) -> Formula:
    """Return the formula of a pool of as many windows as the layer says: from floor(k n / m) to ceil((k + 1) n / m)."""

    def formula(o: Any, x: Any) -> Any:
        first = 1 if o.data_format == "channels_last" else 2
        places = [*enumerate(zip(x.shape[first:], o.output_size, strict=False), first)]
        if all(m == 1 for _, (_, m) in places):
            return reduce(x, tuple(axis for axis, _ in places), keepdims=True)
        if not any(n % m for _, (n, m) in places):
            kernel = tuple(n // m for _, (n, m) in places)
            return pool(x, kernel, kernel, data_format=o.data_format)
        for axis, (n, m) in places:
            ends = [(k * n // m, -(-(k + 1) * n // m)) for k in range(m)]
            windows = [x[(*[slice(None)] * axis, slice(*end))] for end in ends]
            x = ops.concatenate([reduce(w, axis, keepdims=True) for w in windows], axis)
        return x

    return formula


def _stft(o: Any, x: Any) -> Any:
    """the real and imaginary parts of each frame's spectrum, by one convolution with the windowed sines and cosines"""
    outer, size, bins = x.shape[1:-1], o.fft_length, o.fft_length // 2 + 1
    window: Any = np.ones(o.sequence_length) if o.window is None else o.window
    if isinstance(window, str):
        a = {"hann": 0.5, "hamming": 0.54}[window]
        window = a - (1 - a) * np.cos(2 * np.pi * np.arange(o.sequence_length) / o.sequence_length)
    before = (size - o.sequence_length) // 2
    window = np.pad(np.asarray(window), (before, size - o.sequence_length - before))
    angles = 2 * np.pi * np.outer(np.arange(size), np.arange(bins)) / size
    kernel = np.concatenate([np.cos(angles), -np.sin(angles)], 1) * window[:, None]
    x = ops.reshape(x, (-1, math.prod(outer), x.shape[-1], 1))
    x = ops.pad(x, ((0, 0), (0, 0), (size // 2, size // 2), (0, 0)), "reflect") if o.center else x
    y = ops.conv(x, kernel[None, :, None].astype("float32"), (1, o.sequence_stride), "valid")
    return ops.split(ops.reshape(y, (-1, *outer, *y.shape[2:])), 2, -1)


def _contracted(a: Any, b: Any, of_a: Sequence[int], of_b: Sequence[int]) -> Any:
    """Return the sum of products over pairs of axes, as an einsum."""
    a_letters, free = [chr(97 + k) for k in range(len(a.shape))], iter("ABCDEFGHIJ")
    pairs = {k % len(b.shape): a_letters[i] for i, k in zip(of_a, of_b, strict=True)}
    b_letters = [pairs.get(k) or next(free) for k in range(len(b.shape))]
    kept = [c for c in [*a_letters, *b_letters] if c not in pairs.values()]
    return _einsum_of(a, b, "".join(a_letters), "".join(b_letters), "".join(kept))


def _tensordot(o: Any, a: Any, b: Any) -> Any:
    rank = len(a.shape)
    n = o.axes if isinstance(o.axes, int) else None
    of_a, of_b = o.axes if n is None else (range(rank - n, rank), range(n))
    of_a, of_b = ([k] if isinstance(k, int) else list(k) for k in (of_a, of_b))
    return _contracted(a, b, of_a, of_b)


def _einsum_of(a: Any, b: Any, left: str, right: str, result: str) -> Any:
    """Return an einsum of two operands as one matrix product."""
    batch, summed, first, second = letters_of(left, right, result)
    if len({*left}) < len(left) or len({*right}) < len(right) or sorted(result) != sorted([*batch, *first, *second]):
        raise NotImplementedError
    size = {c: -1 if n is None else n for c, n in zip(left + right, (*a.shape, *b.shape), strict=True)}
    rows = [first] if batch else [[c] for c in first]  # the batch keeps an axis of its own
    x, y = _with_axes(a, left, size, batch, *rows, summed), _with_axes(b, right, size, batch, summed, second)
    product = ops.matmul(x, y) if summed else ops.multiply(x, y)
    made = [*batch, *first, *second]
    return _transposed(ops.reshape(product, [size[c] for c in made]), [made.index(c) for c in result])


def _with_axes(x: Any, names: str, size: Mapping[str, int], *groups: Sequence[str]) -> Any:
    """Return a tensor with one axis for each letter of the first group, and one for each further group."""
    ordered = _transposed(x, [names.index(c) for group in groups for c in group])
    wide = [-1 if any(size[c] < 0 for c in group) else math.prod(size[c] for c in group) for group in groups[1:]]
    return ops.reshape(ordered, [*(size[c] for c in groups[0]), *wide])


def _transposed(x: Any, perm: Sequence[int]) -> Any:
    return x if [*perm] == sorted(perm) else ops.transpose(x, perm)


def _einsum(o: Any, a: Any, b: Any) -> Any:
    ins, _, result = o.subscripts.replace(" ", "").partition("->")
    left, _, right = ins.partition(",")
    return _einsum_of(a, b, left, right, result)


def _average(o: Any, x: Any, weights: Any = None) -> Any:
    """sum(x w) / sum(w)"""
    if weights is None:
        return ops.mean(x, o.axis)
    w = np.asarray(ops.convert_to_numpy(weights))
    (axis,) = _axes(o.axis, x)
    return ops.sum(x * np.reshape(w / w.sum(), (-1, *[1] * (len(x.shape) - 1 - axis))).astype(x.dtype), axis)


def _select(o: Any, conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Any:
    """the choice of the first condition that holds"""
    y = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        y = ops.where(condition, choice, y)
    return y


def _split(o: Any, x: Any) -> Any:
    """parts along an axis, of which the first ones have one element more where it does not divide"""
    n, parts = x.shape[o.axis], o.indices_or_sections
    return ops.split(x, [k * (n // parts) + min(k, n % parts) for k in range(1, parts)], o.axis)


def _rotated(o: Any, x: Any) -> Any:
    """quarter turns from the first towards the second of two axes"""
    first, second = (a % len(x.shape) for a in o.axes)
    turns = o.k % 4
    if turns == 2:
        return ops.flip(ops.flip(x, first), second)
    x = ops.flip(x, second) if turns == 1 else x
    x = ops.swapaxes(x, first, second) if turns else x
    return ops.flip(x, second) if turns == 3 else x


def _differences(o: Any, x: Any) -> Any:
    for _ in range(o.n):
        ends = [(*[slice(None)] * (o.axis % len(x.shape)), k) for k in (slice(1, None), slice(None, -1))]
        x = x[ends[0]] - x[ends[1]]
    return x


def _diagonal(o: Any, x: Any) -> Any:
    """the elements whose numbers in two axes differ by the offset, along a last axis"""
    x = ops.moveaxis(x, (o.axis1, o.axis2), (-2, -1))
    n, m = x.shape[-2:]
    places = [k * m + k + o.offset for k in range(n) if 0 <= k + o.offset < m]
    return ops.take(ops.reshape(x, (-1, *x.shape[1:-2], n * m)), np.array(places), -1)


def _cropped(o: Any, x: Any) -> Any:
    """a part of images: what is not given on one side follows from the size of the result"""
    first = 1 if o.data_format == "channels_last" else len(x.shape) - 2
    given = (o.top_cropping, o.bottom_cropping, o.target_height), (o.left_cropping, o.right_cropping, o.target_width)
    part: list[Any] = [slice(None)] * first
    for size, (before, after, want) in zip(x.shape[first:], given, strict=False):
        start = size - after - want if before is None else before
        part.append(slice(start, start + want if want is not None else size - after))
    return x[tuple(part)]


def _gray(o: Any, x: Any) -> Any:
    """the weighted sum of red, green and blue"""
    weights = np.array([0.2989, 0.587, 0.114], x.dtype)
    if o.data_format == "channels_last":
        return ops.matmul(x, weights[:, None])
    return ops.sum(x * weights[:, None, None], -3, keepdims=True)


def _normalized(o: Any, x: Any, mean: Any, variance: Any, offset: Any = None, scale: Any = None) -> Any:
    """(x - mean) scale / sqrt(variance + epsilon) + offset"""

    def along(v: Any) -> Any:
        rank = len(x.shape)
        return np.reshape(ops.convert_to_numpy(v), [-1 if a == o.axis % rank else 1 for a in range(rank)])

    y = (x - along(mean)) * ((1.0 if scale is None else along(scale)) / np.sqrt(along(variance) + o.epsilon))
    return y if offset is None else y + along(offset)


def _number(o: Any, x: Any) -> Any:
    """NaN and infinities by numbers"""
    most = float(np.finfo(x.dtype).max)
    x = ops.where(ops.equal(x, x), x, float(o.nan))
    x = ops.where(x > most, most if o.posinf is None else float(o.posinf), x)
    return ops.where(x < -most, -most if o.neginf is None else float(o.neginf), x)


def _median(o: Any, x: Any) -> Any:
    """the mean of the last one or two of the n // 2 + 1 largest of n"""
    (axis,) = _axes(o.axis, x)
    size = x.shape[axis]
    largest, _ = ops.top_k(ops.moveaxis(x, axis, -1), size // 2 + 1)
    middle = ops.split(largest, [size // 2 - (1 - size % 2)], -1)[1] if size > 2 else largest
    middle = ops.mean(middle, -1, keepdims=True) if size % 2 == 0 else middle
    return ops.moveaxis(middle, -1, axis) if o.keepdims else ops.squeeze(middle, -1)


def _resized(o: Any, x: Any) -> Any:
    """x times the matrix of the interpolation along each axis of space, which Keras computes from unit images"""
    require(not (getattr(o, "crop_to_aspect_ratio", False) or getattr(o, "pad_to_aspect_ratio", False)))
    require(o.data_format in (None, "channels_last") and len(x.shape) == 4 and None not in x.shape[1:])
    sizes = [o.height, o.width] if hasattr(o, "height") else list(o.size)
    if type(o).__name__ == "UpSampling2D":
        sizes = [n * by for n, by in zip(x.shape[1:3], sizes, strict=True)]
    how = {
        "interpolation": o.interpolation,
        "antialias": getattr(o, "antialias", False),
        "data_format": "channels_last",
    }
    for axis, size in enumerate(map(int, sizes), 1):
        units = np.eye(x.shape[axis], dtype="float32")[None, :, None]
        matrix = ops.convert_to_numpy(ops.image.resize(units, (size, 1), **how))[0, :, 0]
        x = ops.swapaxes(ops.matmul(ops.swapaxes(x, axis, 3), matrix.T), axis, 3)
    return x


#: steps of a recurrent layer that are written out
_MOST_STEPS = 256

#: class of an operation -> its formula
FORMULAS: Mapping[str, Formula] = {
    "Softsign": lambda o, x: x / (ops.abs(x) + 1.0),
    "TanhShrink": lambda o, x: x - ops.tanh(x),
    "SoftShrink": _shrink_soft,
    "HardShrink": _shrink_hard,
    "LogSigmoid": lambda o, x: -ops.softplus(-x),
    "Celu": _celu,
    "SparsePlus": _sparse_plus,
    "Squareplus": lambda o, x: (x + ops.sqrt(x * x + float(o.b))) / 2.0,
    "SparseSigmoid": lambda o, x: ops.clip(0.5 * (x + 1.0), 0.0, 1.0),
    "Threshold": lambda o, x: ops.where(x > o.threshold, x, float(o.default_value)),
    "Glu": _glu,
    "Any": lambda o, x: _reduced(o, x, ops.max) > 0.5,
    "All": lambda o, x: _reduced(o, x, ops.min) > 0.5,
    "ReLU": _relu_from,
    "Var": _var,
    "Std": lambda o, x: ops.sqrt(_var(o, x)),
    "Logsumexp": _log_sum_exp,
    "Logaddexp": _log_of_sum,
    "Tril": lambda o, x: _triangle(o, x, np.tril),
    "Triu": lambda o, x: _triangle(o, x, np.triu),
    "ZerosLike": _filled(0.0),
    "OnesLike": _filled(1.0),
    "Log1p": lambda o, x: ops.log(x + 1.0),
    "Expm1": lambda o, x: ops.exp(x) - 1.0,
    "Log2": lambda o, x: ops.log(x) * (1.0 / math.log(2.0)),
    "Log10": lambda o, x: ops.log(x) * (1.0 / math.log(10.0)),
    "Exp2": lambda o, x: ops.exp(x * math.log(2.0)),
    "Hypot": lambda o, a, b: ops.sqrt(a * a + b * b),
    "TimeDistributed": _time_distributed,
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN", "RNN", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"), _unrolled),
    "ExtractPatches": _patches,
    "STFT": _stft,
    "Tensordot": _tensordot,
    "Einsum": _einsum,
    "Dot": lambda o, a, b: _contracted(a, b, [-1 % len(a.shape)], [max(len(b.shape) - 2, 0)]),
    "Inner": lambda o, a, b: _contracted(a, b, [-1 % len(a.shape)], [-1]),
    "Average": _average,
    "Moments": lambda o, x: _mean_and_variance(x, _axes(o.axes, x), o.keepdims),
    "Select": _select,
    "Hstack": lambda o, xs: ops.concatenate(xs, 1 if len(xs[0].shape) > 1 else 0),
    "ArraySplit": _split,
    "Rot90": _rotated,
    "Diff": _differences,
    "Diagonal": _diagonal,
    "Trace": lambda o, x: ops.sum(_diagonal(o, x), -1),
    "CropImages": _cropped,
    **dict.fromkeys(("Resize", "Resizing", "UpSampling2D"), _resized),
    "RGBToGrayscale": _gray,
    "BatchNorm": _normalized,
    "SeparableConv": lambda o, x, depthwise, pointwise: ops.conv(
        ops.depthwise_conv(x, depthwise, o.strides, o.padding, o.data_format, o.dilation_rate),
        pointwise,
        data_format=o.data_format,
    ),
    "Trunc": lambda o, x: ops.sign(x) * ops.floor(ops.abs(x)),
    "Cbrt": lambda o, x: ops.sign(x) * ops.power(ops.abs(x), 1 / 3),
    "Isnan": lambda o, x: ops.not_equal(x, x),
    "Isfinite": lambda o, x: ops.abs(x) <= float(np.finfo(x.dtype).max),
    "NanToNum": _number,
    "LogicalXor": lambda o, a, b: ops.not_equal(a, b),
    # for these, keras.ops.adaptive_average_pool and adaptive_max_pool infer a wrong shape on symbolic tensors
    **{f"AdaptiveAveragePooling{k}D": _adaptive(ops.average_pool, ops.mean) for k in (1, 2, 3)},
    **{f"AdaptiveMaxPooling{k}D": _adaptive(ops.max_pool, ops.max) for k in (1, 2, 3)},
    "Median": _median,
    "Ptp": lambda o, x: ops.max(x, o.axis, keepdims=o.keepdims) - ops.min(x, o.axis, keepdims=o.keepdims),
}
