"""A graph from a file is tried once on nothing, so that one whose parts do not fit is refused when it is loaded."""

from __future__ import annotations

import torch

from chipfit.engine.run import run
from chipfit.engine.types import dtype_of
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph
from chipfit.graph.ops import OPS

#: what torch and the kernels say of attributes, types and shapes that do not fit
_MISFITS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, ZeroDivisionError, OverflowError)


def demand_runs(graph: Graph) -> None:
    """Run the graph on tensors without numbers, and where an operator needs numbers on zeros.

    Raises:
        PlanError: it does not run, or a result has another shape or type than the graph says.
    """
    for device in ("meta", "cpu"):
        try:
            _once(graph, device)
        except _MISFITS as e:
            if device == "cpu":
                why = (str(e).splitlines() or [""])[0][:200]
                raise PlanError("The saved graph does not run: its parts do not fit each other", got=why) from e
        else:
            return


def _once(graph: Graph, device: str) -> None:
    shapes = {i: [2 if s is None else s for s in graph.values[i].shape] for i in graph.inputs}
    for n in graph.nodes:
        types = {graph.weights[i].dtype for i in n.inputs if i in graph.weights and n.op in OPS and OPS[n.op].weighted}
        types |= {dtype_of(graph.values[i].dtype) for i in n.inputs[:1] if types and i in graph.values}
        if len({t for t in types if t.is_floating_point}) > 1:
            raise ValueError(f"{n.op} '{n.who}' computes in {' and '.join(sorted(map(str, types)))}")
    inputs = [torch.zeros(shape, dtype=dtype_of(graph.values[i].dtype), device=device) for i, shape in shapes.items()]
    moved: dict[int, torch.Tensor] = {id(w): w.to(device) for w in graph.weights.values()}
    with torch.no_grad():
        found = run(graph, inputs, weights={k: moved[id(w)] for k, w in graph.weights.items()}, keep=list(graph.values))
    for name, x in found.items():
        said = graph.values.get(name)
        if isinstance(x, torch.Tensor) and said is not None and said.dtype != "int":
            fits = len(x.shape) == len(said.shape) and all(w in (None, s) for w, s in zip(said.shape, x.shape))
            if not fits or x.dtype != dtype_of(said.dtype):
                raise ValueError(f"'{name}' is {x.dtype} {list(x.shape)}, and was {said.dtype} {list(said.shape)}")
