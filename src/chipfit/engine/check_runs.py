"""The check of a loaded graph before it runs: attributes, shapes and types must fit its operators."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from chipfit.engine.curves import steps_in
from chipfit.engine.run import run
from chipfit.engine.types import dtype_of
from chipfit.errors import PlanError, first_line
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.operators.table import ATTRIBUTES, OPS
from chipfit.validation import check_value


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


@cache
def attributes_of(op: str) -> TypeAdapter[Any]:
    """Return the type of an operator's attributes."""
    make: Any = TypedDict  # the keys are data
    kind = make("Attributes", {name: attribute_type(ATTRIBUTES[name]) for name in OPS[op].attrs})
    return TypeAdapter(with_config(ConfigDict(strict=True, extra="forbid"))(kind))


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
                _check_node(n, graph)
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


def _check_node(n: Node, graph: Graph) -> None:
    if n.op in OPS:
        check_value(attributes_of(n.op), n.attrs, PlanError, f"attributes of {n.op} '{n.display_name}'")
    faults = [*_faults_of_axes(n, graph), *(_faults_of_attributes(n) if n.op in OPS else ())]
    faults += _faults_of_operands(n, graph) if n.facts.weighted else ()
    if faults:
        raise ValueError(f"{faults[0]} ({n.op} '{n.display_name}')")


def _faults_of_axes(n: Node, graph: Graph) -> Iterator[str]:
    """Yield axes that no operand or result has, which kernels on meta tensors accept."""
    rank = max((len(graph.shape(v)) for v in (*n.inputs, *n.outputs) if v is not None), default=0)
    for name in ("axis", "axes"):
        axes = n.attrs.get(name)
        for axis in axes if isinstance(axes, (list, tuple)) else () if axes is None else (axes,):
            if isinstance(axis, int) and not -max(rank, 1) <= axis < max(rank, 1):
                yield f"{name} is {axes}, and it works on {rank} axes"


def _faults_of_attributes(n: Node) -> Iterator[str]:
    """Yield attributes that their types do not show to be wrong."""
    a = n.attrs
    for step in steps_in(n):
        check_value(attributes_of(step.op), dict(step.attrs), PlanError, f"attributes of {step.op} in a curve")
    if n.facts.layout == "spatial":
        counted = {k: len(v) for k, v in a.items() if isinstance(v, tuple)}
        if len(set(counted.values())) > 1:
            yield f"it has numbers for so many spatial axes: {counted}"
        if any(p < 0 for pair in a.get("padding", ()) for p in pair):
            yield f"padding {a['padding']} is negative"
        steps = map(max, a["stride"], a["dilation"]) if "output_padding" in a else ()
        if any(p >= step for p, step in zip(a.get("output_padding", ()), steps)):
            yield f"output_padding {a['output_padding']} is no less than its steps"


def _faults_of_operands(n: Node, graph: Graph) -> Iterator[str]:
    """Yield what meta tensors do not show: dtypes of operands, ranks of weights and strides, length of the bias."""
    names = [i for i in n.inputs if i is not None]
    types = {graph.weights[i].dtype if i in graph.weights else dtype_of(graph.values[i].dtype) for i in names}
    if len({t for t in types if t.is_floating_point}) > 1:
        yield f"it reads {' and '.join(sorted(map(str, types)))}"
    kind, axes = n.facts.kind, len(graph.shape(names[0])) - 2
    if kind and n.bias is not None:
        count = graph.shape(n.output)[-1 if kind == "linear" else 1]
        if count is not None and tuple(graph.shape(n.bias)) != (count,):
            yield f"its bias has the shape {list(graph.shape(n.bias))}, not [{count}]"
    if kind not in ("", "linear"):
        if n.weight is not None and len(graph.shape(n.weight)) != axes + 2:
            yield f"it has a weight of {len(graph.shape(n.weight))} axes for {axes + 2} of its input"
        if len(n.attrs["stride"]) != axes:
            yield f"stride is {n.attrs['stride']}, and the image has {axes} axes"
