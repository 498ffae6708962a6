"""Functions of TensorFlow on Keras's symbolic tensors, as Lambda layers and users' layers call them, by keras.ops."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import keras
import numpy as np
from keras import ops

from chipfit.files import package_data
from chipfit.frameworks.reading import require

_ACTIVE: ContextVar[bool] = ContextVar("active", default=False)


def _sizes(shape: Sequence[Any]) -> list[int]:
    """Return sizes as numbers; an unknown one is -1."""
    return [-1 if n is None else int(n) for n in shape]


def _reshaped(tensor: Any, shape: Sequence[Any]) -> Any:
    sizes, (batch, *inner) = [n if n is None else int(n) for n in shape], tensor.shape
    if None in sizes and -1 in sizes:  # the batch, and a size that is computed
        require(batch is None and None not in inner)
        known = math.prod(n for n in sizes if n not in (None, -1))
        sizes[sizes.index(-1)] = math.prod(inner) // known
    return ops.reshape(tensor, tuple(_sizes(sizes)))


def _axis(axis: Any) -> int:
    return -1 if axis is None else axis


def _windows(x: Any, strides: Any, dilations: Any = None) -> dict[str, Any]:
    """Return strides and dilations of the axes of space, which TensorFlow gives for some axes or for all."""

    def inner(v: Any) -> Any:
        v = [v] if isinstance(v, int) else [1] if v is None else list(v)
        require(len(v) <= 2 or v[0] == v[-1] == 1)
        return tuple(v[1:-1] if len(v) == len(x.shape) else v * (1 if len(v) > 1 else len(x.shape) - 2))

    rates = {} if dilations is None else {"dilation_rate": inner(dilations)}
    return {"strides": inner(strides), "data_format": "channels_last", **rates}


def _pooled(kind: str) -> Callable[..., Any]:
    def formula(input: Any, ksize: Any, strides: Any, padding: Any) -> Any:
        size = _windows(input, ksize)["strides"]
        return getattr(ops, kind)(input, size, padding=padding.lower(), **_windows(input, strides))

    return formula


def _convolved(function: str) -> Callable[..., Any]:
    def formula(input: Any, filters: Any, strides: Any, padding: Any, dilations: Any) -> Any:
        how = _windows(input, strides, 1 if dilations is None else dilations)
        return getattr(ops, function)(input, filters, padding=padding.lower(), **how)

    return formula


def _depthwise(input: Any, filter: Any, strides: Any, padding: Any, dilations: Any) -> Any:
    return _convolved("depthwise_conv")(input, filter, strides, padding, dilations)


def _split(value: Any, num_or_size_splits: Any, axis: int) -> Any:
    if isinstance(num_or_size_splits, int):
        return ops.split(value, num_or_size_splits, axis)
    return ops.split(value, [int(n) for n in np.cumsum(_sizes(num_or_size_splits))[:-1]], axis)


def _pad(tensor: Any, paddings: Any, mode: str, constant_values: Any) -> Any:
    constant = {"constant_values": constant_values} if mode.lower() == "constant" else {}
    return ops.pad(tensor, np.asarray(paddings).tolist(), mode.lower(), **constant)


def _one_hot(indices: Any, depth: Any, axis: Any, dtype: Any) -> Any:
    return ops.one_hot(indices, int(depth), _axis(axis), _name(dtype or "float32"))


def _sum_of_squares(x: Any, axis: Any, keepdims: bool) -> Any:
    return ops.sum(ops.square(x), axis, keepdims)


def _norm(tensor: Any, ord: Any, axis: Any, keepdims: Any) -> Any:
    require(ord in ("euclidean", 2) and isinstance(axis, int))
    return ops.sqrt(_sum_of_squares(tensor, axis, bool(keepdims)))


def _depth_to_space(input: Any, block_size: int) -> Any:
    _, h, w, c = input.shape
    parts = ops.reshape(input, (-1, h, w, block_size, block_size, c // block_size**2))
    out = (-1, h * block_size, w * block_size, c // block_size**2)
    return ops.reshape(ops.transpose(parts, (0, 1, 3, 2, 4, 5)), out)


def _space_to_depth(input: Any, block_size: int) -> Any:
    _, h, w, c = input.shape
    parts = ops.reshape(input, (-1, h // block_size, block_size, w // block_size, block_size, c))
    out = (-1, h // block_size, w // block_size, c * block_size**2)
    return ops.reshape(ops.transpose(parts, (0, 1, 3, 2, 4, 5)), out)


def _slice(input_: Any, begin: Any, size: Any) -> Any:
    both = zip(_sizes(begin), _sizes(size), strict=True)
    return input_[tuple(slice(b, None if n < 0 else b + n) for b, n in both)]


def _name(dtype: Any) -> str:
    return getattr(dtype, "name", dtype)


#: public function of TensorFlow -> formula, whose arguments have TensorFlow's names
_FORMULAS: dict[str, Callable[..., Any]] = {
    "cast": lambda x, dtype: ops.cast(x, _name(dtype)),
    "convert_to_tensor": lambda value: value,
    "einsum": lambda equation, inputs: ops.einsum(equation, *inputs),
    "gather": lambda params, indices, axis: ops.take(params, indices, axis or 0),
    "identity": lambda input: input,
    "image.resize": lambda images, size, method, antialias: ops.image.resize(
        images, tuple(_sizes(size)), method, antialias, data_format="channels_last"
    ),
    "image.rgb_to_grayscale": lambda images: ops.image.rgb_to_grayscale(images, "channels_last"),
    "linalg.matmul": lambda a, b, transpose_a, transpose_b: ops.matmul(
        ops.swapaxes(a, -1, -2) if transpose_a else a, ops.swapaxes(b, -1, -2) if transpose_b else b
    ),
    "math.add_n": lambda inputs: sum(inputs[1:], inputs[0]),
    "math.argmax": lambda input, axis: ops.argmax(input, axis or 0),
    "math.argmin": lambda input, axis: ops.argmin(input, axis or 0),
    "math.divide_no_nan": lambda x, y: ops.where(ops.equal(y, 0.0), 0.0, x / y),
    "math.l2_normalize": lambda x, axis, epsilon: x * ops.rsqrt(ops.maximum(_sum_of_squares(x, axis, True), epsilon)),
    "math.squared_difference": lambda x, y: ops.square(ops.subtract(x, y)),
    "nn.avg_pool": _pooled("average_pool"),
    "nn.avg_pool2d": _pooled("average_pool"),
    "nn.batch_normalization": lambda x, mean, variance, offset, scale, variance_epsilon: (
        (x - mean) * ops.rsqrt(variance + variance_epsilon) * (1.0 if scale is None else scale)
        + (0.0 if offset is None else offset)
    ),
    "nn.conv1d": lambda input, filters, stride, padding, dilations: _convolved("conv")(
        input, filters, stride, padding, dilations
    ),
    "nn.conv2d": _convolved("conv"),
    "nn.depth_to_space": _depth_to_space,
    "nn.depthwise_conv2d": _depthwise,
    "nn.log_softmax": lambda logits, axis: ops.log_softmax(logits, _axis(axis)),
    "nn.max_pool": _pooled("max_pool"),
    "nn.max_pool2d": _pooled("max_pool"),
    "nn.silu": lambda features, beta: features * ops.sigmoid(features if beta == 1.0 else beta * features),
    "nn.softmax": lambda logits, axis: ops.softmax(logits, _axis(axis)),
    "nn.space_to_depth": _space_to_depth,
    "norm": _norm,
    "one_hot": _one_hot,
    "pad": _pad,
    "rank": lambda input: len(input.shape),
    "reshape": _reshaped,
    "shape": lambda input: np.array(input.shape, object),  # calculations with None raise errors
    "slice": _slice,
    "split": _split,
    "stop_gradient": lambda input: input,
}


def _computed(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of TensorFlow.

    Raises:
        Unreadable: It has no formula, or one without an argument that is given.
    """
    plain = inspect.unwrap(op)
    names = {*getattr(op, "_tf_api_names", ()), *getattr(plain, "_tf_api_names", ())}
    known = [_formulas()[name] for name in names if name in _formulas()]
    require(known)
    f, behind = known[0]
    signature = inspect.signature(plain)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = {k: v for k, v in bound.arguments.items() if k != "name"}
    used = (
        [k for k in given if k in inspect.signature(f).parameters] if behind is None else [next(iter(given)), *behind]
    )
    require(all(k in used or v is signature.parameters[k].default or not v for k, v in given.items()))
    return f(*(given[k] for k in used))


