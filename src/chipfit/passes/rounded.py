"""The float network that computes what a plan's simulation computes: with rounded weights, and arithmetic that rounds.

A result y becomes (clip(round(y / s) + z, qmin, qmax) - z) s, as division, rounding, clipping and multiplication of
floats, which every runtime has, for any bits.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from chipfit.errors import UnsupportedError
from chipfit.graph.edit import new_name
from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.operators.formulas import compute
from chipfit.plan.record import Plan
from chipfit.plan.sharing import share_quantizers
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.stored import Stored


def with_rounded_weights(graph: Graph, plan: Plan, roles: Collection[str] = ("activation",)) -> tuple[Graph, Plan]:
    """Return the graph with rounded weights and biases, and a plan that quantizes tensors of some roles alone.

    A weight that some operator reads unrounded is there twice.

    Raises:
        UnsupportedError: a tensor is quantized to a range that is found at each call.
    """
    if DYNAMIC in {n.op for n in graph.nodes}:
        what, hint = "Ranges that are found at each call have no fake-quantized form", "export without `format`"
        raise UnsupportedError(what, hint=hint)
    out, names = graph.copy(), dict[str, str]()
    raw = {name for name, _ in plan.float_edges}
    for name in sorted(share_quantizers(graph, plan).rounded & {*graph.weights}):
        names[name] = new_name(out, f"{name}_rounded") if name in raw else name
        out.weights[names[name]] = plan[name].round(graph.weights[name].detach())
    for k, n in enumerate(graph.nodes):
        read = (i if (i, n.name) in plan.float_edges else names.get(i or "", i) for i in n.inputs)
        out.nodes[k] = n.with_(inputs=tuple(read))
    out.outputs = [names.get(v, v) for v in graph.outputs]
    out.folds = {}
    tensors = {names.get(name, name): t for name, t in plan.tensors.items() if t.role in roles}
    edges = frozenset(edge for edge in plan.float_edges if edge[0] in tensors)
    start = Plan(platform=plan.platform, provenance=plan.provenance, groups=plan.groups)
    return out, replace(start, tensors=tensors, float_edges=edges)


def rounded_network(graph: Graph, plan: Plan) -> Graph:
    """Return the float network that computes what the simulation of a plan computes.

    Raises:
        UnsupportedError: a result is rounded to a table, or to a range that is found at each call.
    """
    start, plan = with_rounded_weights(graph, plan)
    out, rounded, names = start.copy(), share_quantizers(start, plan).rounded, dict[str, str]()
    out.nodes = []
    names |= {v: _append_rounding(out, v, plan) for v in graph.inputs if v in rounded}
    for n in start.nodes:
        read = (i if (i, n.name) in plan.float_edges else names.get(i or "", i) for i in n.inputs)
        out.nodes.append(n.with_(inputs=tuple(read)))
        names |= {v: _append_rounding(out, v, plan) for v in n.outputs if v in rounded}
    out.outputs = [names.get(v, v) for v in start.outputs]
    return out


class _Arithmetic:
    """Operators that are appended to a graph behind one of its values."""

    def __init__(self, graph: Graph, value: str, layer: str) -> None:
        self.graph, self.value, self.layer = graph, value, layer

    def __call__(self, op: str, x: str, other: str | float | torch.Tensor | None = None, **attrs: Any) -> str:
        """Append an operator and return its result; numbers become constants."""
        inputs: tuple[str, ...] = (x,)
        if other is not None:
            inputs = x, other if isinstance(other, str) else new_name(self.graph, f"{self.value}_constant")
        if not isinstance(other, str) and other is not None:
            self.graph.weights[inputs[1]] = torch.as_tensor(other, dtype=torch.float32)
        y = new_name(self.graph, f"{self.value}_{op.lower()}")
        self.graph.values[y] = replace(self.graph.values[self.value], name=y)
        self.graph.nodes.append(Node(y, op, inputs, (y,), attrs, layer=self.layer))
        return y


#: function that applies an operator to x and perhaps another operand, which may be a number
Apply = Callable[..., Any]


#: exact: the difference from the integer below is exact wherever it is less than 1/2
_HALF_UP = "low = floor(x); up = low + clamp(floor((x - low) * 2.0), min=0.0, max=1.0)"
#: the greatest float below 1/2, see `quantizers.rounding`
_BEFORE_HALF = 0.5 - torch.finfo(torch.float32).eps / 4

#: rounding rule of `quantizers.rounding` -> its formula, see `operators.formulas`
ROUNDINGS = {
    "half_even": "round(x)",
    "half_away": f"floor(max(x, x * -1.0) + {_BEFORE_HALF}) * sign(x)",
    "half_up": f"{_HALF_UP}; up",
    "half_even_up": f"above = round(max(x, 0.0)); x = min(x, 0.0); {_HALF_UP}; above + up",
    "floor": "floor(x)",
    "trunc": "floor(max(x, x * -1.0)) * sign(x)",
}


def round_with(do: Apply, x: Any, value: str, stored: Stored, shaped: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a rounded value, computed by operators.

    Args:
        x: the value, as `do` takes it.
        value: its name, for messages.
        shaped: brings a scale or zero points, [] or [C], into a shape that broadcasts against x.

    Raises:
        UnsupportedError: its numbers stand in a table.
    """
    grid = stored.grid
    if grid.kind != "int":
        what = f"Fake-quantized files cannot hold how '{value}' is rounded"
        hint = "export JSON encodings (`.json`)"
        raise UnsupportedError(what, got=f"a table of {grid.levels} numbers", allowed="integers", hint=hint)
    scale, zero = shaped(stored.scale), shaped(stored.zero_point.to(torch.float32))
    low, high, first = float(grid.qmin), float(grid.qmax), float(zero.reshape(-1)[0])
    y = compute(ROUNDINGS[grid.rounding], lambda op, x, **attrs: do(op, *x, **attrs), x=do("Div", x, scale))
    if bool((zero == first).all()):  # a clip does without adding the zero point
        return do("Mul", do("Clamp", y, min=low - first, max=high - first), scale)
    return do("Mul", do("Sub", do("Clamp", do("Add", y, zero), min=low, max=high), zero), scale)


def _append_rounding(out: Graph, value: str, plan: Plan) -> str:
    """Append the arithmetic that rounds a value, and return its result."""
    stored, like = plan[value], torch.empty([1] * len(out.shape(value)))
    do = _Arithmetic(out, value, plan.tensors[value].layer)
    y: str = round_with(do, value, value, stored, lambda p: shape_for(p, like, stored.axis))
    return y
