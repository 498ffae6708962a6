"""Packed sequences of `torch.nn.utils.rnn` while a model is recorded: padded batches with their lengths.

How many rows a packed sequence has depends on numbers of the input, which no file can hold. Recurrent layers of padded
batches take lengths instead, so that while a model is recorded, PyTorch's functions that pack, unpack and run layers
have other code. The code is replaced, not the functions, because models import them by name.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from chipfit.frameworks.torch.program import Unrecordable

#: true in a thread that records a model
_RECORDS: ContextVar[bool] = ContextVar("records", default=False)
_LOCK, _IN_USE = threading.Lock(), [0]  #: number of threads that need the other code now


def _run(kind: str, x: Tensor, lengths: Tensor, hx: Any, params: list[Tensor], *settings: Any) -> list[Tensor]:
    """Run layers over padded sequences [N, T, F] by PyTorch's kernel for packed ones; return y [N, T, H] and states."""
    has_biases, layers, ways = settings[:3]
    lengths, order = lengths.cpu().clamp(max=x.shape[1]).sort(descending=True)
    data, counts = torch._VF._pack_padded_sequence(x[order], lengths, True)
    states = [h[:, order] for h in hx] if isinstance(hx, (list, tuple)) else hx[:, order]
    y, *last = getattr(torch._VF, kind)(data, counts, states, params, has_biases, layers, 0.0, False, ways)
    y, _ = torch._VF._pad_packed_sequence(y, counts, True, 0.0, x.shape[1])
    back = order.argsort()
    return [y[back], *(h[:, back] for h in last)]


_LIBRARY = torch.library.Library("chipfit", "DEF")
for _kind, _states in {"lstm": "Tensor[]", "gru": "Tensor", "rnn_tanh": "Tensor", "rnn_relu": "Tensor"}.items():
    _name = f"padded_{_kind}"
    _LIBRARY.define(
        f"{_name}(Tensor input, Tensor lengths, {_states} hx, Tensor[] params, bool has_biases, int num_layers, "
        f"bool bidirectional, bool batch_first=True) -> Tensor[]"
    )
    _LIBRARY.impl(_name, partial(_run, _kind), "CompositeExplicitAutograd")


class Padded(rnn.PackedSequence):
    """A padded batch [N, T, F] in place of a packed sequence."""

    def __new__(cls, *args: Any) -> "Padded":
        return tuple.__new__(cls, (*args, None, None))

    def __init__(self, x: Tensor, lengths: Tensor, ends_in_zeros: bool = False) -> None:
        self.x, self.lengths, self.ends_in_zeros = x, lengths, ends_in_zeros

    @property
    def data(self) -> Any:
        """The rows of the packed sequence, which there are not.

        Raises:
            Unrecordable: always.
        """
        raise Unrecordable

    batch_sizes = data


def pack(x: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    """Return a batch in place of a packed sequence."""
    if not _RECORDS.get():
        return _ORIGINALS[rnn.pack_padded_sequence](x, lengths, batch_first, enforce_sorted)
    if x.dim() != 3:
        raise Unrecordable
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return Padded(x if batch_first else x.transpose(0, 1), lengths)


def unpack(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Any:
    """Return data with the padding value behind the end of each sequence, and the lengths."""
    if not isinstance(sequence, Padded):
        return _ORIGINALS[rnn.pad_packed_sequence](sequence, batch_first, padding_value, total_length)
    y, steps = sequence.x, sequence.x.shape[1]
    if total_length is not None and total_length != steps:
        longer = total_length > steps
        y = nn.functional.pad(y, (0, 0, 0, total_length - steps)) if longer else y[:, :total_length]
    if padding_value or not sequence.ends_in_zeros:
        valid = torch.arange(y.shape[1], device=y.device) < sequence.lengths.to(y.device).unsqueeze(1)
        y = torch.where(valid.unsqueeze(2), y, padding_value)
    return y if batch_first else y.transpose(0, 1), sequence.lengths


def run(module: Any, x: Any, hx: Any = None) -> Any:
    """Run a recurrent layer; of a padded batch, over as many steps as each sequence has."""
    if not isinstance(x, Padded):
        kind: Any = next(c for c in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(module, c))
        return _ORIGINALS[kind.forward](module, x, hx)
    if module.proj_size:
        raise Unrecordable
    many = isinstance(module, nn.LSTM)
    if hx is None:
        count = module.num_layers * (2 if module.bidirectional else 1)
        zeros = x.x.new_zeros(count, x.x.shape[0], module.hidden_size)
        hx = (zeros, zeros) if many else zeros
    operator = getattr(torch.ops.chipfit, f"padded_{module.mode.lower()}").default
    settings = module.bias, module.num_layers, module.bidirectional
    y, *last = operator(x.x, x.lengths, [*hx] if many else hx, module._flat_weights, *settings)
    return Padded(y, x.lengths, True), tuple(last) if many else last[0]


def _packs(*args: Any, **kwargs: Any) -> Any:
    from chipfit.frameworks.torch import packed

    return packed.pack(*args, **kwargs)


def _unpacks(*args: Any, **kwargs: Any) -> Any:
    from chipfit.frameworks.torch import packed

    return packed.unpack(*args, **kwargs)


def _runs(*args: Any, **kwargs: Any) -> Any:
    from chipfit.frameworks.torch import packed

    return packed.run(*args, **kwargs)


#: function of PyTorch -> the one whose code it has meanwhile, which finds this module whatever the globals are
_REPLACED: dict[Any, Any] = {
    rnn.pack_padded_sequence: _packs,
    rnn.pad_packed_sequence: _unpacks,
    **{layer.forward: _runs for layer in (nn.LSTM, nn.GRU, nn.RNN)},
}


def _copy(f: Any) -> Any:
    return FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)


_ORIGINALS = {f: _copy(f) for f in _REPLACED}


@contextlib.contextmanager
def padded_sequences(model: nn.Module) -> Iterator[None]:
    """Let this thread see padded batches in place of packed sequences, if the model has recurrent layers."""
    if not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    token = _RECORDS.set(True)
    _replace(1)
    try:
        yield
    finally:
        _replace(-1)
        _RECORDS.reset(token)


def _replace(change: int) -> None:
    """Give PyTorch's functions the other code for the first thread that needs it; theirs again after the last one."""
    with _LOCK:
        _IN_USE[0] += change
        for f, other in _REPLACED.items():
            f.__code__ = (other if _IN_USE[0] else _ORIGINALS[f]).__code__