@cache
def _formulas() -> dict[str, tuple[Callable[..., Any], list[str] | None]]:
    """Return public name -> function, and the arguments behind the first that it takes; None for those by name."""
    out: dict[str, tuple[Callable[..., Any], list[str] | None]] = {k: (f, None) for k, f in _FORMULAS.items()}
    for word in package_data("chipfit.frameworks.keras", "tensorflow.yaml")["functions"].split():
        name, _, keras_name, arguments = re.fullmatch(r"([\w.]+)(=(\w+))?(?:\((.*)\))?", word).groups("")  # type: ignore[union-attr]
        function = getattr(ops, keras_name or name.rpartition(".")[2])
        out[name] = function, [a for a in arguments.split(",") if a]
    return out


#: arguments of functions that have a default other than None, False, or that of the function of Keras
_DEFAULTS: dict[str, dict[str, Any]] = {
    "image.resize": {"method": "bilinear", "antialias": False},
    "math.cumsum": {"axis": 0},
    "math.l2_normalize": {"epsilon": 1e-12},
    "math.top_k": {"k": 1},
    "nn.gelu": {"approximate": False},
    "nn.silu": {"beta": 1.0},
    "norm": {"ord": "euclidean"},
    "pad": {"mode": "CONSTANT", "constant_values": 0},
    "split": {"axis": 0},
}
#: names of operators of Python -> those of functions
_OPERATORS = {"eq": "equal", "ne": "not_equal"}


