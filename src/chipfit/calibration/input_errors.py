"""Messages for common mistakes with input data: extra labels, wrong names, no batch axis, wrong layout or type."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chipfit.calibration.signature import expected_inputs
from chipfit.engine.types import describe_value
from chipfit.errors import ChipfitError, DataError
from chipfit.graph.placement import device_of, inputs_on

#: convolution -> number of axes of its input
_RANKS: dict[Any, int] = {torch.nn.Conv1d: 3, torch.nn.Conv2d: 4, torch.nn.Conv3d: 5}
Sizes = Mapping[str, Sequence[int | None]]  #: name of an input -> its shape, None for open sizes
_UNDECLARED: Sizes = {}
ONE_SAMPLE = "this is one sample: give batches, as sample[None], a DataLoader or dataset.batch(16) makes them"
LABELS = "yield the inputs, or the inputs and one label behind them: (x, y)"


def example_rows(model: Any) -> int:
    """Return the number of samples with which a model is captured: two, or the batch size that it fixes."""
    return fixed_batch(model) or 2


def fixed_batch(model: Any) -> int:
    """Return the batch size that the inputs of a Keras model fix; 0 if there is none."""
    given = getattr(model, "inputs", None)
    shapes = [getattr(x, "shape", None) for x in given] if isinstance(given, (list, tuple)) else []
    return max((s[0] for s in shapes if s and isinstance(s[0], int)), default=0)


def layout_hint(got: Sequence[int], want: Sequence[int | None]) -> str:
    """Return a hint if a tensor lacks the batch axis or has its channels at the other end; "" otherwise."""

    def fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
        return len(shape) == len(wanted) and all(w in (None, s) for s, w in zip(shape, wanted, strict=True))

    if fits(got, want):
        return ""
    if fits(got, want[1:]):
        return ONE_SAMPLE
    batch, *rest = got or [0]
    if len(rest) < 2:
        return ""
    last_to_first = ", ".join(map(str, (0, len(rest), *range(1, len(rest)))))
    first_to_last = ", ".join(map(str, (0, *range(2, len(rest) + 1), 1)))
    if fits((batch, rest[-1], *rest[:-1]), want):
        return f"channels come last here and first in the model: x.permute({last_to_first})"
    if fits((batch, *rest[1:], rest[0]), want):
        return f"channels come first here and last in the model: x.permute({first_to_last})"
    return ""


def explain_error(
    refusal: ChipfitError, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sizes = _UNDECLARED
) -> ChipfitError:
    """Return an error about the input data if a common mistake explains why capture failed; else `refusal` itself.

    Args:
        refusal: the error with which capture failed.
        args, kwargs: the example batch.
        sizes: shapes that a file declares for its inputs, by name.
    """
    if kwargs or (len(args) == 1 and isinstance(args[0], Mapping)):
        return _wrong_names(model, kwargs or args[0], sizes) or refusal
    return _wrong_items(model, args, sizes) or _wrong_first_tensor(model, args, sizes) or refusal


def _wrong_names(model: Any, batch: Mapping[str, Any], sizes: Sizes) -> ChipfitError | None:
    """Return an error if no key of a batch is the name of an input."""
    names = list(inspect.signature(model.forward).parameters) if hasattr(model, "forward") else [*sizes]
    if not batch.keys().isdisjoint(names):
        return None
    return DataError(
        "The names in the batches are not those of the model's inputs",
        got=", ".join(map(str, batch)),
        allowed=", ".join(names) or f"{expected_inputs(model)} inputs by position",
        hint="rename them, or yield tuples in the order of the inputs",
    )


def _wrong_items(model: Any, args: Sequence[Any], sizes: Sizes) -> ChipfitError | None:
    """Return an error if a batch holds more items than the model takes, or text."""
    count = expected_inputs(model)
    if count is not None and len(args) > count:
        shape = ", ".join(map(str, args))
        hint = f"torch.randn({shape}) has this shape" if all(isinstance(a, int) for a in args) else LABELS
        what = f"A batch holds {len(args)} items, and the model takes {count}"
        return DataError(what, got=_shapes(args), hint=hint)
    text = next((a for a in args if isinstance(a, str)), None)
    if text is None or not (sizes or isinstance(model, torch.nn.Module)):
        return None
    what = "A batch holds text in the place of numbers"
    return DataError(what, got=text[:120], hint="read the files, as with PIL or numpy, and give tensors")


def _wrong_first_tensor(model: Any, args: Sequence[Any], sizes: Sizes) -> ChipfitError | None:
    """Return an error if the first tensor of a batch has another type or shape than the model's first input."""
    x, want = next((a for a in args if isinstance(a, torch.Tensor)), None), _expected_shape(model)
    if len(sizes) == 1:
        want = (None, *next(iter(sizes.values()))[1:])
    if x is None or want is None:
        return None
    if not sizes and not x.is_floating_point() and x.dim() > 2:
        what = "The inputs hold integers, and the model computes with floats"
        hint = "convert and scale them as in training, for example x.float() / 255"
        return DataError(what, got=_shapes(args), allowed="float32", hint=hint)
    hint = layout_hint(tuple(x.shape), want)
    if not hint and x.dim() == len(want) - 1:  # axis 0 of the example is not the batch
        hint = ONE_SAMPLE if x.dim() > 2 or x.shape[0] == want[1] else axes_differ(x.dim(), len(want))
    return _wrong_shape(args, want, hint) if hint else None


