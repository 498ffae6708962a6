"""Conversion of calibration data in any common form to flat lists of tensors."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit.calibration.input_errors import LABELS, axes_differ, fixed_batch, layout_hint
from chipfit.calibration.signature import LABEL_NAMES, expected_inputs, is_optional, names_label
from chipfit.engine.memory import memory_errors
from chipfit.engine.trees import batch_axes, flatten_inputs
from chipfit.engine.types import dtype_of
from chipfit.errors import DataError
from chipfit.graph.ir import FIXED_BATCH, Graph
from chipfit.graph.placement import inputs_on

#: one tensor for each input of a graph
Batch = Sequence[torch.Tensor]
#: arguments of a call, by position and by name
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: samples of a batch if the data are one big array
ARRAY_BATCH = 16
#: cardinality of a tf.data.Dataset without an end
_INFINITE = -1
_SIZES = "sizes stay dynamic if calibration batches (in a list, to be read again) or `example=` differ in them"


class SizeMismatch(DataError):
    """An input has another shape than the captured one; `batch` is set if only a size differs."""

    batch: Any = None


class NotedBatches(list[Any]):
    """A list of batches with notes on where they come from, which every plan made with them repeats."""

    def __init__(self, batches: Iterable[Any], notes: Sequence[str]) -> None:
        super().__init__(batches)
        self.notes = tuple(notes)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return NotedBatches(found, self.notes) if isinstance(index, slice) else found


def iterate(data: Any, fixed: int = 0, *, single: bool = True) -> Iterator[Any]:
    """Return an iterator over the batches of an iterable, of big arrays, or of what a callable returns.

    Args:
        fixed: the batch size that the model fixes, 0 if it fixes none; an array is split into whole batches of it.
        single: split batches of several samples into single ones where the model fixes a batch of 1. The graph of such
            a model may take several samples all the same: then False.

    Raises:
        DataError: `data` is none of these.
    """
    if callable(data) and not isinstance(data, (Iterable, torch.nn.Module)):
        data = _call_without_arguments(data)
    if hint := _endless(data):
        raise DataError("The data never end", got=type(data).__name__, hint=f"end them: {hint}")
    if isinstance(data, (np.ndarray, torch.Tensor, Mapping)):
        data = as_tensors(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable):
        return (data[k] for k in range(len(data)))  # a keras.utils.PyDataset
    if isinstance(data, torch.Tensor):
        if data.dim() == 0:
            raise DataError("Calibration data is a single number", got=str(data), allowed="batches of inputs")
        return (data[rows] for rows in _batch_slices(len(data), fixed))
    if isinstance(data, Mapping) and data and all(isinstance(x, torch.Tensor) and x.dim() for x in data.values()):
        return ({name: x[rows] for name, x in data.items()} for rows in _batch_slices(_common_rows(data), fixed))
    if isinstance(data, (str, bytes, Path, Mapping, torch.nn.Module)) or not isinstance(data, Iterable):
        from_file = "load the file, as np.load(path)['x'] does; the command line reads files: --data"
        raise DataError(
            "The data are not batches of inputs",
            got=type(data).__name__,
            allowed="an iterable of batches (tensors, tuples, dicts), an array or a dict of arrays with the batch on "
            "axis 0, or a callable that returns one",
            hint=from_file if isinstance(data, (str, Path)) else "wrap a single batch in a list: [batch]",
        )
    return (sample for batch in data for sample in _single_samples(batch)) if fixed == 1 and single else iter(data)


def _endless(data: Any) -> str:
    """Return what ends a tf.data.Dataset or a keras.utils.PyDataset that has no end; "" for other data."""
    if callable(getattr(data, "cardinality", None)):
        return "dataset.take(number of batches)" if int(data.cardinality()) == _INFINITE else ""
    try:
        ends = (
            hasattr(data, "__len__") or not hasattr(data, "__getitem__") or getattr(data, "num_batches", 0) is not None
        )
    except NotImplementedError:  # the default of Keras, which then counts on
        ends = False
    return "" if ends else "[dataset[k] for k in range(number of batches)], or give it a number as `num_batches`"


def _batch_slices(rows: int, fixed: int) -> Iterator[slice]:
    """Return the rows of each batch: of a fixed size (above 0), only whole batches if there are any."""
    size = fixed or ARRAY_BATCH
    whole = rows // size * size if 0 < fixed <= rows else rows
    return (slice(start, start + size) for start in range(0, max(whole, 1), size))


def _common_rows(arrays: Mapping[str, torch.Tensor]) -> int:
    rows = {name: len(x) for name, x in arrays.items()}
    if len(set(rows.values())) > 1:
        raise DataError(
            "The arrays of the calibration data have different numbers of samples",
            got=", ".join(f"'{name}' {n}" for name, n in rows.items()),
            allowed="the same on axis 0",
            hint="wrap a single batch in a list: [batch]",
        )
    return rows.popitem()[1]


def add_states(data: Any, with_states: Callable[[Iterable[Any]], Iterator[Any]] | None) -> Any:
    """Return data with the states of a model that computes one step of a sequence.

    Args:
        with_states: function of the framework (`Framework.steps`) that adds states to batches; None: there are none.
    """
    if with_states is None:
        return data
    return with_states(iterate(data)) if isinstance(data, Iterator) else lambda: with_states(iterate(data))


def _single_samples(batch: Any) -> Iterator[Any]:
    """Yield the samples of a batch whose tensors, but scalars, have equally many rows; the batch itself otherwise."""
    from torch.utils._pytree import tree_leaves, tree_map_only

    batch = as_tensors(batch)
    rows = {len(x) for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()}
    if len(rows) != 1 or max(rows) < 2:
        yield batch
        return

    def row(k: int) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x[k : k + 1] if x.dim() else x, batch)

    yield from map(row, range(max(rows)))


def _call_without_arguments(function: Callable[..., Any]) -> Any:
    try:
        try:
            inspect.signature(function).bind()
        except ValueError:  # a C function without a signature raises when it is called
            return function()
    except TypeError as e:
        got = f"{getattr(function, '__name__', type(function).__name__)}: {e}"
        allowed = "a function without required arguments"
        raise DataError("The function that gives calibration data needs arguments", got=got, allowed=allowed) from None
    return function()


def empty_data_error() -> DataError:
    """Return the error for data without a batch."""
    hint = "give at least one batch; a generator can be used up only once"
    return DataError("The calibration data are empty", hint=hint)


def first_batch(data: Any, model: Any) -> tuple[Call, Any]:
    """Return the arguments of the call with the first batch, without a label, and all data including that batch.

    Raises:
        DataError: the data are empty.
    """
    rest = iterate(data, fixed_batch(model), single=False)
    for first in rest:
        args, kwargs = call_without_label(first, model)
        if not _is_empty([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]):
            return (args, kwargs), itertools.chain([first], rest)
    raise empty_data_error()


def _is_empty(batch: Sequence[torch.Tensor]) -> bool:
    with_rows = [x for x in batch if x.dim()]
    return bool(with_rows) and not any(map(len, with_rows))


def call_without_label(batch: Any, model: Any) -> Call:
    """Return a batch as arguments of a call, without a label behind the inputs.

    The last item is a label if the model takes one argument less, or if it is optional and called like a label, or is
    no tensor.
    """
    args, kwargs = as_call(batch, model)
    if len(args) > 1 and (
        expected_inputs(model) == len(args) - 1
        or (is_optional(model, len(args)) and (isinstance(args[-1], (int, list)) or names_label(model, len(args))))
    ):
        args = args[:-1]
    return args, kwargs


def first_rows(call: Call, count: int = 2) -> Call:
    """Return a call with few samples; the whole call if its inputs have different numbers of rows.

    Of two samples, one has the most tokens and the other the most padding, if the last input of integers (the mask, or
    the tokens themselves) tells them apart.
    """
    from torch.utils._pytree import tree_leaves, tree_map_only

    tensors = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor) and x.dim()]
    if len({len(x) for x in tensors}) != 1 or len(tensors[0]) <= count:
        return call
    rows = list(range(count))
    if tokens := [x for x in tensors if x.dim() > 1 and not x.is_floating_point() and not x.is_complex()]:
        filled = (tokens[-1] != 0).flatten(1).sum(1)
        ends = sorted({int(filled.argmax()), int(filled.argmin())})
        rows = [*ends, *(k for k in rows if k not in ends)][:count]
    few: Call = tree_map_only(torch.Tensor, lambda x: x[rows] if x.dim() else x, call)
    return few


def _with_tensors(x: Any) -> Any:
    """Return nested containers with arrays, also those of TensorFlow and JAX, converted to tensors."""
    if hasattr(x, "__array__") and not isinstance(x, (torch.Tensor, np.ndarray, np.generic)):
        x = np.array(x)  # a tensor of TensorFlow or JAX
    if isinstance(x, np.ndarray):
        return _array_as_tensor(x)
    if isinstance(x, torch.Tensor) and (x.layout is not torch.strided or x.is_nested or x.is_meta or x.is_quantized):
        kind = "nested" if x.is_nested else "meta" if x.is_meta else "quantized" if x.is_quantized else str(x.layout)
        allowed = "dense tensors that hold values"
        raise DataError("Calibration data hold a tensor without plain numbers", got=kind, allowed=allowed)
    if isinstance(x, Mapping):
        return {k: _with_tensors(v) for k, v in x.items()}
    if isinstance(x, (tuple, list)) and not (isinstance(x, list) and x and isinstance(x[0], (int, float))):
        return type(x)(_with_tensors(v) for v in x) if type(x) in (tuple, list) else tuple(_with_tensors(v) for v in x)
    return x


def _array_as_tensor(x: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor; float64, NumPy's default, and bfloat16, which NumPy lacks, become float32."""
    try:
        if x.dtype.name == "bfloat16":
            x = x.astype(np.float32)
        x = x.astype(np.float32 if x.dtype == np.float64 else x.dtype.newbyteorder("="), order="C", copy=False)
        return torch.from_numpy(x)
    except TypeError:
        got = f"{x.dtype}{list(x.shape)}"
        allowed = "arrays of floats, integers or booleans, all rows equally long"
        what = "Calibration data hold an array that is not numeric"
        raise DataError(what, got=got, allowed=allowed) from None


