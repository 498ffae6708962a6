"""Read the user's model into a graph; errors name the mistake in the call, not the place where tracing failed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from chipfit.calibration.data import Call, SizeMismatch, call_without_label, first_rows, split_label
from chipfit.calibration.input_errors import example_rows, explain_error, refuse_one_sample
from chipfit.calibration.signature import is_optional, optional_labels
from chipfit.engine.trees import batch_axes
from chipfit.errors import CaptureError, ChipfitError, RefusedCall
from chipfit.files import wrap_read_errors
from chipfit.frameworks import adapter_of, capture, framework_of
from chipfit.graph.ir import FIXED_BATCH, Graph


def read_model(
    model: Any, args: Any, kwargs: Any, other_sizes: Sequence[SizeMismatch] = (), *, of_data: bool = False
) -> Graph:
    """Capture a model by an example call.

    Args:
        args, kwargs: arguments of the call.
        other_sizes: batches whose sizes differ from those of the example: these sizes stay open in the graph.
        of_data: the call is the first batch of the data, which may have a label as its last item, and of which two
            samples are enough.

    Raises:
        SizeMismatch: the model cannot be captured with these sizes open.
        CaptureError, DataError: the model cannot be captured, or not with these arguments.
    """
    calls = [(tuple(args), dict(kwargs)), *(call_without_label(other.batch, model) for other in other_sizes)]
    try:
        graph = _without_label(model, calls) if of_data else capture(model, *calls[0], calls[1:])
        if not batch_axes(graph):
            refuse_one_sample(model, args)
        for other in other_sizes:
            split_label(other.batch, graph)
        return graph
    except CaptureError as e:
        for other in other_sizes:
            hint = f"give batches of one size, padded, cut or resized. {e}"
            raise SizeMismatch(other.what, got=other.got, allowed=other.allowed, hint=hint) from e
        error = explain_error(e, model, args, kwargs, adapter_of(framework_of(model)).input_sizes(model))
        if error is e:
            raise
        raise error from e


def _without_label(model: Any, calls: Sequence[Call]) -> Graph:
    """Capture a model by batches without labels: named ones, or a last item that it refuses or does not read.

    It must be possible to call the model without them.
    """
    args, kwargs = calls[0]
    if named := optional_labels(model, kwargs):
        try:
            return _of_few_rows(model, [(a, {n: x for n, x in k.items() if n not in named}) for a, k in calls])
        except CaptureError:  # the model makes other inputs from them, as some decoders do
            pass
    optional = len(args) > 1 and not kwargs and is_optional(model, len(args))
    try:
        graph = _of_few_rows(model, calls)
    except CaptureError:
        if not optional:
            raise
        try:
            return _of_few_rows(model, [(a[:-1], {}) for a, _ in calls])
        except CaptureError:  # the first error shows the call as the data have it
            pass
        raise
    if optional and isinstance(args[-1], Tensor) and graph.inputs[-1] not in {*graph.users(), *graph.outputs}:
        return _of_few_rows(model, [(a[:-1], {}) for a, _ in calls])
    return graph


def _of_few_rows(model: Any, calls: Sequence[Call]) -> Graph:
    """Capture a model by the first samples of each batch; by whole batches if it refuses them or takes no others."""
    few = [first_rows(call, example_rows(model)) for call in calls]
    try:
        graph = capture(model, *few[0], few[1:])
        cut_elsewhere = 0 not in batch_axes(graph).values() or any(n.startswith(FIXED_BATCH) for n in graph.notes)
        if few[0] is calls[0] or not cut_elsewhere:
            return graph
    except RefusedCall as e:
        if few[0] is calls[0]:
            raise
        try:
            return capture(model, *calls[0], calls[1:])
        except CaptureError:
            raise e from None
    return capture(model, *calls[0], calls[1:])


def load_weights(model: Any, file: Path, failure: type[ChipfitError]) -> None:
    """Load a safetensors file of weights into a model of PyTorch.

    Raises:
        failure: the model is of another framework, or the file cannot be read or does not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not hasattr(model, "load_state_dict"):
        got, hint = type(model).__name__, "load them in the factory, or save a .keras file with them"
        raise failure("Files of weights are supported for PyTorch models only", where=str(file), got=got, hint=hint)
    try:
        with wrap_read_errors(file, failure, "The weights file"):
            model.load_state_dict(load_file(str(file)))
    except (SafetensorError, RuntimeError) as e:  # another format, missing keys, wrong shapes
        why, hint = " ".join(str(e).split())[:300], "safetensors with the model's own parameter names"
        raise failure(f"The weights cannot be read: {why}", where=str(file), hint=hint) from e
