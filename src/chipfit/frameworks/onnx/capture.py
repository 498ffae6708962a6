"""Read an ONNX model into a Graph, with an open batch where the model allows it; compare both on the example."""

import json
from collections.abc import Mapping, Sequence
from traceback import clear_frames
from typing import Any

import onnx_ir as ir
import torch

from chipfit.engine.run import first_deviation, run
from chipfit.engine.trees import dump_call, dump_result
from chipfit.errors import CaptureError, DataError, RefusedCall, first_line
from chipfit.frameworks.onnx.limits import TRAPPING, traps
from chipfit.frameworks.onnx.model import OnnxModel, dims_of, opened, refuse_quantized
from chipfit.frameworks.onnx.requantize import float_network, without_idle_clips
from chipfit.frameworks.onnx.runtime import OnnxFunction, only_here, run_flat
from chipfit.frameworks.onnx.translate import TOO_MANY_STEPS, translate
from chipfit.frameworks.reading import mixes_samples
from chipfit.graph.check import check
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import FIXED_BATCH, OPAQUE, Graph, Node

#: bytes of weights that may be in memory twice while a model is read
_LIGHT = 1 << 24
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
        CaptureError: The model cannot be read, is quantized already, or the example does not fit it.
    """
    model = opened(model)
    again = model.requantize
    if again:
        model = float_network(model)
    refuse_quantized(model)
    inputs = _inputs(model, args, kwargs or {})
    shapes = [[tuple(x.shape) for x in inputs]]
    shapes += [[tuple(x.shape) for x in _inputs(model, a, k or {})] for a, k in others]
    fixed = _fixed_batch(model, inputs)
    order, tried, why = list(kwargs or {}), None, ""
    with model.stored.mapped():
        try:
            graph, found = _compared(model, inputs, _variants(shapes, True), order, fixed)
            if found is not None:
                why = "the model computes something else for another number of samples"
                del graph  # so that its weights are not held twice
            elif mixes_samples(graph):  # axis 0 holds the steps of sequences
                graph = _with_samples_on_axis_1(model, inputs, shapes, order) or graph
        except CaptureError as e:
            if e.what == TOO_MANY_STEPS:
                raise
            tried, why = _without_locals(e), e.what
        if why:
            graph, found = _of_one_batch(model, inputs, shapes, order, fixed, tried)
    if again:
        graph = without_idle_clips(graph)
    if found is not None:
        name, off = found
        if not isinstance(off, float):
            raise CaptureError(
                f"Output '{name}' of the model cannot be computed: {off}", hint="float models of 32 bits"
            )
        graph.notes.append(f"{_OTHER}: output '{name}' is off by {off:.3g}")
    if why:
        graph.notes.append(f"{FIXED_BATCH}: {why}")
    if types := _other_floats(model):
        graph.notes.append(f"warning: the model computes in {types}; it was read, and is simulated, in float32")
    return graph


def _without_locals(e: CaptureError) -> CaptureError:
    """Return a caught error after clearing the frames below the caller, of itself and its causes: they hold weights."""
    at: BaseException | None = e.with_traceback(e.__traceback__.tb_next if e.__traceback__ else None)
    while at is not None:
        clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
    return e


def _with_samples_on_axis_1(
    model: OnnxModel, inputs: Sequence[torch.Tensor], shapes: list[list[tuple[int, ...]]], order: Sequence[str]
) -> Graph | None:
    """Return the graph with axis 1 of the inputs open; None if the model cannot be read so, or computes otherwise."""
    try:
        graph, difference = _compared(model, inputs, _variants(shapes, True, axis=1), order, 0)
    except CaptureError:
        return None
    axes = [[k, 1] for k, i in enumerate(graph.inputs) if graph.shape(i)[1:2] == (None,)]
    graph.in_spec = json.dumps({**json.loads(graph.in_spec), "batch": axes})
    return None if difference else graph


def _other_floats(model: OnnxModel) -> str:
    """Return the types of floats beside float32 of inputs and weights."""
    weights = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    kinds = {v.dtype for v in model.inputs} | {w.dtype for w in weights if w.size > 1}
    found = {k.name.lower() for k in kinds if k is not None and k.is_floating_point()}
    return " and ".join(sorted(found - {"float"}))


def _of_one_batch(
    model: OnnxModel,
    inputs: list[torch.Tensor],
    shapes: list[list[tuple[int, ...]]],
    order: Sequence[str],
    fixed: int,
    tried: CaptureError | None,
) -> tuple[Graph, tuple[str, Any] | None]:
    """Read the model for the batch of the example, or for one sample if it computes nothing else; see `_compared`.

    Args:
        fixed: the batch that the file declares, or 0.
        tried: the error of an open batch.
    """
    ways, rows = [(inputs, shapes)], inputs[0].shape[:1]
    if fixed < 2 and rows > (1,):  # a file may declare an open batch that its operators have fixed
        one = [x[:1] if x.shape[:1] == rows else x for x in inputs]
        ways = [*(ways if fixed == 0 else []), (one, [[tuple(x.shape) for x in one]])]
    failed: CaptureError | None = None
    for given, sizes in ways:
        try:
            return _compared(model, given, _variants(sizes, False), order, 0)
        except CaptureError as e:
            failed = failed or _of_fixed_batch(tried, _without_locals(e), given, fixed)
    assert failed is not None, "one way is tried at least"
    if fixed:
        raise failed
    hint = failed.hint or "where operators of the file fix the batch, give batches of the size of its export"
    refused = RefusedCall(failed.what, where=failed.where, got=failed.got, allowed=failed.allowed, hint=hint)
    raise refused.with_traceback(failed.__traceback__) from failed


def _of_fixed_batch(
    tried: CaptureError | None, own: CaptureError, inputs: Sequence[torch.Tensor], fixed: int
) -> CaptureError:
    """Return the error of a model that is read neither with an open batch (`tried`) nor with the example's (`own`)."""
    if fixed and len(inputs[0]) == fixed:
        return own
    e = tried or own
    if not fixed:
        return e
    what = f"The model computes batches of {fixed} only: {e.what}"
    return CaptureError(what, got=len(inputs[0]), allowed=fixed, hint=f"give batches of {fixed}")