def as_call(batch: Any, model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments of a call; a dict becomes keyword arguments if the model has such parameters."""
    args, kwargs = _as_arguments(batch)
    if kwargs and hasattr(model, "forward"):
        parameters = inspect.signature(model.forward).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            if not set(kwargs) & set(parameters):
                return (kwargs,), {}
            kwargs = {k: v for k, v in kwargs.items() if k in parameters}  # without labels
    return args, kwargs


def as_tensors(batch: Any) -> Any:
    """Return a batch with arrays converted to tensors.

    Raises:
        DataError: an array or tensor has no plain numbers, or the batch contains itself.
    """
    try:
        return _with_tensors(batch)
    except RecursionError:
        raise DataError("A batch contains itself", got=type(batch).__name__) from None


def _as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = as_tensors(batch)
    if isinstance(batch, Mapping):
        if any(not isinstance(k, str) for k in batch):
            raise DataError("The keys of a batch are not input names", got=str(list(batch)[:8]), allowed="text as keys")
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def count_splittable(graph: Graph, batch: Sequence[torch.Tensor]) -> int:
    """Return the number of samples in a batch that can be split along axis 0; 0 if it cannot."""
    sizes = {len(x) if x.dim() else 0 for x in batch}
    fixed = batch_axes(graph) != dict.fromkeys(graph.inputs, 0)
    return 0 if fixed or len(sizes) != 1 else sizes.pop()


def count_samples(graph: Graph, batch: Sequence[torch.Tensor]) -> int:
    """Return how many samples a batch has: where no axis of samples is known, the longest axis 0; 1 without axes."""
    axes = batch_axes(graph)
    known = [x.shape[axes[name]] for name, x in zip(graph.inputs, batch, strict=True) if name in axes]
    return max(known or [len(x) for x in batch if x.dim()], default=1)


class IndivisibleBatch(list[torch.Tensor]):
    """A batch that cannot be cut into samples, because its inputs do not all have samples on axis 0."""


def as_batch(graph: Graph, flat: list[torch.Tensor]) -> Batch:
    """Return the inputs of a graph as a batch, marked if it cannot be cut."""
    return flat if count_splittable(graph, flat) else IndivisibleBatch(flat)


def fixed_batch_of(graph: Graph) -> int:
    """Return the batch size that a graph fixes for all its inputs; 0 if there is none."""
    sizes = {graph.shape(i)[:1] for i in graph.inputs}
    return next(iter(sizes))[0] or 0 if len(sizes) == 1 and () not in sizes and not batch_axes(graph) else 0


def split_label(batch: Any, graph: Graph) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Split one batch into checked tensors, in the order of the graph's inputs, and labels or None.

    Raises:
        DataError: the batch does not match the captured call.
    """
    import json

    spec = json.loads(graph.in_spec)
    args, kwargs = _as_arguments(batch)
    label, named = None, bool(kwargs)
    if spec.get("packed") and 0 < len(args) <= 2 and isinstance(args[0], (list, tuple, Mapping)):
        inputs, *behind = args  # (inputs, label), as `fit` of Keras takes them
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        label = behind[0] if behind else None
    known = {*spec["names"][: spec["args"]], *spec["kwargs"]}
    if kwargs and not spec["kwargs"] and spec["args"] == 1 and not known & set(kwargs):
        args, kwargs = (dict(kwargs),), {}  # the model takes one dict
    elif known & set(kwargs):
        label = next((kwargs[k] for k in (*LABEL_NAMES, "y") if k in kwargs and k not in known), None)
        kwargs = {k: v for k, v in kwargs.items() if k in known}
    elif args and not spec["args"] and len(spec["kwargs"]) == 1:
        args, kwargs = args[1:], {spec["kwargs"][0]: args[0]}
    if len(args) == spec["args"] + 1 and (spec["args"] or kwargs):
        *rest, label = args
        args = tuple(rest)
    if len(args) > spec["args"] > 0:
        raise DataError(f"A batch holds {len(args)} items, and the model takes {spec['args']}", hint=LABELS)
    try:
        flat = flatten_inputs(graph, args, kwargs)
    except DataError as e:
        hint = "yield tensors or tuples in the order of the inputs" if named else ""
        raise DataError(e.what, got=e.got, allowed=e.allowed, hint=hint or e.hint) from None
    out = [_checked_input(graph, name, x, batch) for name, x in zip(graph.inputs, flat, strict=True)]
    axes, given = batch_axes(graph), dict(zip(graph.inputs, out, strict=True))
    rows = {name: given[name].shape[axis] for name, axis in axes.items()}
    if len(set(rows.values())) > 1:
        got = ", ".join(f"'{name}' {n}" for name, n in rows.items())
        others = ", ".join(f"axis {axis} of '{name}'" for name, axis in axes.items() if axis)
        allowed = f"the same on axis 0{' and on ' * bool(others)}{others}"
        raise DataError("The inputs of a batch have different numbers of samples", got=got, allowed=allowed)
    return out, None if label is None else _classes(label)


def _classes(label: Any) -> torch.Tensor:
    """Return labels as a tensor of class numbers; one-hot labels are [N, classes]."""
    try:
        label = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError):  # text, objects, rows of different lengths
        raise DataError("Labels must be numbers", got=repr(label)[:120], allowed="numbers of classes") from None
    return label.argmax(1) if label.is_floating_point() and label.dim() == 2 and label.shape[1] > 1 else label


