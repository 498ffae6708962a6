"""Recurrent layers in keras.ops: one layer, one direction; see `operators/recurrent.yaml`."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops


def lstm(x: Any, w: Any, r: Any, *rest: Any, gates: str, reverse: bool, cell_clip: float | None) -> tuple[Any, ...]:
    """Run an LSTM."""
    b, rb, h, c, mask = _filled(rest, 5)

    def step(states: Any, x_t: Any) -> Any:
        h, c = states
        of = dict(zip(gates, ops.split(x_t + h @ ops.transpose(r), 4, -1), strict=True))
        c = ops.sigmoid(of["f"]) * c + ops.sigmoid(of["i"]) * ops.tanh(of["g"])
        c = c if cell_clip is None else ops.clip(c, -cell_clip, cell_clip)
        h = ops.sigmoid(of["o"]) * ops.tanh(c)
        return h, c

    return _scan(step, x, _product(x, w, _bias(b, rb)), (_state(x, r, h), _state(x, r, c)), mask, reverse)


def gru(x: Any, w: Any, r: Any, *rest: Any, gates: str, reverse: bool, reset_after: bool) -> tuple[Any, ...]:
    """Run a GRU."""
    b, rb, h, mask = _filled(rest, 4)
    bias, size = b if reset_after else _bias(b, rb), r.shape[1]
    own = rb if reset_after else None

    def step(states: Any, x_t: Any) -> Any:
        (h,) = states
        y = _product(h, r, own)
        of = dict(zip(gates, ops.split(ops.sigmoid(x_t[:, : 2 * size] + y[:, : 2 * size]), 2, -1), strict=False))
        y_new = of["r"] * y[:, 2 * size :] if reset_after else _product(of["r"] * h, r[2 * size :], None)
        new = ops.tanh(x_t[:, 2 * size :] + y_new)
        h = new + of["z"] * (h - new)
        return (h,)

    return _scan(step, x, _product(x, w, bias), (_state(x, r, h),), mask, reverse)


def rnn(x: Any, w: Any, r: Any, *rest: Any, reverse: bool, activation: str) -> tuple[Any, ...]:
    """Run a simple recurrent layer."""
    (b, rb, h, mask), f = _filled(rest, 4), ops.tanh if activation == "tanh" else ops.relu

    def step(states: Any, x_t: Any) -> Any:
        h = f(x_t + states[0] @ ops.transpose(r))
        return (h,)

    return _scan(step, x, _product(x, w, _bias(b, rb)), (_state(x, r, h),), mask, reverse)


def _filled(given: Sequence[Any], count: int) -> list[Any]:
    return [*given, *[None] * (count - len(given))]


def _bias(b: Any = None, rb: Any = None) -> Any:
    return rb if b is None else b if rb is None else b + rb


def _product(x: Any, w: Any, bias: Any) -> Any:
    y = x @ ops.transpose(w)
    return y if bias is None else y + bias


def _state(x: Any, r: Any, state: Any) -> Any:
    return ops.zeros((ops.shape(x)[0], r.shape[1]), x.dtype) if state is None else state


def _scan(step: Callable[..., Any], x: Any, products: Any, states: Any, mask: Any, reverse: bool) -> tuple[Any, ...]:
    """Run the steps over the products of the operand with the weight; return the results of the operator."""
    if len(x.shape) == 2:
        return tuple(step(states, products))
    order, made = range(x.shape[1]), {}
    for t in reversed(order) if reverse else order:
        new = step(states, products[:, t])
        states = (
            new if mask is None else [ops.where(mask[:, t : t + 1], n, s) for n, s in zip(new, states, strict=True)]
        )
        made[t] = states[0]
    return ops.stack([made[t] for t in order], 1), *states
