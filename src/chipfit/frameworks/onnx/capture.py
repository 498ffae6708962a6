"""Read an ONNX model into a Graph, with an open batch where the model allows it; compare both on the example."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from chipfit.engine.run import first_deviation
from chipfit.engine.trees import dump_call, dump_result
from chipfit.errors import CaptureError
from chipfit.frameworks.onnx.model import OnnxModel, dims_of, opened
from chipfit.frameworks.onnx.runtime import run_flat
from chipfit.frameworks.onnx.translate import translate
from chipfit.graph.check import check
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import FIXED_BATCH, Graph

#: samples on which graph and model are compared
_SAMPLES = 2
_OTHER = "warning: ONNX Runtime computes other numbers from the file than the captured network"


def capture(model: Any, args: Sequence[Any] = (), kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read a model into a Graph; axis 0 of the inputs becomes open, also where the file fixes it, if that is possible.

    Args:
        model: an OnnxModel, or what `opened` takes.
        args, kwargs: one batch of inputs, torch tensors, by position or by name.
        others: further batches, as (args, kwargs); sizes in which they differ stay open.

    Raises:
        CaptureError: The model cannot be read, or the example does not fit it.
    """
    model = opened(model)
    inputs = _inputs(model, args, kwargs or {})
    shapes = [[tuple(x.shape) for x in inputs]]
    shapes += [[tuple(x.shape) for x in _inputs(model, a, k or {})] for a, k in others]
    fixed = _fixed_batch(model, inputs)
    tried: CaptureError | None = None
    for batch in (True, False):
        try:
            graph = _read(model, inputs, shapes, args, kwargs or {}, fixed if batch else 0, batch)
            found = _compare(graph, model, inputs, fixed)
        except CaptureError as e:
            if not batch:
                raise _of_fixed_batch(tried or e, inputs, fixed) from None
            tried = e
            continue
        if found is None or not batch:
            break
    if found is not None:
        name, off = found
        if not isinstance(off, float):
            raise CaptureError(
                f"Output '{name}' of the model cannot be computed: {off}", hint="float models of 32 bits"
            )
        graph.notes.append(f"{_OTHER}: output '{name}' is off by {off:.3g}")
    if not batch:
        why = tried.what if tried else "the model computes something else for another number of samples"
        graph.notes.append(f"{FIXED_BATCH}: {why}")
    return graph


def _of_fixed_batch(e: CaptureError, inputs: Sequence[torch.Tensor], fixed: int) -> CaptureError:
    """Return the error of a model that is read neither with an open batch nor with that of the example."""
    if not fixed or len(inputs[0]) == fixed:
        return e
    what = f"The model computes batches of {fixed} only: {e.what}"
    return CaptureError(what, got=len(inputs[0]), allowed=fixed, hint=f"give batches of {fixed}")


def _fixed_batch(model: OnnxModel, inputs: Sequence[torch.Tensor]) -> int:
    """Return the batch size that the file declares for the inputs that have as many rows as the first; 0 if open."""
    rows = {tuple(x.shape[:1]) for x in inputs[:1]}
    pairs = zip(model.inputs, inputs, strict=True)
    return max((d[0] or 0 for v, x in pairs if (d := dims_of(v)) and tuple(x.shape[:1]) in rows), default=0)


def _read(
    model: OnnxModel,
    inputs: Sequence[torch.Tensor],
    shapes: Sequence[Any],
    args: Any,
    kwargs: Any,
    fixed: int,
    batch: bool,
) -> Graph:
    graph, outputs = translate(model, _variants(shapes, batch), [x.dtype for x in inputs], fixed)
    graph.outputs = outputs
    names = model.names()
    call = (tuple(0 for _ in names), {}) if not kwargs else ((), dict.fromkeys(names, 0))
    order = names if not kwargs else sorted(names, key=list(kwargs).index)
    graph.inputs = order
    call = call if not kwargs else ((), dict.fromkeys(order, 0))
    graph.in_spec = dump_call(*call, names[: len(call[0])])
    given = [v.name or str(k) for k, v in enumerate(model.graph.outputs)]
    several: Any = 0 if len(given) == 1 else dict.fromkeys(given, 0)
    graph.out_spec = dump_result(several, [{"output": k} for k in range(len(given))])
    by_name = dict(zip(names, inputs, strict=True))
    graph.example = tuple(by_name[n].detach() for n in order)
    drop_dead(graph)
    read = {i for n in graph.nodes for i in n.inputs} | {*outputs}
    graph.weights = {k: w for k, w in graph.weights.items() if k in read}
    graph.trainable &= {*graph.weights}
    check(graph, blame="capture")
    return graph


