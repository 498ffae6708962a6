"""Validation of a loaded graph: attributes, shapes and types must fit its operators."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import AfterValidator, Field

from chipfit.engine.run import run
from chipfit.engine.types import dtype_of
from chipfit.errors import PlanError, first_line
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.operators.table import ATTRIBUTES, OPS
from chipfit.plan.json_codec import table, validated
from chipfit.plan.record import TensorPlan


def _infinite(x: float) -> float:
    if not math.isinf(x):
        raise ValueError("no float32")
    return x


_MAX = torch.finfo(torch.float32).max
_REAL = Annotated[float, Field(ge=-_MAX, le=_MAX)]
_INT = Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
#: the words for kinds of attributes in `operators/vocabulary.yaml`
_KINDS: dict[str, Any] = {
    "flag": bool,
    "word": str,
    "granularity": Literal["tensor", "row", "block"],
    "int": _INT,
    "size": Annotated[int, Field(ge=0, lt=1 << 31)],
    "count": Annotated[int, Field(ge=1, lt=1 << 31)],
    "pair": tuple[_INT, _INT],
    "real": _REAL,
    "positive": Annotated[float, Field(ge=0, le=_MAX)],
    "bound": _REAL | Annotated[float, AfterValidator(_infinite)],
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

#: what torch and the kernels raise for attributes, types and shapes that do not fit
_MISFITS = (RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def check_runs(graph: Graph) -> None:
    """Check that a graph runs: on meta tensors, or on zeros if an operator needs numbers.

    Operators of a framework may need that framework, and sizes other than the batch may be open: such a graph is
    checked without running it.

    Raises:
        PlanError: it does not run, or a result has another shape or type than the graph states.
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
                _run_once(graph, device)
        except _MISFITS as e:
            if device == "cpu":
                what = "The saved graph does not run: its parts do not fit each other"
                raise PlanError(what, got=first_line(e)) from e
        else:
            return


def _run_once(graph: Graph, device: str) -> None:
    def fits(n: Node, results: tuple[Any, ...]) -> tuple[Any, ...]:
        for name, x in zip(n.outputs, results, strict=False):
            stated = graph.values[name]
            if isinstance(x, torch.Tensor) and stated.dtype != "int":
                same = len(x.shape) == len(stated.shape) and all(w in (None, s) for w, s in zip(stated.shape, x.shape))
                if not same or x.dtype != dtype_of(stated.dtype):
                    computed = f"{x.dtype} {list(x.shape)}"
                    raise ValueError(f"'{name}' is {computed}, and was {stated.dtype} {list(stated.shape)}")
        return results

    given = [graph.values[i] for i in graph.inputs]
    sizes = [[2 if s is None else s for s in v.shape] for v in given]
    inputs = [torch.zeros(s, dtype=dtype_of(v.dtype), device=device) for s, v in zip(sizes, given, strict=True)]
    moved = {id(w): w.to(device) for w in graph.weights.values()}
    with torch.no_grad():
        run(graph, inputs, hook=fits, weights={name: moved[id(w)] for name, w in graph.weights.items()})


def _check_attributes(n: Node) -> None:
    """Check that a node has the attributes of its operator, of the right kinds, and equally many per spatial axis."""
    if n.op not in OPS:
        return
    a = n.attrs
    validated(a, _ATTRIBUTES, f"attributes of {n.op} '{n.display_name}'")
    if set(a) != set(OPS[n.op].attrs):
        raise ValueError(f"{n.op} '{n.display_name}' has the attributes {sorted(a)}, not {sorted(OPS[n.op].attrs)}")
    if OPS[n.op].layout == "spatial":
        counted = {k: len(v) for k, v in a.items() if isinstance(v, tuple)}
        if len(set(counted.values())) > 1:
            raise ValueError(f"{n.op} '{n.display_name}' has numbers for so many spatial axes: {counted}")
        if any(p < 0 for pair in a.get("padding", ()) for p in pair):
            raise ValueError(f"padding of {n.op} '{n.display_name}' is {a['padding']}, which is negative")
        steps = map(max, a["stride"], a["dilation"]) if "output_padding" in a else ()
        if any(p >= step for p, step in zip(a.get("output_padding", ()), steps)):
            raise ValueError(
                f"output_padding of {n.op} '{n.display_name}' is {a['output_padding']}, no less than its steps"
            )