def _fixed_batch(model: OnnxModel, inputs: Sequence[torch.Tensor]) -> int:
    """Return the batch size that the file declares for the inputs that have as many rows as the first; 0 if open."""
    rows = {tuple(x.shape[:1]) for x in inputs[:1]}
    pairs = zip(model.inputs, inputs, strict=True)
    return max((d[0] or 0 for v, x in pairs if (d := dims_of(v)) and tuple(x.shape[:1]) in rows), default=0)


def _compared(
    model: OnnxModel,
    inputs: Sequence[torch.Tensor],
    variants: Sequence[Sequence[tuple[int, ...]]],
    order: Sequence[str],
    fixed: int,
) -> tuple[Graph, tuple[str, Any] | None]:
    """Return the graph of a model, and where it differs from the runtime, see `first_deviation`.

    The model is read first, which finds operators that would crash the runtime or take all memory. The runtime runs
    first where there are many weights, so that its weights and those of the graph are not in memory at the same time.

    Args:
        variants, fixed: see `translate`.
        order: names of the inputs of the call, if they are given by name.

    Raises:
        CaptureError: The model cannot be read, or the runtime cannot run it.
    """
    rows = [len({v[k][:1] for v in variants}) > 1 for k in range(len(inputs))]
    few, parts = _few(inputs, rows, fixed)
    graph = _read(model, inputs, variants, order, fixed) if model.bytes_of_weights <= _LIGHT else None
    failed, want = None, list[torch.Tensor]()
    try:
        if graph is not None:
            _check_divisions(graph, _in_order(graph, model, few))
        with only_here(model):
            found = [run_flat(model, p) for p in parts]
        want = [torch.cat(p) if len(p) > 1 and p[0].dim() else p[0] for p in zip(*found, strict=True)]
    except CaptureError as e:
        failed = e  # a reader's error says more
    if graph is None:
        graph = _read(model, inputs, variants, order, fixed)
    if failed is not None:
        raise failed
    return graph, first_deviation(graph, _in_order(graph, model, few), want)