def _checked_input(graph: Graph, name: str, x: Any, batch: Any) -> torch.Tensor:
    """Return an input of a batch in the type with which the model was captured.

    Raises:
        DataError: it has another kind of numbers, or numbers outside the range of that type.
        SizeMismatch: it has another shape.
    """
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
        x = _converted(want.dtype, name, x)
    if len(x.shape) != len(want.shape) or any(w not in (None, s) for w, s in zip(want.shape, x.shape, strict=False)):
        sizes = [d or ("any" if k else "batch") for k, d in enumerate(want.shape)]
        empty = "an axis of size 0 holds nothing: leave such batches out" if 0 in (*x.shape, *want.shape) else ""
        hint = empty or layout_hint(tuple(x.shape), want.shape)
        if not hint and len(x.shape) != len(want.shape):
            hint = axes_differ(len(x.shape), len(want.shape))
        what, got = f"Input '{name}' has the wrong shape", str(list(x.shape))
        fixed = next((note for note in graph.notes if note.startswith(FIXED_BATCH)), "")
        error = SizeMismatch(
            what, got=got, allowed=str(sizes), hint=hint or (f"{_SIZES}; {fixed}" if fixed else _SIZES)
        )
        error.batch = None if hint or len(x.shape) != len(want.shape) else batch
        raise error
    return x.detach()


