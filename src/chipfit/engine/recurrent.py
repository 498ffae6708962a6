"""Kernels of recurrent layers: one layer, one direction; see `operators/recurrent.yaml`.

torch's own kernels compute them where they have the form; a GRU that resets its state before the product is a loop.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chipfit.engine.operand_checks import checked


def lstm(
    x: Tensor, w: Tensor, r: Tensor, *others: Tensor | None, gates: str, reverse: bool, cell_clip: float | None = None
) -> tuple[Tensor, ...]:
    """Run an LSTM; the other operands are biases, states h and c, a mask and lengths."""
    b, rb, h, c, mask, lengths = _with_missing(others, 6)
    if mask is not None or lengths is not None:
        one = partial(lstm, gates=gates, reverse=False, cell_clip=cell_clip)
        return _masked(one, x, [w, r, b, rb], [_state(x, r, h)[0], _state(x, r, c)[0]], mask, lengths, reverse)
    weights = [_ordered(t, gates, "ifgo") for t in (w, r, b, rb)]
    steps, states = _steps(x, reverse), (_state(x, r, h), _state(x, r, c))
    if cell_clip is None:
        y, _, cell = _run(torch.ops.aten.lstm.input, steps, states, weights)
    else:
        y, cell = _run_clipped(steps, states, weights, cell_clip)
    return *_results(y, x, reverse), cell[0]


def cell_states(x: Tensor, w: Tensor, r: Tensor, *others: Tensor | None, reverse: bool, **attrs: Any) -> Tensor:
    """Return the cell state of an LSTM after each step [N, T, H], in the order in which the steps run.

    Args:
        others: biases and states, as of `lstm`.
        attrs: further attributes of `lstm`.
    """
    b, rb, h, c = _with_missing(others, 4)
    found = list[Tensor]()
    for step in _steps(x, reverse).unbind(1):
        h, c = lstm(step, w, r, b, rb, h, c, reverse=False, **attrs)
        found.append(c)
    return torch.stack(found, 1)


def gru(
    x: Tensor, w: Tensor, r: Tensor, *others: Tensor | None, gates: str, reverse: bool, reset_after: bool
) -> tuple[Tensor, ...]:
    """Run a GRU; the other operands are biases, the state h, a mask and lengths."""
    b, rb, h, mask, lengths = _with_missing(others, 5)
    if mask is not None or lengths is not None:
        one = partial(gru, gates=gates, reverse=False, reset_after=reset_after)
        return _masked(one, x, [w, r, b, rb], [_state(x, r, h)[0]], mask, lengths, reverse)
    weights = [_ordered(t, gates, "rzn") for t in (w, r, b, rb)]
    steps, state = _steps(x, reverse), _state(x, r, h)
    if reset_after:
        y, _ = _run(torch.ops.aten.gru.input, steps, state, weights)
    else:
        y = _reset_before(steps, state[0], *weights)
    return _results(y, x, reverse)


def rnn(x: Tensor, w: Tensor, r: Tensor, *others: Tensor | None, reverse: bool, activation: str) -> tuple[Tensor, ...]:
    """Run a simple recurrent layer; the other operands are those of `gru`.

    Raises:
        ValueError: the activation has another name than "tanh" and "relu".
    """
    b, rb, h, mask, lengths = _with_missing(others, 5)
    kinds = {"tanh": torch.ops.aten.rnn_tanh.input, "relu": torch.ops.aten.rnn_relu.input}
    if activation not in kinds:
        raise ValueError(f"a recurrent layer has no activation {activation!r}")
    if mask is not None or lengths is not None:
        one = partial(rnn, reverse=False, activation=activation)
        return _masked(one, x, [w, r, b, rb], [_state(x, r, h)[0]], mask, lengths, reverse)
    y, _ = _run(kinds[activation], _steps(x, reverse), _state(x, r, h), [w, r, b, rb])
    return _results(y, x, reverse)


def _with_missing(operands: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
    """Return operands with None for those that are missing at the end."""
    return (*operands, *[None] * count)[:count]


def _ordered(t: Tensor | None, gates: str, order: str) -> Tensor | None:
    """Return a weight with its gates in another order.

    Raises:
        ValueError: the letters are not those of the order.
    """
    if sorted(gates) != sorted(order):
        raise ValueError(f"gates are {gates!r}, not the letters of {order!r}")
    if t is None or gates == order:
        return t
    return t.reshape(len(order), -1, *t.shape[1:])[[gates.index(g) for g in order]].flatten(0, 1)


def _steps(x: Tensor, reverse: bool) -> Tensor:
    """Return the steps [N, T, F] in the order in which they run."""
    x = x if x.dim() == 3 else x.unsqueeze(1)
    return x.flip(1) if reverse else x


def _state(x: Tensor, r: Tensor, state: Tensor | None) -> Tensor:
    """Return a state as [1, N, H]."""
    return x.new_zeros(1, x.shape[0], r.shape[1]) if state is None else state.expand(x.shape[0], -1).unsqueeze(0)


def _results(y: Tensor, x: Tensor, reverse: bool) -> tuple[Tensor, ...]:
    """Return the states of all steps, in the order of the operand, and the last one; of one step only that."""
    last = y[:, -1]
    return ((y.flip(1) if reverse else y), last) if x.dim() == 3 else (last,)


def _masked(
    step: Callable[..., Any],
    x: Tensor,
    weights: Sequence[Any],
    states: list[Tensor],
    mask: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Run a layer step by step; states stay as they are where the mask is false, and where no step is left."""
    if x.is_meta:
        return x.new_empty(*x.shape[:2], states[0].shape[1]), *states
    valid = None if lengths is None else torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    moves = valid if mask is None else mask if valid is None else mask & valid
    assert moves is not None
    order, made = range(x.shape[1]), dict[int, Tensor]()
    for t in reversed(order) if reverse else order:
        new = step(x[:, t], *weights, *states)
        states = [torch.where(moves[:, t : t + 1], n, s) for n, s in zip(new, states, strict=True)]
        made[t] = states[0]
    y = torch.stack([made[t] for t in order], 1)
    return (y if valid is None else y * valid.unsqueeze(2)), *states


