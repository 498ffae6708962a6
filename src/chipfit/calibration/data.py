"""Calibration data in any usual form, as flat lists of tensors."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chipfit.calibration.input_errors import LABELS, expected_inputs, wrong_layout
from chipfit.engine.trees import flatten_inputs
from chipfit.engine.types import dtype_of
from chipfit.errors import DataError
from chipfit.graph.ir import Graph

#: rows per batch when one big array is given
ROWS = 16
_SIZES = (
    "sizes stay open in which calibration batches differ, or `example=` does, and that are read again, as from a list"
)


class OtherSize(DataError):
    """A shape that does not fit; `batch` is all of it where it fits but for a size."""

    batch: Any = None


def iterate(data: Any) -> Iterator[Any]:
    """The batches of `data`: a callable is called, one big array is cut, any iterable is walked.

    Raises:
        DataError: not data at all.
    """
    if callable(data) and not isinstance(data, (Iterable, torch.nn.Module)):
        data = _called(data)
    if isinstance(data, (np.ndarray, torch.Tensor)):
        data = _tensors(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable):
        return (data[k] for k in range(len(data)))  # a keras.utils.PyDataset
    if isinstance(data, torch.Tensor):
        if data.dim() == 0:
            raise DataError("Calibration data is a single number", got=str(data), allowed="batches of inputs")
        return iter(torch.split(data, ROWS))
    if isinstance(data, (str, bytes, Mapping, torch.nn.Module)) or not isinstance(data, Iterable):
        raise DataError(
            "This is not calibration data",
            got=type(data).__name__,
            allowed="an iterable of batches (tensors, tuples, dicts), an array with the batch on axis 0, "
            "or a callable that returns one",
            hint="wrap a single batch in a list: [batch]",
        )
    return iter(data)


def _called(function: Callable[..., Any]) -> Any:
    """What a function without arguments returns."""
    try:
        try:
            inspect.signature(function).bind()
        except ValueError:  # C functions tell no signature, and refuse when they are called
            return function()
    except TypeError as e:
        got = f"{getattr(function, '__name__', type(function).__name__)}: {e}"
        allowed = "a function that is called without"
        raise DataError("The function that gives calibration data needs arguments", got=got, allowed=allowed) from None
    return function()


def no_data() -> DataError:
    """The refusal of data without a single batch."""
    hint = "give at least one batch; a generator can be used up only once"
    return DataError("The calibration data are empty", hint=hint)


def first_batch(data: Any, model: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Example arguments for the capture from the first batch, and the data with that batch still in it.

    Raises:
        DataError: the data are empty.
    """
    rest = iterate(data)
    for first in rest:
        args, kwargs = example_of(first, model)
        if not _none([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]):
            return args, kwargs, itertools.chain([first], rest)
    raise no_data()


def _none(batch: Sequence[torch.Tensor]) -> bool:
    """Whether a batch is one of no samples."""
    return bool(batch) and batch[0].shape[:1] == (0,)


