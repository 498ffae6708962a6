"""Read a PyTorch module into a Graph: record its calls, or trace it with `torch.export`."""

import contextlib
import copy
import functools
import inspect
import io
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, permutations, product
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.modules import rnn
from torch.nn.utils import rnn as packing
from torch.utils import _pytree as pytree

from chipfit.engine.process import quiet
from chipfit.engine.run import first_deviation, run
from chipfit.engine.torch_defaults import users_defaults
from chipfit.engine.trees import flatten_inputs
from chipfit.engine.types import describe_value
from chipfit.errors import CaptureError, RefusedCall, raise_bug, short_message
from chipfit.frameworks.reading import mixes_samples
from chipfit.frameworks.torch.decompositions import decomposition_of
from chipfit.frameworks.torch.device import check_device
from chipfit.frameworks.torch.packed import padded_sequences
from chipfit.frameworks.torch.plain_call import compare_with_plain_call, in_float32, run_in_float32
from chipfit.frameworks.torch.program import (
    Program,
    SymbolicTensor,
    Unrecordable,
    needs_functionalization,
    symbolic,
    users_line,
)
from chipfit.frameworks.torch.record import record
from chipfit.frameworks.torch.tied_axes import TiedAxes, batch_places, varied_axes, ways
from chipfit.frameworks.torch.torchscript import ScriptedModule
from chipfit.frameworks.torch.translate import translate
from chipfit.graph.check import check
from chipfit.graph.ir import FIXED_BATCH, Graph
from chipfit.graph.placement import device_of, inputs_on, placed

#: halves of UTF-16 surrogate pairs, which UTF-8 cannot represent
_SURROGATES = frozenset(map(chr, range(0xD800, 0xE000)))
#: classes of observers, of quantized and prepared layers, of quantized weights, and of simulations
_QUANTIZED = re.compile(
    r"torchao\.|torch\.ao\.(quantization\.(observer|fake_)|nn\.(intrinsic\.)?(quantized|qat))"
    r"|chipfit\..*\.(ActivationQuantizer|LayerWeights|DeviceModel)$"
)

_FIXED_HINT = "let batches differ in the sizes that may vary, all that belong together at once"
_LONGER = 2, 8, 32  #: how much longer other sizes are that leave the same remainders by most strides
_MOST_ORDERS = 16  #: of calls of several sizes, until two of them show all that the model computes
_DEPENDS_ON_SIZE = "The model computes something else for other sizes, in which the batches differ"


