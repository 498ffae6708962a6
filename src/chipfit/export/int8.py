"""Format "int8": integer files, for other runtimes, of plans whose chip has float biases or unsigned results."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chipfit.export import export
from chipfit.export.io_spec import OPTIONS
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.quantizers.grids import Grid, all_codes
from chipfit.quantizers.stored import Stored, scales_per_output
from chipfit.registry import register

_BIAS = Grid(bits=32, qmin=all_codes(32, True)[0], qmax=all_codes(32, True)[1], per="channel")


@register(
    "format", "int8", named=True, suffixes=(".onnx", ".tflite"), options=(*OPTIONS, "opset", "batch", "keep_layout")
)
def export_int8(graph: Graph, plan: Plan, path: Path, platform: Platform, **options: Any) -> Path:
    """Write the `.onnx` or `.tflite` file of a plan whose layers compute in integers throughout.

    A float bias of a layer with quantized data and weights becomes a 32-bit integer with the scale s_in s_w: its error
    is at most half of that scale. Unsigned 8-bit results are stored signed in `.tflite` files, as q - 128.

    Args:
        options: the options of the same file type without `format`.

    Raises:
        see `export`.
    """
    plan = with_integer_biases(graph, plan)
    return export(graph, with_signed_results(plan) if path.suffix == ".tflite" else plan, path, platform, **options)


def with_signed_results(plan: Plan) -> Plan:
    """Return the plan with signed grids for unsigned 8-bit results; their float values stay the same."""
    low = all_codes(8, True)[0]

    def signed(t: TensorPlan) -> TensorPlan:
        s = t.stored
        if s is None or t.role != "activation" or s.grid.signed or s.grid.kind != "int" or s.grid.bits != 8:
            return t
        grid = replace(s.grid, qmin=s.grid.qmin + low, qmax=s.grid.qmax + low, zero="any")
        return t.with_(grid=grid, zero_point=s.zero_point + low)

    return replace(plan, tensors={name: signed(t) for name, t in plan.tensors.items()})


def with_integer_biases(graph: Graph, plan: Plan) -> Plan:
    """Return the plan with integer biases for layers with quantized data and weights; shared biases stay in float."""
    readers = Counter(i for n in graph.nodes for i in n.inputs)
    found = {n.bias: _bias(graph, plan, n) for n in graph.nodes if n.bias is not None and is_linear(graph, n)}
    made = {name: t for name, t in found.items() if t is not None and readers[name] == 1}
    edges = frozenset(edge for edge in plan.float_edges if edge[0] not in made)
    return replace(plan, tensors={**plan.tensors, **made}, float_edges=edges)


def _bias(graph: Graph, plan: Plan, n: Node) -> TensorPlan | None:
    """Return how the float bias of a node is stored as an integer; None if it is one already, or cannot be one."""
    x, w, name = plan.stored(n.data), plan.stored(n.weight), n.bias or ""
    raw = {(i, n.name) for i in (n.data, n.weight)} & plan.float_edges
    if x is None or w is None or raw or plan.quantized(name) or name not in graph.weights:
        return None
    if x.scale.dim() or w.scale.dim() > 1 or w.zero_point.any() or {x.grid.kind, w.grid.kind} != {"int"}:
        return None
    scale = scales_per_output(x.scale * w.scale, len(graph.weights[name]))
    grid = _BIAS if scale.dim() else replace(_BIAS, per="tensor")
    stored = Stored(format="b32", grid=grid, scale=scale, zero_point=torch.zeros_like(scale, dtype=torch.int32), axis=0)
    origin = "scale of the data times that of the weight"
    return TensorPlan(name=name, role="bias", layer=n.display_name, op=n.op, stored=stored, origin=origin)