def _check_divisions(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check divisions of integers on the example, which end the process where the processor traps on one.

    Raises:
        CaptureError: One divides the least integer by -1.
    """
    found = [(kind, n) for n in graph.nodes if (kind := _kind(n)) in TRAPPING and _reads_integers(n, graph)]
    if not found:
        return
    read = {i for _, n in found for i in n.inputs if i is not None}
    try:
        with torch.inference_mode():
            values = run(graph, inputs, keep=read)
    except (RuntimeError, LookupError, DataError) as e:
        raise CaptureError(f"The model fails on the example input: {first_line(e)}") from e
    for kind, n in found:
        if traps(kind, *(torch.as_tensor(values[i]).numpy() for i in n.inputs if i is not None)):
            raise CaptureError(f"Operator '{kind}' divides the least integer by -1", where=n.display_name)


def _kind(n: Node) -> str:
    """Return the operator of a node, of an opaque one that of the file."""
    return OnnxFunction.of_target(n.attrs["target"]).node.op_type if n.op == OPAQUE else n.op


def _reads_integers(n: Node, graph: Graph) -> bool:
    first = n.inputs[0]
    return first is not None and (
        not graph.weights[first].is_floating_point() if first in graph.weights else "int" in graph.values[first].dtype
    )


def _in_order(graph: Graph, model: OnnxModel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs of the model in the order of the graph's."""
    by_name = dict(zip(model.names(), inputs, strict=True))
    return [by_name[n] for n in graph.inputs]


def _few(
    inputs: Sequence[torch.Tensor], rows: Sequence[bool], fixed: int
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return a few samples, and the calls in which the runtime computes them: two if the file fixes the batch."""
    if not fixed or not any(rows):
        few = [x[:_SAMPLES] if has else x for x, has in zip(inputs, rows, strict=True)]
        return few, [few]
    first = [_rows(x, fixed) if has else x for x, has in zip(inputs, rows, strict=True)]
    second = [x / 2 if has and x.is_floating_point() else x for x, has in zip(first, rows, strict=True)]
    both = [torch.cat([x, y]) if has else x for x, y, has in zip(first, second, rows, strict=True)]
    return both, [first, second]


def _read(
    model: OnnxModel,
    inputs: Sequence[torch.Tensor],
    variants: Sequence[Sequence[tuple[int, ...]]],
    order: Sequence[str],
    fixed: int,
) -> Graph:
    graph, outputs = translate(model, variants, [x.dtype for x in inputs], fixed)
    graph.outputs = outputs
    names = model.names()
    graph.inputs = sorted(names, key=order.index) if order else names
    call = ((), dict.fromkeys(graph.inputs, 0)) if order else (tuple(0 for _ in names), {})
    graph.in_spec = dump_call(*call, names[: len(call[0])])
    given = [v.name or str(k) for k, v in enumerate(model.graph.outputs)]
    several: Any = 0 if len(given) == 1 else dict.fromkeys(given, 0)
    graph.out_spec = dump_result(several, [{"output": k} for k in range(len(given))])
    by_name = dict(zip(names, inputs, strict=True))
    graph.example = tuple(by_name[n].detach() for n in graph.inputs)
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
        what = f"Input '{value.name}' of the example has another shape than the model declares"
        raise CaptureError(what, got=list(x.shape), allowed=allowed)
    x = x.detach().cpu()
    floats = value.dtype is None or value.dtype.is_floating_point()
    if x.is_floating_point() and not floats:
        what = f"Input '{value.name}' of the example holds other numbers than the model declares"
        raise CaptureError(what, got=str(x.dtype).removeprefix("torch."), allowed=str(value.dtype).lower())
    return x.float() if x.is_floating_point() else x


def _variants(shapes: Sequence[Sequence[tuple[int, ...]]], batch: bool, axis: int = 0) -> list[list[tuple[int, ...]]]:
    """Return shapes of the inputs for which the model is read: the example's, others', and with another batch."""
    first = shapes[0]
    size = next((s[axis] for s in first if len(s) > axis), 0)
    found = [list(s) for s in dict.fromkeys(map(tuple, shapes))]
    if batch and size:
        other = next(p for p in (7, 11, 13) if p != size and all(p not in s for s in first))
        last = zip(found[-1], first, strict=True)
        found.append([(*s[:axis], other, *s[axis + 1 :]) if f[axis : axis + 1] == (size,) else s for s, f in last])
    return found


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first samples, repeated if there are fewer."""
    return torch.cat([x] * -(-count // len(x)))[:count]
