"""Read the user's model into a graph; errors name the mistake in the call, not the place where tracing failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chipfit.calibration.data import SizeMismatch, example_of, split_label
from chipfit.calibration.input_errors import explain_error
from chipfit.errors import CaptureError
from chipfit.frameworks import capture
from chipfit.graph.ir import Graph


def read_model(model: Any, args: Any, kwargs: Mapping[str, Any], other_sizes: Sequence[SizeMismatch] = ()) -> Graph:
    """Capture a model by an example call.

    Args:
        args, kwargs: arguments of the call.
        other_sizes: batches whose sizes differ from those of the example: these sizes stay open in the graph.

    Raises:
        SizeMismatch: the model cannot be captured with these sizes open.
        CaptureError, DataError: the model cannot be captured, or not with these arguments.
    """
    try:
        graph = capture(model, args, kwargs, [example_of(other.batch, model) for other in other_sizes])
        for other in other_sizes:
            split_label(other.batch, graph)
        return graph
    except CaptureError as e:
        for other in other_sizes:
            hint = f"give batches of one size, padded, cut or resized. {e}"
            raise SizeMismatch(other.what, got=other.got, allowed=other.allowed, hint=hint) from e
        error = explain_error(e, model, args, kwargs)
        if error is e:
            raise
        raise error from e
