"""Readers of ATen's recurrent layers: each layer and direction becomes a node of its own."""

from collections.abc import Sequence
from typing import Any

from chipfit.frameworks.reading import require
from chipfit.frameworks.torch.call import TorchCall
from chipfit.frameworks.torch.program import SymbolicTensor
from chipfit.frameworks.torch.read import reads

#: ATen operator -> canonical operator, and attributes that do not depend on the call
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("LSTM", {"gates": "ifgo", "cell_clip": None}),
    "gru": ("GRU", {"gates": "rzn", "reset_after": True}),
    "rnn_tanh": ("RNN", {"activation": "tanh"}),
    "rnn_relu": ("RNN", {"activation": "relu"}),
}


@reads(" ".join([*_KINDS, *(f"padded_{k}" for k in _KINDS)]))
def _recurrent(c: TorchCall) -> Any:
    """Read layers in one or both directions; the results are those of the last layer, and the states of all.

    Raises:
        Unreadable: sequences are packed, or states are projected; `packed.py` pads sequences while a model is recorded.
    """
    require("input" in c.args and c.tensor("input").dim() == 3)
    return _Layers(c).read()


class _Layers:
    """The layers of one call while they are read."""

    def __init__(self, c: TorchCall) -> None:
        self.c, (self.op, self.attrs) = c, _KINDS[c.name.removeprefix("padded_")]
        self.ways, self.layers = 2 if c.static("bidirectional") else 1, int(c.static("num_layers"))
        self.biases, self.first = bool(c.static("has_biases")), bool(c.static("batch_first"))
        self.params = c.builder.arg(c.args["params"])
        per_layer = 4 if self.biases else 2
        require(len(self.params) == per_layer * self.layers * self.ways)  # more of them project the states
        x: SymbolicTensor = c.tensor("input")
        self.n, self.t = x.shape[0 if self.first else 1], x.shape[1 if self.first else 0]
        self.like, self.hidden = x, int(c.builder.graph.shape(self.params[1])[1] or 0)
        self.states = [c.builder.arg(s) for s in (c.args["hx"] if self.op == "LSTM" else [c.args["hx"]])]

    def read(self) -> tuple[Any, ...]:
        """Append the nodes; return the names of the results of the call."""
        c, x = self.c, self.c.value("input")
        if not self.first:
            x = c.step("Transpose", [x], perm=(1, 0, 2))
        last: list[Sequence[str]] = []  # states after the last step, of each layer and direction
        for layer in range(self.layers):
            made = [self._one(x, layer * self.ways + k, reverse=k == 1) for k in range(self.ways)]
            last += [states for _, *states in made]
            x = made[0][0]
            if self.ways == 2:
                x = c.step("Concat", [y for y, *_ in made], axis=2)
        if not self.first:
            x = c.step("Transpose", [x], perm=(1, 0, 2))
        return (x, *(c.step("Stack", states, axis=0) for states in zip(*last, strict=True)))

    def _one(self, x: str, index: int, reverse: bool) -> list[str]:
        """Append one layer in one direction; return its results."""
        count = 4 if self.biases else 2
        weights = self.params[count * index : count * (index + 1)]
        inputs = [x, *weights, *[None] * (4 - count), *(self._state(s, index) for s in self.states)]
        if "lengths" in self.c.args:
            inputs += [None, self.c.value("lengths")]
        shapes = [(self.n, self.t, self.hidden), *[(self.n, self.hidden)] * len(self.states)]
        likes = [self.like.new_empty(s) for s in shapes]
        return self.c.builder.append(self.c.node, self.op, inputs, {**self.attrs, "reverse": reverse}, likes)

    def _state(self, states: str, index: int) -> str | None:
        """Return the state before the first step [N, H]; None for zeros."""
        if self._is_zero(states):
            return None
        return self.c.step("Select", [states], axis=0, index=index)

    def _is_zero(self, name: str) -> bool:
        """Return whether a value is a constant of zeros, perhaps one that is repeated for each sample."""
        graph = self.c.builder.graph
        maker = next((n for n in reversed(graph.nodes) if name in n.outputs), None)
        known = graph.weights.get(maker.data if maker is not None and maker.op == "Expand" else name)
        return known is not None and name not in graph.trainable and not known.any()


@reads("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def _cell(c: TorchCall) -> Any:
    """Read one step of a recurrent layer.

    Raises:
        Unreadable: the operands have no axis of samples.
    """
    op, attrs = _KINDS[c.name.removesuffix("_cell")]
    x = c.tensor("input")
    require(x.dim() == 2)
    hx = c.builder.arg(c.args["hx"])
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    weights = [c.value("w_ih"), c.value("w_hh"), c.optional("b_ih"), c.optional("b_hh")]
    likes = list(c.result) if op == "LSTM" else [c.result]
    made = c.builder.append(c.node, op, [c.value("input"), *weights, *states], {**attrs, "reverse": False}, likes)
    return tuple(made) if op == "LSTM" else made[0]
