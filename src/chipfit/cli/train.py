"""Training from the command line: on labelled data, or with a loop of the user."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from chipfit.calibration.data import split_label
from chipfit.calibration.progress import Progress
from chipfit.errors import ConfigError, DataError, TrainingError
from chipfit.frameworks import adapter_of
from chipfit.import_by_name import call_factory, import_by_name
from chipfit.registry import parse_call, registered
from chipfit.result import Result

#: number of images used to measure top-1 accuracy
_EVALUATED_IMAGES = 4096


def parse_method(text: str) -> Any:
    """Return the method of --method: name or module:Class of an algorithm or of quantizers, perhaps with options."""
    if ":" not in (place := text.partition("(")[0]):
        return text
    thing, options = import_by_name(place, "method", ConfigError), text.removeprefix(place)
    name = next((n for n, known in registered("training").items() if known is thing), "")
    if hasattr(thing, "hosted"):
        return thing.hosted(**parse_call(f"f{options}")[1])
    return name + options if name else thing


class _Passes:
    """The batches of a function without arguments, which is called for each pass over them."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def train_with_loop(result: Result, text: str, data: Any) -> None:
    """Train the model with the user's `function(model, data)`; `data` can be iterated once for each epoch.

    Raises:
        ConfigError: there is no such function, or it fails.
    """
    loop = import_by_name(text, "training loop", ConfigError)
    if not callable(loop):
        raise ConfigError("Training loop must be a function(model, data)", got=type(loop).__name__)
    batches = _Passes(data) if callable(data) and not isinstance(data, Iterable) else data
    call_factory(functools.partial(loop, result.model, batches), text, "training loop", ConfigError)


def train_classifier(
    result: Result, data: Any, epochs: int, rate: float, batch_size: int, seed: int, say: Callable[[str], None]
) -> None:
    """Train the model as a classifier.

    Raises:
        DataError: the data have no labels, or labels are not classes of the model.
        TrainingError: the loss is NaN or infinite.
    """
    device, (inputs, labels) = result.graph.device, _inputs_and_labels(data, result)
    probabilities = result.graph.outputs[0] in {o for n in result.graph.nodes if n.op == "Softmax" for o in n.outputs}
    steps = -(-len(labels) // batch_size)
    step = adapter_of(result.graph.framework).stepper(result.model, rate, epochs * steps, probabilities)
    before, shown, generator = _top1(result, inputs, labels), Progress(True), torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(labels), generator=generator).split(batch_size)
        total = 0.0
        for k, rows in enumerate(shown.count(f"epoch {epoch} of {epochs}", order, steps), 1):
            loss = step([x[rows].to(device) for x in inputs], labels[rows].to(device))
            if not math.isfinite(loss):
                hint = "lower --rate, or check the data for NaN and infinite numbers"
                raise TrainingError(f"The loss is {loss}", where=f"epoch {epoch}, step {k}", hint=hint)
            total += loss
        say(f"epoch {epoch} of {epochs}: loss {total / steps:.4f}")
    count, after = min(len(labels), _EVALUATED_IMAGES), _top1(result, inputs, labels)
    say(f"top-1 on {count} of the training images: {before:.1%} before, {after:.1%} after")


def _inputs_and_labels(data: Any, result: Result) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return all inputs, flat, and all labels.

    Raises:
        DataError: see `train_classifier`.
    """
    batches: Iterable[Any] = data() if callable(data) and not isinstance(data, Iterable) else data
    pairs = [split_label(b, result.graph) for b in batches]
    graph, hint = result.graph, "or train with a function of your own: --loop module:function"
    if not pairs or any(y is None for _, y in pairs):
        got, allowed = "batches without labels" if pairs else "no data", "x and y in the .npz file, or (input, label)"
        raise DataError("Training requires labels", got=got, allowed=allowed, hint=hint)
    shape = graph.shape(graph.outputs[0])
    labels = torch.cat([torch.as_tensor(y) for _, y in pairs])
    if len(graph.outputs) != 1 or len(shape) != 2 or labels.dim() != 1 or labels.is_floating_point():
        got = f"{len(graph.outputs)} outputs, the first {list(shape)}; labels {list(labels.shape)} of {labels.dtype}"
        allowed = "one output [N, classes], one integer label per image"
        raise DataError("Model must be a classifier", got=got, allowed=allowed, hint=hint)
    if int(labels.min()) < 0 or int(labels.max()) >= (shape[1] or 0):
        got, allowed = f"{int(labels.min())} to {int(labels.max())}", f"0 to {(shape[1] or 0) - 1}"
        raise DataError("Labels must be classes of the model", got=got, allowed=allowed)
    return [torch.cat(list(xs)) for xs in zip(*(x for x, _ in pairs), strict=True)], labels.long()


def _top1(result: Result, inputs: list[torch.Tensor], labels: torch.Tensor) -> float:
    right, count, device = 0, min(len(labels), _EVALUATED_IMAGES), result.graph.device
    with torch.no_grad():
        for rows in torch.arange(count).split(64):
            out = result.model.run_flat([x[rows].to(device) for x in inputs])[0]
            right += int((out.argmax(1).cpu() == labels[rows]).sum())
    return right / count
