"""Builders of ONNX models: nodes as assignments, as `tests.build.node` has them, and constants by name.

model = onnx_of("h = MatMul(x, w)", onnx_node("y = Softmax(h)", axis=-1), inputs={"x": ["n", 4]}, constants={"w": W})
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

#: sizes of a value, with names of open ones; None if they are not stated
Shape = Sequence[int | str | None] | None


def onnx_node(text: str, **attrs: Any) -> NodeProto:
    """Return a node written as an assignment: `onnx_node("y, - = of.a.tool::Split(x, -)", axis=1)`; `-` is left out."""
    outputs, call = text.split(" = ")
    kind, operands = call.rstrip(")").split("(")
    domain, _, op = kind.rpartition("::")
    ins, outs = (["" if i == "-" else i for i in part.split(", ") if i] for part in (operands, outputs))
    return helper.make_node(op, ins, outs, domain=domain or None, **attrs)


def onnx_of(
    *nodes: str | NodeProto,
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape] | Iterable[str] = ("y",),
    constants: Mapping[str, Any] | None = None,
    opset: int = 17,
    types: Mapping[str, int] | None = None,
    versions: Mapping[str, int] | None = None,
) -> ModelProto:
    """Return a model of nodes in order of execution.

    Args:
        nodes: nodes, or texts for `onnx_node`.
        constants: numbers or tensors by name.
        types: of inputs and outputs that are not float32.
        versions: domain -> version of its operators, where it is not 1.
    """
    made = [onnx_node(n) if isinstance(n, str) else n for n in nodes]
    results = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
    ends = (
        [helper.make_tensor_value_info(k, (types or {}).get(k, TensorProto.FLOAT), s) for k, s in side.items()]
        for side in (inputs, results)
    )
    known = constants or {}
    held = [v if isinstance(v, TensorProto) else numpy_helper.from_array(np.asarray(v), k) for k, v in known.items()]
    opsets = {"": opset, **{n.domain: 1 for n in made if n.domain}, **(versions or {})}
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    graph = helper.make_graph(made, "g", *ends, held)
    return helper.make_model(graph, opset_imports=imports, ir_version=8 if opset < 19 else 10)