@users_defaults()
def capture(model: torch.nn.Module, args: Sequence[Any], kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read a model into a Graph.

    The model is not changed. It is captured in eval mode: dropout, stochastic depth and the like have their inference
    behaviour. Axis 0 of every input that has the first one's batch size becomes dynamic where the model allows.

    Parameters are not copied: `Graph.weights` holds the model's own tensors until a pass replaces them. A last
    pass copies those that are left. A model on another device is run there, and copied to the CPU once.

    Args:
        model: any module that `torch.export` can trace.
        args: example positional inputs; any structure of tensors.
        kwargs: example keyword inputs.
        others: further calls, as (args, kwargs); sizes in which they differ from the example stay open.

    Raises:
        CaptureError: The model cannot be captured (the message names the user's line and what to change), a weight is
            beyond float32, a layer's name is not valid text, or the model computes something else for another size.
    """
    check_model(model)
    device = device_of(model)
    given = [(tuple(args), dict(kwargs or {})), *others]
    calls = pytree.tree_map_only(torch.Tensor, lambda x: in_float32(x).to(device), given)
    calls = [c for c in calls if pytree.tree_structure(c) == pytree.tree_structure(calls[0])]
    # the largest first: a size of 1 would become a constant
    calls.sort(key=lambda call: -sum(getattr(x, "nbytes", 0) for x in pytree.tree_leaves(call)))
    with_rows = [x for x in pytree.tree_leaves(calls[0]) if isinstance(x, torch.Tensor) and x.dim()]
    if with_rows and not any(map(len, with_rows)):
        raise CaptureError("The example holds no sample", allowed="a batch of one or more")
    graph = _capture_first_order(model, calls)
    compare_with_plain_call(graph, _eval_copy(model, cast=False)[0], given[0])
    return graph


def _capture_first_order(model: torch.nn.Module, calls: Sequence[Any]) -> Graph:
    """Read a model with the first order of the calls of which the first two show what it computes for all.

    Torch leaves out slices of all elements, so that only two calls with sizes that a slice shortens show it.

    Raises:
        CaptureError: No order does; the error is that of the first one.
    """
    first: CaptureError | None = None
    for order in islice(_orders(calls), _MOST_ORDERS):
        try:
            graph = _capture_first_way(model, order)
            check(graph, blame="capture")
            if len(order) > 1:
                _check_open_sizes(graph, _eval_copy(model)[0], order[1:], pytree.tree_map(_longer, *order))
        except CaptureError as e:
            first = first or e
            if _DEPENDS_ON_SIZE not in str(e):
                break
        else:
            return graph
    raise first or AssertionError  # there is an order


def _orders(calls: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the calls as they are; with any two of other shapes first; with one and a longer one of its remainders."""
    yield [*calls]
    shapes = [str([getattr(x, "shape", x) for x in pytree.tree_leaves(c)]) for c in calls]
    distinct = [calls[shapes.index(s)] for s in dict.fromkeys(shapes)]
    for pair in list(permutations(distinct, 2))[1:]:
        yield [*pair, *(c for c in calls if all(c is not p for p in pair))]
    for by, c in product(_LONGER, distinct if len(distinct) > 1 else []):
        others = [other for other in calls if other is not c]
        yield [c, pytree.tree_map(partial(_longer, by=by), c, *others), *others]


def check_model(model: Any) -> None:
    """Check that a model can be read at all.

    Raises:
        CaptureError: It is not a module, is quantized, lies on several devices, or a layer's name is not valid text.
    """
    if not isinstance(model, torch.nn.Module):
        hint = "pass the model object, not its class or its weights"
        raise CaptureError("A PyTorch model is an instance of torch.nn.Module", got=type(model).__name__, hint=hint)
    for name, _ in model.named_modules():
        if not _SURROGATES.isdisjoint(name):
            raise CaptureError("The name of a layer contains half a character", got=ascii(name))
    kinds = {type(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}
    if found := sorted(k.__name__ for k in kinds if _QUANTIZED.match(f"{k.__module__}.{k.__qualname__}")):
        hint = "pass the float model; `result.edit(overrides)` changes a result"
        raise CaptureError("The model is quantized already", got=", ".join(found), hint=hint)
    check_device(model)


def _capture_first_way(model: torch.nn.Module, calls: Sequence[Any], axis: int = 0) -> Graph:
    """Read a model with the first of the `ways` to leave sizes open that it accepts.

    Where axis 0 turns out to hold the steps of sequences, the batch is axis 1 if the model accepts that.

    Raises:
        CaptureError: It accepts none; the error is that of the first way.
    """
    tried: list[CaptureError] = [RefusedCall("No input has an axis of samples")] if axis else []
    for sizes in ways(calls, axis):
        try:
            graph = _capture_way(model, calls, sizes)
        except RefusedCall as e:
            tried.append(e)
            continue
        if axis == 0 and sizes and sizes[0].is_batch and mixes_samples(graph):
            with contextlib.suppress(CaptureError):
                return _capture_first_way(model, calls, axis=1)
        if not any(None in graph.shape(i)[: axis + 1] for i in graph.inputs) and any(map(graph.shape, graph.inputs)):
            why = tried[0].what if tried else "the model computes with the number of samples"
            graph.notes.append(f"{FIXED_BATCH}: {why}")
        return graph
    raise tried[0]


def _capture_way(model: torch.nn.Module, calls: Sequence[Any], sizes: Sequence[TiedAxes]) -> Graph:
    """Read a model with these sizes open.

    Raises:
        RefusedCall: The model raises an exception for the example, or for another size.
        CaptureError: See `capture`.
    """
    leaves, tree = pytree.tree_flatten(calls[0])
    if sizes and sizes[0].is_batch and sizes[0].old == 1:
        batch, leaves = sizes[0].doubled(leaves)
        sizes = (batch, *sizes[1:])
    args, kwargs = call = pytree.tree_unflatten(leaves, tree)
    try:
        graph, cast, short = _recorded(model, call, sizes)
    except Unrecordable as e:
        if any(isinstance(m, ScriptedModule) for m in model.modules()):
            hint = "pass the module that was scripted or traced"
            raise RefusedCall(
                f"The calls of the TorchScript program do not show what it computes: {short_message(e.__cause__ or e)}",
                hint=hint,
            ) from e
        copied, cast = _eval_copy(model)
        with _without_compiler():
            example_out = run_in_float32(copied, args, kwargs)
            resized = [_resized_call(copied, call, size) for size in sizes]
        if len(calls) > 1:
            raise CaptureError(_DEPENDS_ON_SIZE, where=users_line(e.__cause__ or e)) from e
        program = export(copied, args, kwargs, sizes)
        graph, short = translate(program, copied if cast else model, call, example_out), program.short
        if any(None in graph.shape(i) for i in graph.inputs) and _agrees(graph, call, example_out):
            _check_batch(graph, resized)
            for other, _ in resized:
                _open_sizes(graph, other)
    if types := sorted({*cast, *short}):
        graph.notes.append(
            f"warning: the model computes in {' and '.join(types)}; it was read, and is simulated, in float32"
        )
    return graph


def _recorded(model: torch.nn.Module, call: Any, sizes: Sequence[TiedAxes]) -> tuple[Graph, set[str], frozenset[str]]:
    """Read a model by watching it run; return the float types, too, that were cast, and those that it casts to.

    Raises:
        Unrecordable: Watching does not show what it computes.
    """
    for folds in (False, True):
        copied, cast = _eval_copy(model)
        own: Any = pytree.tree_map(lambda x: x, call)  # the model may change its dictionaries and lists
        try:
            with _without_compiler():
                program, example_out = record(copied, own[0], own[1], sizes, folds)
            return translate(program, copied if cast else model, call, example_out), cast, program.short
        except Unrecordable as e:
            if folds or not e.writes:
                raise
    raise AssertionError  # the second try returns or raises


def _without_compiler() -> Any:
    """Return a context in which torch.cond is run, not compiled: compiled within a mode, it fails in later calls."""
    loaded = "torch._dynamo" in sys.modules  # to load it takes seconds; while torch.cond loads it, nothing is compiled
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


def _resized_call(model: torch.nn.Module, call: Any, size: TiedAxes) -> tuple[Any, Any]:
    """Return a call with another size of the inputs, and the model's result.

    Raises:
        RefusedCall: The model fails with that size.
    """
    leaves, tree = pytree.tree_flatten(call)
    args, kwargs = other = pytree.tree_unflatten(size.resized(leaves), tree)
    try:
        return other, run_in_float32(model, args, kwargs)
    except RefusedCall as e:
        axes = ", ".join(f"axis {axis} of {describe_value(leaves[i])}" for i, axis in size.places)
        what = f"The model fails with {size.new} in place of {size.old} on {axes}: {short_message(e.__cause__ or e)}"
        raise RefusedCall(what, where=e.where, hint=_FIXED_HINT) from e


def _check_batch(graph: Graph, calls: Sequence[tuple[Any, Any]]) -> None:
    """Compare a graph with an open batch with the model's results for other batches.

    Raises:
        RefusedCall: They differ, as those of a loop over the batch.
    """
    if not all(_agrees(graph, call, out) for call, out in calls):
        raise RefusedCall("The model computes something else for other sizes", hint=_FIXED_HINT)


def _open_sizes(graph: Graph, call: Any) -> None:
    """Open the sizes of results that differ in a call of another batch: torch.export takes `len(x)` for a constant."""
    fixed = [o for n in graph.nodes for o in n.outputs if None not in graph.shape(o)]
    with torch.inference_mode():
        values = run(placed(graph), inputs_on(graph.device, flatten_inputs(graph, *call)), keep=fixed)
    for name in fixed:
        v = graph.values[name]
        pairs = zip(v.shape, getattr(values[name], "shape", v.shape), strict=True)
        graph.values[name] = replace(v, shape=tuple(s if s == found else None for s, found in pairs))


def _agrees(graph: Graph, call: Any, out: Any) -> bool:
    """Return whether a graph computes what the model returned."""
    places = zip(json.loads(graph.out_spec)["leaves"], pytree.tree_leaves(out), strict=True)
    found = {place["output"]: x for place, x in places if "output" in place}  # tensors, and sizes that follow the data
    want = [found[k] for k in range(len(graph.outputs))]
    return first_deviation(graph, flatten_inputs(graph, *call), want) is None


def _longer(x: Any, *others: Any, by: int = 1) -> Any:
    """Return a tensor with more elements along each axis in which others differ from it."""
    for k in varied_axes(x, others):
        x = x.index_select(k, torch.arange(x.shape[k] + by, device=x.device) % x.shape[k])
    return x


def _check_open_sizes(graph: Graph, model: torch.nn.Module, calls: Sequence[Any], longer: Any) -> None:
    """Compare a graph with open sizes with the model on calls of other sizes; sizes that the model refuses are skipped.

    A graph that fails for the longer call, of a size that no batch has, gets a note.

    Raises:
        CaptureError: They compute something else.
    """
    for args, kwargs in (*calls, longer):
        try:
            with padded_sequences(model):
                out = run_in_float32(model, args, kwargs)
        except RefusedCall:
            continue
        inputs = flatten_inputs(graph, args, kwargs)
        if found := first_deviation(graph, inputs, [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]):
            given = ", ".join(map(describe_value, inputs))
            if kwargs is longer[1] and isinstance(found[1], str):
                graph.notes.append(
                    f"warning: sizes that no batch has may fail, as do {given}: give batches of such sizes"
                )
                continue
            raise CaptureError(_DEPENDS_ON_SIZE, got=f"{found[0]}: {found[1]}, of {given}")


def _eval_copy(model: torch.nn.Module, cast: bool = True) -> tuple[torch.nn.Module, set[str]]:
    """Return a copy of the model in eval mode, and the float types that were cast to float32.

    A float32 model, or one that is not cast, shares its parameters with the copy, because nothing writes to them;
    buffers are copied. A model of other float types is copied whole. A tensor with gradient history that a module
    keeps, such as `weight_norm` before torch 2, cannot be deep-copied; it is cloned without history. A wrapper that
    trains a module on several devices calls it, without the work of training.

    Raises:
        CaptureError: A weight is beyond float32.
    """
    with_history = (
        v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor) and not v.is_leaf
    )
    memo: dict[int, Any] = {id(v): v.detach().clone() for v in with_history}
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    floats = floats if cast else set()
    copied = copy.deepcopy(model, memo if floats else memo | {id(p): p for p in model.parameters()}).eval()
    for m in copied.modules():
        if isinstance(m, torch.nn.parallel.DistributedDataParallel):
            m.forward = m.module.__call__  # type: ignore[method-assign]
    if not floats:
        return copied, set()
    copied = copied.float()
    for (name, old), new in zip(model.state_dict().items(), copied.state_dict().values(), strict=True):
        if bool((old.isfinite() & ~new.isfinite()).any()):
            got = float(old.abs().max())
            raise CaptureError(
                f"'{name}' holds numbers outside the range of float32, in which models are read", got=got
            )
    return copied, {str(f).removeprefix("torch.") for f in floats}


def export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[TiedAxes] | None = None
) -> Program:
    """Trace a model, whose `forward` may be replaced for that.

    Calls that write in place stay in the program only where a reader of single calls understands them.

    Args:
        sizes: of them, the batch is open; by default axis 0 of every input that has as many rows as the first.

    Raises:
        CaptureError: naming the user's line and what to change.
    """
    batch = batch_places(next(ways([(args, kwargs)])) if sizes is None else sizes)
    open_axes: dict[int, Any] = {}
    for i, axis in batch:
        tensor = pytree.tree_leaves((args, kwargs))[i]
        open_axes.setdefault(id(tensor), {})[axis] = torch.export.Dim.AUTO
    shapes: Any = None
    if batch:
        _name_keywords(model, kwargs)
        bound = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
        shapes = pytree.tree_map(lambda x: open_axes.get(id(x)), bound)
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):  # where it prints all that it has traced on an error
            program = _decomposed(torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False))
    except Exception as e:  # the user's code, traced by torch.export, may raise anything
        raise_bug(e)
        hint = "rewrite this line with tensor operations, or quantize the part of the model around it"
        if {f.filename for f in traceback.extract_tb(e.__traceback__)} & {rnn.__file__, packing.__file__}:
            hint = "pack by a tensor of lengths, as lengths.cpu(), and give recurrent layers the packed sequence itself"
        elif "DataDependent" in type(e).__name__ or "data-dependent" in str(e).lower():
            raise CaptureError(
                "The model branches on the values of a tensor, which a fixed graph cannot hold",
                where=users_line(e),
                hint="replace the Python `if` by torch.where, or move it out of the model",
            ) from e
        raise CaptureError(f"The model cannot be captured: {short_message(e)}", where=users_line(e), hint=hint) from e
    return replace(_program(program), batch=batch)


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program without operators that are read in parts, and without writes that a reader would miss."""
    decompositions: dict[Any, Any] = {n.target: f for n in program.graph.nodes if (f := decomposition_of(n.target))}
    if decompositions:
        for table in (torch._decomp.decomposition_table, torch.export.default_decompositions()):
            decompositions |= {op: decomposition_of(op, f) for op, f in table.items() if decomposition_of(op)}
    needed = decompositions or needs_functionalization(program.graph)
    return program.run_decompositions(decompositions) if needed else program


def _program(exported: torch.export.ExportedProgram) -> Program:
    """Copy what is read of torch's record, so that readers do not depend on torch's classes."""
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    for n in (n for g in graphs for n in g.nodes if "val" in n.meta):
        n.meta["val"] = pytree.tree_map_only(torch.Tensor, symbolic, n.meta["val"])
    inputs, weight_of = {}, dict[str, str]()
    for n, spec in zip(exported.graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            weight_of[n.name] = str(spec.target)
        elif isinstance(n.meta.get("val"), SymbolicTensor):
            inputs[n.name] = n.name
        else:
            n.meta["val"] = getattr(spec.arg, "value", n.meta.get("val"))
    specs = exported.graph_signature.output_specs
    (returned,) = exported.graph.output_node().args
    results = [x for x, spec in zip(returned, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    constants = {k: v for k, v in exported.constants.items() if isinstance(v, torch.Tensor)}
    weights = {**exported.state_dict, **constants}
    return Program(
        exported.graph, exported.graph_module, weights, weight_of, inputs, results, exported.call_spec.out_spec
    )


def _name_keywords(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Give `forward(**kwargs)` parameters of the names in `kwargs`, because dynamic shapes are given by parameter."""
    forward = model.forward
    old = inspect.signature(forward)
    rest = [p for p in old.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(rest) == len(old.parameters):
        return
    extra = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in kwargs if k not in old.parameters]

    @functools.wraps(forward)
    def named(*args: Any, **keywords: Any) -> Any:
        return forward(*args, **keywords)

    named.__signature__ = old.replace(parameters=[*rest, *extra])  # type: ignore[attr-defined]  # inspect reads it
    model.forward = named  # type: ignore[method-assign]  # of the copy that is captured