def _inputs(model: OnnxModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call in the order of the model's inputs, on the CPU, floats as float32.

    Raises:
        CaptureError: They do not fit the declared inputs.
    """
    names = model.names()
    args = list(args)
    if len(args) == 1 and isinstance(args[0], Mapping):
        args, kwargs = [], args[0]
    missing = [n for n in names[len(args) :] if n not in kwargs]
    if missing or len(args) > len(names):
        got = f"{len(args)} by position, {', '.join(kwargs) or 'none'} by name"
        raise CaptureError("The example does not fit the inputs of the model", got=got, allowed=", ".join(names))
    found = [*args, *(kwargs[n] for n in names[len(args) :])]
    return [_input(v, x) for v, x in zip(model.inputs, found, strict=True)]


def _input(value: ir.Value, x: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        what = f"Input '{value.name}' of the example is not a batch of numbers"
        raise CaptureError(what, got=type(x).__name__)
    declared = dims_of(value) or [None] * x.dim()
    sizes = zip(declared[1:], x.shape[1:], strict=False)
    if x.dim() != len(declared) or any(isinstance(d, int) and d != s for d, s in sizes):
        allowed = f"[{', '.join('any' if d is None else str(d) for d in declared)}]"
        hint = _permuted(declared, x.shape)
        what = f"Input '{value.name}' of the example has another shape than the model declares"
        raise CaptureError(what, got=list(x.shape), allowed=allowed, hint=hint)
    x = x.detach().cpu()
    floats = value.dtype is None or value.dtype.is_floating_point()
    if x.is_floating_point() and not floats:
        what = f"Input '{value.name}' of the example holds other numbers than the model declares"
        raise CaptureError(what, got=str(x.dtype).removeprefix("torch."), allowed=str(value.dtype).lower())
    return x.float() if x.is_floating_point() else x


def _permuted(declared: Sequence[Any], got: Sequence[int]) -> str:
    """Return a hint if the channels of images are at the other end; "" otherwise."""
    if len(declared) == len(got) == 4:
        for order in ((0, 3, 1, 2), (0, 2, 3, 1)):
            if all(not isinstance(declared[k], int) or declared[k] == got[order[k]] for k in (1, 2, 3)):
                return f"channels are at the other end: x.permute{order}"
    return ""


def _variants(shapes: Sequence[Sequence[tuple[int, ...]]], batch: bool) -> list[list[tuple[int, ...]]]:
    """Return shapes of the inputs for which the model is read: the example's, others', and with another batch."""
    first = shapes[0]
    rows = {s[0] for s in first if s}
    found = [list(s) for s in dict.fromkeys(map(tuple, shapes))]
    if batch and rows:
        size = next(s[0] for s in first if s)
        other = next(p for p in (7, 11, 13) if p != size and all(p not in s for s in first))
        last = found[-1]
        found.append(
            [
                (other, *s[1:]) if s and f[0] == size else s
                for s, f in zip(last, [x or (0,) for x in first], strict=True)
            ]
        )
    return found


def _compare(graph: Graph, model: OnnxModel, inputs: Sequence[torch.Tensor], fixed: int) -> tuple[str, Any] | None:
    """Compare a graph with the runtime on a few samples; where the file fixes the batch, on two batches at once."""
    names = model.names()
    with_rows = [graph.shape(n)[:1] == (None,) for n in names]
    if fixed and any(with_rows):
        few = [_rows(x, fixed) if has else x for x, has in zip(inputs, with_rows, strict=True)]
        others = [x / 2 if has and x.is_floating_point() else x for x, has in zip(few, with_rows, strict=True)]
        parts = [run_flat(model, few), run_flat(model, others)]
        want = [torch.cat(p) if p[0].dim() else p[0] for p in zip(*parts, strict=True)]
        few = [torch.cat([x, y]) if has else x for x, y, has in zip(few, others, with_rows, strict=True)]
    else:
        few = [x[:_SAMPLES] if has else x for x, has in zip(inputs, with_rows, strict=True)]
        want = run_flat(model, few)
    by_name = dict(zip(names, few, strict=True))
    return first_deviation(graph, [by_name[n] for n in graph.inputs], want)


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first samples, repeated if there are fewer."""
    return torch.cat([x] * -(-count // len(x)))[:count]