def example_of(batch: Any, model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for the capture: at most two rows of a batch, for it learns shapes, not values; labels are left out."""
    args, kwargs = as_call(batch, model)
    if len(args) > 1 and isinstance(args[0], torch.Tensor):
        count = expected_inputs(model)
        if count == len(args) - 1 or ((count is None or len(args) <= count) and _is_label(args[-1])):
            args = args[:-1]  # (input, label), as a DataLoader yields it
    from torch.utils._pytree import tree_map

    def small(x: Any) -> Any:
        return x[:2] if isinstance(x, torch.Tensor) and x.dim() else x

    return tree_map(small, args), tree_map(small, kwargs)


def _is_label(x: Any) -> bool:
    return isinstance(x, (int, list)) or (isinstance(x, torch.Tensor) and not x.is_floating_point() and x.dim() <= 1)


def _tensors(x: Any) -> Any:
    if hasattr(x, "__array__") and not isinstance(x, (torch.Tensor, np.ndarray, np.generic)):
        x = np.array(x)  # of TensorFlow or JAX
    if isinstance(x, np.ndarray):
        return _tensor(x)
    if isinstance(x, torch.Tensor) and (x.layout is not torch.strided or x.is_nested or x.is_meta or x.is_quantized):
        kind = "nested" if x.is_nested else "meta" if x.is_meta else "quantized" if x.is_quantized else str(x.layout)
        allowed = "dense tensors that hold values"
        raise DataError("Calibration data hold a tensor without plain numbers", got=kind, allowed=allowed)
    if isinstance(x, Mapping):
        return {k: _tensors(v) for k, v in x.items()}
    if isinstance(x, (tuple, list)) and not (isinstance(x, list) and x and isinstance(x[0], (int, float))):
        return type(x)(_tensors(v) for v in x) if type(x) in (tuple, list) else tuple(_tensors(v) for v in x)
    return x


def _tensor(x: np.ndarray) -> torch.Tensor:
    """An array as a tensor, whatever its strides and byte order; float64 is NumPy's default, not somebody's choice."""
    try:
        x = x.astype(np.float32 if x.dtype == np.float64 else x.dtype.newbyteorder("="), order="C", copy=False)
        return torch.from_numpy(x)
    except TypeError:
        got = f"{x.dtype}{list(x.shape)}"
        allowed = "arrays of floats, integers or booleans, all rows equally long"
        what = "Calibration data hold an array of something else than numbers that a model computes with"
        raise DataError(what, got=got, allowed=allowed) from None


def as_call(batch: Any, model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a call: a dict whose keys are the model's argument names is keyword arguments."""
    args, kwargs = _call(batch)
    if kwargs and hasattr(model, "forward"):
        taken = inspect.signature(model.forward).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            if not set(kwargs) & set(taken):
                return (kwargs,), {}
            kwargs = {k: v for k, v in kwargs.items() if k in taken}  # labels and the like stay out
    return args, kwargs


def as_tensors(batch: Any) -> Any:
    """A batch with tensors in place of arrays.

    Raises:
        DataError: arrays or tensors without plain numbers; a batch that contains itself.
    """
    try:
        return _tensors(batch)
    except RecursionError:
        raise DataError("A batch contains itself", got=type(batch).__name__) from None


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = as_tensors(batch)
    if isinstance(batch, Mapping):
        if any(not isinstance(k, str) for k in batch):
            raise DataError("The inputs of a batch have names", got=str(list(batch)[:8]), allowed="text as keys")
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def divisible(graph: Graph, batch: Sequence[torch.Tensor]) -> int:
    """How many samples inputs of the graph have, where parts of them may be taken; 0 where they do not agree on it."""
    sizes = {len(x) if x.dim() else 0 for x in batch}
    fixed = any(graph.shape(i)[:1] != (None,) for i in graph.inputs)
    return 0 if fixed or len(sizes) != 1 else sizes.pop()


def split_label(batch: Any, graph: Graph) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """One batch as (tensors in the graph's input order, labels or None).

    Raises:
        DataError: the batch does not fit the captured call; says what was expected.
    """
    import json

    spec = json.loads(graph.in_spec)
    args, kwargs = _call(batch)
    label, named = None, bool(kwargs)
    if kwargs and not spec["kwargs"] and spec["args"] == 1:
        args, kwargs = (dict(kwargs),), {}  # the model takes one dict
    elif kwargs and spec["kwargs"] and set(kwargs) != set(spec["kwargs"]):
        label = next((kwargs[k] for k in ("labels", "label", "y") if k in kwargs and k not in spec["kwargs"]), None)
        kwargs = {k: v for k, v in kwargs.items() if k in spec["kwargs"]}
    if len(args) == spec["args"] + 1:
        *rest, label = args
        args = tuple(rest)
    if len(args) > spec["args"] > 0:
        raise DataError(f"A batch holds {len(args)} items, and the model takes {spec['args']}", hint=LABELS)
    try:
        flat = flatten_inputs(graph, args, kwargs)
    except DataError as e:
        hint = "yield tensors or tuples in the order of the inputs" if named else ""
        raise DataError(e.what, got=e.got, allowed=e.allowed, hint=hint or e.hint) from None
    out = [_fit(graph, name, x, batch) for name, x in zip(graph.inputs, flat, strict=True)]
    rows = {name: len(x) for name, x in zip(graph.inputs, out, strict=True) if graph.values[name].shape[:1] == (None,)}
    if len(set(rows.values())) > 1:
        got = ", ".join(f"'{name}' {n}" for name, n in rows.items())
        allowed = "the same on axis 0"
        raise DataError("The inputs of a batch have different numbers of samples", got=got, allowed=allowed)
    return out, None if label is None else _classes(label)


def _classes(label: Any) -> torch.Tensor:
    """Labels as tensors; one-hot ones, [N, classes], as numbers of classes."""
    try:
        label = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError):  # texts, objects, rows that are not equally long
        raise DataError("The labels are no numbers", got=repr(label)[:120], allowed="numbers of classes") from None
    return label.argmax(1) if label.is_floating_point() and label.dim() == 2 and label.shape[1] > 1 else label


