"""Compare a captured graph with its model on an example, and name the layer at fault."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from chipfit.engine.run import first_deviation
from chipfit.errors import CaptureError, raise_bug, short_message
from chipfit.frameworks.keras.backend import forward
from chipfit.frameworks.keras.translate import calls_before, functional, leaves
from chipfit.graph.ir import Graph


def outputs_of(model: Any, example: Any) -> list[torch.Tensor]:
    """Return the results of a model on an example.

    Raises:
        CaptureError: The model fails.
    """
    try:
        return leaves(forward(model, example))
    except Exception as e:  # the user's code may raise anything
        raise_bug(e)
        raise CaptureError(f"The model fails on the example input: {short_message(e)}") from e


def compare(graph: Graph, model: Any, example: Any, want: Sequence[torch.Tensor], read: Callable[[Any], Graph]) -> None:
    """Compare the graph with the model on an example, to find layers that compute something else when they are traced.

    Args:
        want: results of the model, from before it was traced.
        read: function that reads a part of the model into a graph.

    Raises:
        CaptureError: They compute something else, or the model fails.
    """
    found = first_deviation(graph, [x.detach() for x in leaves(example)], want)
    if found is None:
        return
    if _differ(want, outputs_of(model, example)):
        layer = _first(model, lambda part: _differ(outputs_of(part, example), outputs_of(part, example)))
        what = f"{layer} returns other numbers at each call, although it is called with training=False"
        hint = "let its `call` take the argument `training`, and draw random numbers only where it is true"
        raise CaptureError(what, hint=hint)
    inputs = [x.detach() for x in leaves(example)]
    layer = _first(model, lambda part: first_deviation(read(part), inputs, outputs_of(part, example)) is not None)
    hint = "write its `call` with keras.ops alone, without state and without branches on values"
    what = f"{layer} computes something else when it is called than when it is traced"
    raise CaptureError(what, where=f"output '{found[0]}'", got=f"deviation {found[1]}", hint=hint)


def _differ(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    same = all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))
    return not same


def _first(model: Any, faulty: Callable[[Any], bool]) -> str:
    """Return the name and class of the first layer whose results are faulty; of the model where it has a `call`."""
    inner, described = functional(model), f"The model '{model.name}' ({type(model).__name__})"
    if inner is None:
        return described
    calls = [c for c in calls_before(leaves(inner._outputs_struct), {}) if c.input_tensors]

    def is_faulty(call: Any) -> bool:
        try:
            return faulty(keras.Model(inner._inputs_struct, list(call.outputs)))
        except CaptureError:
            return True

    at = bisect_left(calls, True, key=is_faulty)
    if at == len(calls):
        return described
    operation = calls[at].operation
    return f"Layer '{operation.name}' ({type(operation).__name__})"