def _check_axes(n: Node, graph: Graph) -> None:
    """Check that axes exist in some operand or result, which kernels on meta tensors do not."""
    rank = max((len(graph.shape(v)) for v in (*n.inputs, *n.outputs) if v is not None), default=0)
    for name in ("axis", "axes"):
        axes = n.attrs.get(name)
        for axis in axes if isinstance(axes, (list, tuple)) else () if axes is None else (axes,):
            if isinstance(axis, int) and not -max(rank, 1) <= axis < max(rank, 1):
                raise ValueError(f"{name} of {n.op} '{n.display_name}' is {axes}, and it works on {rank} axes")


def _check_layer(n: Node, graph: Graph) -> None:
    """Check what meta tensors do not show: dtypes of operands, ranks of weights and strides, length of the bias."""
    if n.op not in OPS or not OPS[n.op].weighted:
        return
    names = [i for i in n.inputs if i is not None]
    types = {graph.weights[i].dtype if i in graph.weights else dtype_of(graph.values[i].dtype) for i in names}
    if len({t for t in types if t.is_floating_point}) > 1:
        raise ValueError(f"{n.op} '{n.display_name}' reads {' and '.join(sorted(map(str, types)))}")
    if OPS[n.op].kind and n.bias is not None:
        count = graph.shape(n.output)[-1 if OPS[n.op].kind == "linear" else 1]
        if count is not None and tuple(graph.shape(n.bias)) != (count,):
            raise ValueError(
                f"the bias of {n.op} '{n.display_name}' has the shape {list(graph.shape(n.bias))}, not [{count}]"
            )
    axes = len(graph.shape(n.inputs[0])) - 2 if n.inputs[0] is not None else 0
    spatial = OPS[n.op].kind not in ("", "linear")
    if spatial and n.weight is not None and len(graph.shape(n.weight)) != axes + 2:
        raise ValueError(
            f"{n.op} '{n.display_name}' has a weight of {len(graph.shape(n.weight))} axes for {axes + 2} of its input"
        )
    if spatial and len(n.attrs["stride"]) != axes:
        raise ValueError(f"stride of {n.op} '{n.display_name}' is {n.attrs['stride']}, and the image has {axes} axes")


def scales_fit(sizes: list[int], shape: Sequence[int | None], axis: int) -> bool:
    """Check whether scales of these sizes fit a shape: one scale per index of an axis, or per block along it."""
    if len(sizes) == 1:
        return shape[axis] in (None, *sizes)
    pairs = zip(sizes, shape, strict=False)
    blocks = all(s == b or (k == axis and b and s is not None and s % b == 0) for k, (b, s) in enumerate(pairs))
    return len(sizes) == len(shape) and blocks


def check_stored(t: TensorPlan, graph: Graph) -> None:
    """Check that the scales of a tensor fit its shape, and that a quantized weight is finite."""
    if t.stored is None:
        return
    shape, sizes, axis = graph.shape(t.name), list(t.stored.scale.shape), t.stored.axis
    if sizes:
        axis = 0 if axis is None and len(shape) == 1 else axis
        if axis is None or not -len(shape) <= axis < len(shape) or not scales_fit(sizes, shape, axis % len(shape)):
            got = f"scales {sizes} along axis {axis} of {list(shape)}"
            raise PlanError(f"The scales of '{t.name}' do not fit its shape", got=got)
    w = graph.weights.get(t.name)
    if w is not None and not (w.is_floating_point() and bool(torch.isfinite(w).all())):
        raise PlanError(f"The quantized weight '{t.name}' must hold finite floats", got=str(w.dtype))