def _fit(graph: Graph, name: str, x: Any, batch: Any) -> torch.Tensor:
    want = graph.values[name]
    if not isinstance(x, torch.Tensor):
        got = type(x).__name__
        raise DataError(f"Input '{name}' is not a tensor", got=got, allowed=f"{want.dtype} {list(want.shape)}")
    kinds = "floats", "complex numbers", "integers"
    floats, kind = "float" in want.dtype, kinds[0 if x.is_floating_point() else 1 if x.is_complex() else 2]
    if kind != (kinds[0] if floats else kinds[2]):
        hint = "convert and scale it as in training, for example x.float() / 255" if floats else "x.long() converts"
        what = f"Input '{name}' holds {kind}, the model was captured with {kinds[0] if floats else kinds[2]}"
        raise DataError(what, got=str(x.dtype).removeprefix("torch."), allowed=want.dtype, hint=hint)
    if x.dtype != dtype_of(want.dtype):
        x = _as(want.dtype, name, x)
    if len(x.shape) != len(want.shape) or any(w not in (None, s) for w, s in zip(want.shape, x.shape, strict=False)):
        sizes = [d or ("any" if k else "batch") for k, d in enumerate(want.shape)]
        empty = "an axis of size 0 holds nothing: leave such batches out" if 0 in (*x.shape, *want.shape) else ""
        hint = empty or wrong_layout(tuple(x.shape), want.shape)
        what, got = f"Input '{name}' has the wrong shape", str(list(x.shape))
        error = OtherSize(what, got=got, allowed=str(sizes), hint=hint or _SIZES)
        error.batch = None if hint or len(x.shape) != len(want.shape) else batch
        raise error
    return x.detach()


def _as(dtype: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """An input in the type with which the model was captured."""
    out = x.to(dtype_of(dtype))
    if x.is_floating_point():
        lost = x.isfinite() & ~out.isfinite()
    else:  # in 64 bits, where an integer without a sign is too large if it comes out below zero
        whole = x.long()
        lost = (out.long() != whole) | (whole < 0 if not x.dtype.is_signed else False)
    if bool(lost.any()):
        got = str(x[lost].flatten()[0].item())
        raise DataError(f"Input '{name}' holds numbers that {dtype} does not, as which it is read", got=got)
    return out


class batches:  # noqa: N801 -- reads as a verb where it is used: for x in batches(data, graph)
    """Iterate over data as flat lists of tensors; has a length when the data have one."""

    def __init__(self, data: Any, graph: Graph, note: Callable[[list[torch.Tensor]], None] | None = None) -> None:
        self.data, self.graph, self.note = data, graph, note  #: `note` is called with each batch

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for batch in iterate(self.data):
            flat, _ = split_label(batch, self.graph)
            if _none(flat) or not any(x.numel() for x in flat):
                continue
            if self.note is not None:
                self.note(flat)
            yield flat

    def __len__(self) -> int:
        return len(self.data)