def name_of_formula(function: str) -> str:
    """Return the name under which a function, or an older name of it, has a formula; "" if it has none.

    >>> name_of_formula("compat.v1.transpose"), name_of_formula("__operators__.add"), name_of_formula("io.read_file")
    ('transpose', 'math.add', '')
    """
    plain = function.removeprefix("compat.v1.").removeprefix("__operators__.")
    last = plain.rpartition(".")[2]
    names = (plain, *(f"{home}{_OPERATORS.get(last, last)}" for home in ("math.", "nn.", "linalg.", "")))
    return next((name for name in names if name in _formulas()), "")


def by_name(function: str, first: Any, options: dict[str, Any]) -> Any:
    """Return the result of a function of TensorFlow on its first argument, with others by name.

    Raises:
        Unreadable: It has no formula, or one without an argument that is given.
    """
    name = name_of_formula(function)
    require(name, f"tf.{function} has no formula")
    f, behind = _formulas()[name]
    own = [*inspect.signature(f).parameters]
    theirs = own[1:] if behind is None else behind
    given = _DEFAULTS.get(name, {}) | {k: v for k, v in options.items() if k not in ("name", "output_type")}
    unknown = [k for k, v in given.items() if k not in theirs and v and v not in ("NHWC", "NWC")]
    require(not unknown, f"tf.{function} with {', '.join(unknown)} has no formula")
    named = {ours: given[k] for k, ours in zip(theirs, own[1:], strict=False) if k in given}
    return f(first, **(named if behind is not None else dict.fromkeys(own[1:]) | named))


@cache
def _register() -> None:
    """Let TensorFlow call us for symbolic tensors, which it refuses otherwise."""
    import tensorflow as tf

    class Dispatcher(tf.__internal__.dispatch.GlobalOpDispatcher):  # type: ignore[misc,name-defined]
        def handle(self, op: Any, args: Any, kwargs: Any) -> Any:
            if not _ACTIVE.get():
                return self.NOT_SUPPORTED
            try:
                return _computed(op, args, kwargs)
            except Exception:  # of keras.ops, for arguments that it does not take; TensorFlow raises its own then
                return self.NOT_SUPPORTED

    Dispatcher().register()


@contextmanager
def functions_on_symbols() -> Iterator[None]:
    """Let functions of TensorFlow take symbolic tensors inside the block, where Keras runs on TensorFlow."""
    if keras.backend.backend() == "tensorflow":
        _register()
    token = _ACTIVE.set(True)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
