"""Read a `.tflite` file into a Graph, operator by operator, and compare the graph with LiteRT's floats."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import chipfit.frameworks.tflite.recurrent  # noqa: F401 -- registers readers
from chipfit.engine.run import first_deviation, run
from chipfit.engine.trees import with_states
from chipfit.errors import CaptureError, UnsupportedError
from chipfit.frameworks.tflite.model import Facts, TfliteModel
from chipfit.frameworks.tflite.read import Reading
from chipfit.graph.check import check
from chipfit.graph.ir import FIXED_BATCH, Graph
from chipfit.passes.layout import change_layout, keep_constant_names


def capture(model: TfliteModel, args: Sequence[Any], kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read the network of a file into a Graph with channels first; inputs and outputs keep their layout.

    The batch is open if the network computes every sample by itself, whatever batch the file has.

    Args:
        args, kwargs: one batch of inputs, in the file's order or by name.
        others: not used: a file has one size of everything but the batch.

    Raises:
        CaptureError: The file is quantized already, an operator has no reader, or the inputs do not fit.
    """
    refuse_quantized(model)
    given = inputs_of(model, args, kwargs or {})
    first = [x[: t.shape[0] if t.shape else 1] if x.dim() else x for t, x in zip(model.inputs, given, strict=True)]
    two = [torch.cat((x[:1], x[-1:])) if x.dim() else x for x in given] if model.opens else []
    with model.session():  # which ends before weights are read, so that they are not in memory twice
        wanted = _run(model, first)
        facts = model.facts()
        rows = [[x[k : k + 1] if x.dim() else x for x in two] for k in range(2 if two else 0)]
        each = [_run(model, row, model.streams and k > 0) for k, row in enumerate(rows)]
    with model.content.opened():
        graph = (_opened(model, facts, two, each) if two else None) or _read(model, facts, open_batch=False)
    counts = [shape[0] for i in graph.inputs if (shape := graph.shape(i))]
    if None not in counts:
        graph.notes.append(f"{FIXED_BATCH}: the file computes {counts[0] if counts else 1} samples together")
    found = None if model.requantize else first_deviation(graph, first, wanted)
    if found is not None:
        what = "The graph that was read from the file computes something else than LiteRT"
        raise CaptureError(what, where=f"{model.where}, output '{found[0]}'", got=f"deviation {found[1]}")
    graph.example = tuple(given if None in counts else first)
    return with_states(graph, graph.inputs[len(given) - model.states :]) if model.states else graph


def refuse_quantized(model: TfliteModel) -> None:
    """Raise for a file whose tensors are integers already, unless it is to be quantized again.

    Raises:
        CaptureError: The file is quantized.
    """
    if model.quantized and not model.requantize:
        what = f"The file is quantized already: {len(model.quantized)} of its {len(model.tensors)} tensors are integers"
        hint = "give the float file; or chipfit.load_model(file, requantize=True) (--requantize), with its losses"
        raise CaptureError(what, where=model.where, got=f"for example '{model.quantized[0].name}'", hint=hint)


def inputs_of(model: TfliteModel, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
    """Return a batch in the file's order and types.

    Raises:
        CaptureError: It does not fit the file.
    """
    named = {t.name: t for t in model.inputs}
    given = [kwargs[n] for n in named] if kwargs and kwargs.keys() >= named.keys() else list(args)
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = list(given[0])
    if len(given) == 1 and isinstance(given[0], dict) and given[0].keys() >= named.keys():
        given = [given[0][n] for n in named]
    given = given[: len(named)]  # without a label behind the inputs
    if len(given) != len(named) or not all(isinstance(x, torch.Tensor) for x in given):
        allowed = ", ".join(f"{t.name} {list(t.signature)}" for t in model.inputs)
        raise CaptureError("Inputs do not fit the file", where=model.where, got=f"{len(given)} inputs", allowed=allowed)
    out = []
    for t, x in zip(model.inputs, given, strict=True):
        fits = x.dim() == len(t.signature) and all(
            a in (-1, b) for a, b in zip(t.signature[1:], x.shape[1:], strict=True)
        )
        if not fits:
            what, got = f"Input '{t.name}' has another shape than the file declares", f"{list(x.shape)}"
            allowed, hint = f"[{', '.join(['any', *('any' if d < 0 else str(d) for d in t.signature[1:])])}]", ""
            if x.shape[1:] == t.signature:
                allowed = f"{list(t.signature)}"
                hint = "the file computes one sample, without an axis for a batch: give a list of samples"
            raise CaptureError(what, where=model.where, got=got, allowed=allowed, hint=hint)
        if model.requantize and t.scale is not None and not x.is_floating_point():
            what = f"Input '{t.name}' holds integers as the file stores them; it is quantized again from floats"
            zero, scale = int(t.zero.ravel()[0]), float(t.scale.ravel()[0])
            shifted = f"(x.astype('float32') {'+' if zero < 0 else '-'} {abs(zero)})"
            hint = f"give the numbers that they stand for: {shifted} * {scale:.9g}"
            raise CaptureError(what, where=model.where, got=str(x.dtype), allowed="torch.float32", hint=hint)
        out.append(x.detach().cpu().to(getattr(torch, t.dtype)))
    return out


def _run(model: TfliteModel, inputs: Sequence[torch.Tensor], follows: bool = False) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(y)) for y in model.run([x.numpy() for x in inputs], follows)]


def _opened(
    model: TfliteModel, facts: Facts, two: Sequence[torch.Tensor], each: Sequence[Sequence[torch.Tensor]]
) -> Graph | None:
    """Read the network with an open batch; return None where its samples depend on each other, or on their number.

    Args:
        two: inputs of two samples.
        each: their outputs, computed one at a time.
    """
    try:
        graph = _read(model, facts, open_batch=True)
    except (CaptureError, UnsupportedError):
        return None
    if any(graph.shape(o)[:1] != (None,) for o in graph.outputs):
        return None
    if model.requantize:  # its kernels round otherwise: the graph's own samples are compared
        rows = [[x[k : k + 1] if x.dim() else x for x in two] for k in range(2)]
        try:
            with torch.inference_mode():
                found = [run(graph, row) for row in rows]
        except (RuntimeError, LookupError, TypeError, ValueError):
            return None
        each = [[y[o] for o in graph.outputs] for y in found]
    want = [torch.cat(list(ys)) for ys in zip(*each, strict=True)]
    return graph if first_deviation(graph, two, want) is None else None


def _read(model: TfliteModel, facts: Facts, *, open_batch: bool) -> Graph:
    moved = change_layout(Reading(model, facts, open_batch).graph(), "channels_first")
    keep_constant_names(moved.graph, moved.copies)
    check(moved.graph, blame="layout")
    return moved.graph