def _run(kernel: Any, x: Tensor, state: Any, weights: Sequence[Tensor | None]) -> Any:
    """Call one of torch's kernels for one layer."""
    w, r, b, rb = weights
    biases = [] if b is None and rb is None else [_zeros_like(b, rb), _zeros_like(rb, b)]
    function = checked(kernel, _shapes if x.is_meta else None)
    return function(x, state, [w, r, *biases], bool(biases), 1, 0.0, False, False, True)


def _shapes(x: Tensor, state: Any, weights: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    """Return the results of a kernel on meta tensors, for which torch would take every step in Python."""
    states = state if isinstance(state, tuple) else (state,)
    return x.new_empty(*x.shape[:2], weights[1].shape[1]), *map(torch.empty_like, states)


def _run_clipped(
    x: Tensor, states: tuple[Tensor, Tensor], weights: Sequence[Tensor | None], most: float
) -> tuple[Tensor, Tensor]:
    """Run an LSTM whose cell state is clipped to -most .. most; return h after each step and c after the last one."""
    (w, r, b, rb), (h, c), out = weights, (states[0][0], states[1][0]), []
    assert w is not None and r is not None
    for gates in torch.nn.functional.linear(x, w, b).unbind(1):
        i, f, g, o = (gates + torch.nn.functional.linear(h, r, rb)).chunk(4, -1)
        c = (torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)).clamp(-most, most)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out, 1), c.unsqueeze(0)


def _zeros_like(t: Tensor | None, other: Tensor | None) -> Tensor:
    return t if t is not None else torch.zeros_like(other)  # type: ignore[arg-type]  # one of two is a tensor


def _reset_before(
    x: Tensor, h: Tensor, w: Tensor | None, r: Tensor | None, b: Tensor | None, rb: Tensor | None
) -> Tensor:
    """Run a GRU whose reset gate multiplies the state, as in Cho et al. 2014 (arXiv 1406.1078), equations 5 to 8."""
    assert w is not None and r is not None
    bias = b if rb is None else rb if b is None else b + rb
    inputs, out, size = torch.nn.functional.linear(x, w, bias), [], h.shape[-1]
    for step in inputs.unbind(1):
        gates = torch.sigmoid(step[:, : 2 * size] + torch.nn.functional.linear(h, r[: 2 * size]))
        reset, update = gates.chunk(2, -1)
        new = torch.tanh(step[:, 2 * size :] + torch.nn.functional.linear(reset * h, r[2 * size :]))
        h = new + update * (h - new)
        out.append(h)
    return torch.stack(out, 1)


def svdf(x: Tensor, w: Tensor, w_time: Tensor, b: Tensor | None, state: Tensor, *, rank: int) -> Tensor:
    """Filter features, then each filter's last values in time.

    Source: Nakkiran et al. 2015, Compressing Deep Neural Networks using a Rank-Constrained Topology.
    """
    before, features = state.reshape(w_time.shape).t()[1:], torch.nn.functional.linear(x, w)
    y = (torch.cat((before, features)).unfold(0, w_time.shape[1], 1) * w_time).sum(-1)
    y = y.reshape(len(y), -1, rank).sum(-1)
    return y if b is None else y + b