def _converted(dtype: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """Convert an input to the type with which the model was captured, without loss of range."""
    out = x.to(dtype_of(dtype))
    if x.is_floating_point():
        lost = x.isfinite() & ~out.isfinite()
    else:  # compared in int64, in which a large uint64 becomes negative
        whole = x.long()
        lost = (out.long() != whole) | (whole < 0 if not x.dtype.is_signed else False)
    if bool(lost.any()):
        got = str(x[lost].flatten()[0].item())
        raise DataError(f"Input '{name}' holds numbers outside the range of {dtype}, the captured type", got=got)
    return out


class batches:  # noqa: N801 -- reads as a verb where it is used: for x in batches(data, graph)
    """The data as flat lists of tensors on the graph's device, without empty batches; it has a length if they have one.

    Args:
        note: called with each batch, on the device where the data have it.
    """

    def __init__(self, data: Any, graph: Graph, note: Callable[[list[torch.Tensor]], None] | None = None) -> None:
        self.data, self.graph, self.note = data, graph, note

    def __iter__(self) -> Iterator[Batch]:
        axes = batch_axes(self.graph)
        for batch in iterate(self.data, fixed_batch_of(self.graph)):
            flat, _ = split_label(batch, self.graph)
            rows = [x.shape[axes[name]] for name, x in zip(self.graph.inputs, flat, strict=True) if name in axes]
            if 0 in rows or not any(x.numel() for x in flat):
                continue
            if self.note is not None:
                self.note(flat)
            with memory_errors(self.graph.device, [x.shape for x in flat]):
                flat = inputs_on(self.graph.device, flat)
            yield as_batch(self.graph, flat)

    def __len__(self) -> int:
        return len(self.data)