def refuse_one_sample(model: Any, args: Sequence[Any]) -> None:
    """Check that an example has a batch axis, for models that run on one sample as well.

    Raises:
        DataError: The first input is one sample of what the model's first convolution takes, and reaches it as such.
    """
    x, want = next((a for a in args if isinstance(a, torch.Tensor)), None), _expected_shape(model)
    if x is None or want is None or layout_hint(tuple(x.shape), want) != ONE_SAMPLE:
        return
    if not isinstance(model, torch.nn.Module) or _rank_at_first_convolution(model, args) != len(want):
        raise _wrong_shape(args, want, ONE_SAMPLE)


def axes_differ(given: int, wanted: int) -> str:
    """Return a hint about data with another number of axes than an input."""
    return f"these data have {given} axes, and the model takes {wanted}: are they of another model?"


def _rank_at_first_convolution(model: torch.nn.Module, args: Sequence[Any]) -> int:
    """Return the number of axes of the tensor that reaches the model's first convolution; 0 if none does."""
    ranks: list[int] = []
    model = copy.deepcopy(model).eval()  # the user's model keeps its mode and gets no hook
    first = _first_convolution(model)
    assert first is not None
    first.register_forward_pre_hook(lambda _, inputs: ranks.append(inputs[0].dim()))
    device = device_of(model)
    with torch.no_grad():
        model(*(inputs_on(device, [a])[0] if isinstance(a, torch.Tensor) else a for a in args))
    return ranks[0] if ranks else 0


def _first_convolution(model: torch.nn.Module) -> torch.nn.Module | None:
    return next((m for m in model.modules() if isinstance(m, tuple(_RANKS))), None)


def _wrong_shape(args: Sequence[Any], want: Sequence[int | None], hint: str) -> DataError:
    allowed = str(["batch", *("any" if d is None else d for d in want[1:])])
    what = "The inputs do not have the shape that the model takes"
    return DataError(what, got=_shapes(args), allowed=allowed, hint=hint)


def _expected_shape(model: Any) -> tuple[int | None, ...] | None:
    """Return the input shape of a Keras model, or what the first convolution of a PyTorch model implies; else None."""
    known = getattr(model, "input_shape", None)
    if isinstance(known, tuple) and known and known[0] is None:
        return known
    if not isinstance(model, torch.nn.Module):
        return None
    first: Any = _first_convolution(model)
    rank = next((r for kind, r in _RANKS.items() if isinstance(first, kind)), 0)
    return (None, int(first.in_channels), *[None] * (rank - 2)) if rank else None


def _shapes(args: Sequence[Any]) -> str:
    return ", ".join(map(describe_value, args))
