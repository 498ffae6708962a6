"""A graph from a file is tried once on nothing, so that one whose parts do not fit is refused when it is loaded."""

import math
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import AfterValidator, Field

from chipfit.engine.run import run
from chipfit.engine.types import dtype_of
from chipfit.errors import PlanError, first_line
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.graph.ops import ATTRIBUTES, OPS
from chipfit.plan.json_codec import table, validated


def _infinite(x: float) -> float:
    if not math.isinf(x):
        raise ValueError("no float32")
    return x


def _real(**limits: float) -> Any:
    return Annotated[float, Field(**{"ge": -_MAX, "le": _MAX, **limits})]


_MAX = torch.finfo(torch.float32).max
_INT = Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
#: the words for kinds of attributes in `graph/ops.yaml`
_KINDS: dict[str, Any] = {
    "flag": bool,
    "word": str,
    "granularity": Literal["tensor", "row", "block"],
    "int": _INT,
    "size": Annotated[int, Field(ge=0, lt=1 << 31)],
    "count": Annotated[int, Field(ge=1, lt=1 << 31)],
    "pair": tuple[_INT, _INT],
    "real": _real(),
    "positive": _real(ge=0),
    "bound": _real() | Annotated[float, AfterValidator(_infinite)],
}


def attribute_type(kind: str) -> Any:
    """Return the type of a kind of attributes: "count*?" is a tuple of counts, or None."""
    first, *others = kind.split(" | ")
    base = first.rstrip("*?")
    out: Any = _KINDS[base]
    for mark in first[len(base) :]:
        out = tuple[out, ...] if mark == "*" else out | None
    return out | attribute_type(" | ".join(others)) if others else out


_ATTRIBUTES = table(**{name: NotRequired[attribute_type(kind)] for name, kind in ATTRIBUTES.items()})

#: what torch and the kernels say of attributes, types and shapes that do not fit
_MISFITS = (RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def check_runs(graph: Graph) -> None:
    """Run a graph on tensors without numbers, and where an operator needs numbers on zeros.

    Not run, but looked through, is one with operators of a framework, which may need it, or with sizes other than the
    batch that its inputs leave open.

    Raises:
        PlanError: it does not run, or a result has another shape or type than the graph says.
    """
    shapes = [graph.shape(i) for i in graph.inputs]
    open_ = any(n.op == OPAQUE for n in graph.nodes) or any(None in shape[1:] for shape in shapes)
    for device in ("meta", "cpu"):
        try:
            for n in graph.nodes:
                _check_attributes(n)
                _check_axes(n, graph)
                _check_layer(n, graph)
            if not open_:
                _once(graph, device)
        except _MISFITS as e:
            if device == "cpu":
                what = "The saved graph does not run: its parts do not fit each other"
                raise PlanError(what, got=first_line(e)) from e
        else:
            return


def _once(graph: Graph, device: str) -> None:
    def fits(n: Node, results: tuple[Any, ...]) -> tuple[Any, ...]:
        for name, x in zip(n.outputs, results, strict=False):
            said = graph.values[name]
            if isinstance(x, torch.Tensor) and said.dtype != "int":
                same = len(x.shape) == len(said.shape) and all(w in (None, s) for w, s in zip(said.shape, x.shape))
                if not same or x.dtype != dtype_of(said.dtype):
                    raise ValueError(f"'{name}' is {x.dtype} {list(x.shape)}, and was {said.dtype} {list(said.shape)}")
        return results

    given = [graph.values[i] for i in graph.inputs]
    sizes = [[2 if s is None else s for s in v.shape] for v in given]
    inputs = [torch.zeros(s, dtype=dtype_of(v.dtype), device=device) for s, v in zip(sizes, given, strict=True)]
    moved = {id(w): w.to(device) for w in graph.weights.values()}
    with torch.no_grad():
        run(graph, inputs, hook=fits, weights={name: moved[id(w)] for name, w in graph.weights.items()})


def _check_attributes(n: Node) -> None:
    """Those of the operator and no others, each of its kind; of what counts by spatial axis, as many of each."""
    if n.op not in OPS:
        return
    a = n.attrs
    validated(a, _ATTRIBUTES, f"attributes of {n.op} '{n.who}'")
    if set(a) != set(OPS[n.op].attrs):
        raise ValueError(f"{n.op} '{n.who}' has the attributes {sorted(a)}, not {sorted(OPS[n.op].attrs)}")
    if OPS[n.op].layout == "spatial":
        counted = {k: len(v) for k, v in a.items() if isinstance(v, tuple)}
        if len(set(counted.values())) > 1:
            raise ValueError(f"{n.op} '{n.who}' has numbers for so many spatial axes: {counted}")
        if any(p < 0 for pair in a.get("padding", ()) for p in pair):
            raise ValueError(f"padding of {n.op} '{n.who}' is {a['padding']}, which is negative")
        steps = map(max, a["stride"], a["dilation"]) if "output_padding" in a else ()
        if any(p >= step for p, step in zip(a.get("output_padding", ()), steps)):
            raise ValueError(f"output_padding of {n.op} '{n.who}' is {a['output_padding']}, no less than its steps")


def _check_axes(n: Node, graph: Graph) -> None:
    """Axes that no operand and no result has: kernels without numbers take them."""
    rank = max((len(graph.shape(v)) for v in (*n.inputs, *n.outputs) if v is not None), default=0)
    for name in ("axis", "axes"):
        axes = n.attrs.get(name)
        for axis in axes if isinstance(axes, (list, tuple)) else () if axes is None else (axes,):
            if isinstance(axis, int) and not -max(rank, 1) <= axis < max(rank, 1):
                raise ValueError(f"{name} of {n.op} '{n.who}' is {axes}, and it works on {rank} axes")


def _check_layer(n: Node, graph: Graph) -> None:
    """What tensors without numbers do not show: reals of two types, sizes of other ranks, a stride of too many axes."""
    if n.op not in OPS or not OPS[n.op].weighted:
        return
    names = [i for i in n.inputs if i is not None]
    types = {graph.weights[i].dtype if i in graph.weights else dtype_of(graph.values[i].dtype) for i in names}
    if len({t for t in types if t.is_floating_point}) > 1:
        raise ValueError(f"{n.op} '{n.who}' reads {' and '.join(sorted(map(str, types)))}")
    if OPS[n.op].kind and n.bias is not None:
        count = graph.shape(n.output)[-1 if OPS[n.op].kind == "linear" else 1]
        if count is not None and tuple(graph.shape(n.bias)) != (count,):
            raise ValueError(f"the bias of {n.op} '{n.who}' has the shape {list(graph.shape(n.bias))}, not [{count}]")
    axes = len(graph.shape(n.inputs[0])) - 2 if n.inputs[0] is not None else 0
    spatial = OPS[n.op].kind not in ("", "linear")
    if spatial and n.weight is not None and len(graph.shape(n.weight)) != axes + 2:
        raise ValueError(
            f"{n.op} '{n.who}' has a weight of {len(graph.shape(n.weight))} axes for {axes + 2} of its input"
        )
    if spatial and len(n.attrs["stride"]) != axes:
        raise ValueError(f"stride of {n.op} '{n.who}' is {n.attrs['stride']}, and the image has {axes} axes")
