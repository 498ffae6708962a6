"""Read the user's model into a graph; errors name the mistake in the call, not the place where tracing failed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chipfit.calibration.data import SizeMismatch, example_of, split_label
from chipfit.calibration.input_errors import explain_error
from chipfit.errors import CaptureError, ChipfitError
from chipfit.files import wrap_read_errors
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
