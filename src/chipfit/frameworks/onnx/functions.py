"""Bodies of operators that ONNX itself defines as functions of simpler ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper

#: functions that are not replaced by their bodies, which quantize, draw random numbers or work on sequences
_NOT_EXPANDED = "DynamicQuantizeLinear Bernoulli SequenceMap CastLike".split()


def body(
    node: ir.Node, opset: int, inputs: Sequence[torch.Tensor | None], outputs: Sequence[str]
) -> tuple[int, list[ir.Node]]:
    """Return the nodes that ONNX's definition of an operator has, with the operands and results of a node.

    Args:
        opset: version of ONNX's operators in the model.
        inputs: types and shapes of the operands, None for absent ones.
        outputs: names of the results, "" for those that nothing reads.

    Returns:
        The version of ONNX's operators in the body, and its nodes in execution order; no nodes if the operator is not
        defined as a function, not for these types, or by control flow.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type in _NOT_EXPANDED:
        return 0, []
    proto = onnx.NodeProto()
    proto.CopyFrom(ir.serde.serialize_node(node))
    proto.output[:] = outputs
    try:
        schema = onnx.defs.get_schema(node.op_type, opset)
        version, function = _definition(schema, proto, opset, inputs)
    except (onnx.defs.SchemaError, RuntimeError, TypeError):  # of types that the definition does not know
        return 0, []
    if not function.node or any(a.HasField("g") or a.graphs for n in function.node for a in n.attribute):
        return 0, []
    attributes = {a.name: a for a in proto.attribute}
    for name, attribute in schema.attributes.items():
        if name not in attributes and attribute.default_value.type:
            attributes[name] = attribute.default_value
    names = {**_pairs(function.input, proto.input), **_pairs(function.output, proto.output)}
    placed = [_placed(n, names, attributes, proto) for n in function.node]
    inputs_, outputs_ = list(dict.fromkeys(filter(None, proto.input))), [o for o in proto.output if o]
    opsets = [helper.make_opsetid("", version)]
    return version, list(
        ir.serde.deserialize_function(helper.make_function("", "body", inputs_, outputs_, placed, opsets))
    )


def _definition(
    schema: Any, proto: onnx.NodeProto, opset: int, inputs: Sequence[torch.Tensor | None]
) -> tuple[int, onnx.FunctionProto]:
    """Return the function that defines an operator, which is empty if there is none, and its version.

    The version is the newest up to `opset`; the definition of the operator holds in older ones too.
    """
    if versions := schema.function_opset_versions:
        version = max((v for v in versions if v <= opset), default=min(versions))
        return version, onnx.FunctionProto.FromString(schema.get_function_with_opset_version(version))
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    if not versions:
        return 0, onnx.FunctionProto()
    types = [onnx.TypeProto() if x is None else _type(x) for x in inputs]
    made = schema.get_context_dependent_function_with_opset_version(
        max(versions), proto.SerializeToString(), [t.SerializeToString() for t in types]
    )
    return max(versions), onnx.FunctionProto.FromString(made)


def _type(x: torch.Tensor) -> onnx.TypeProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(str(x.dtype).removeprefix("torch.")))
    return helper.make_tensor_type_proto(kind, [None] * x.dim())


def _pairs(formal: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    return {name: given[k] if k < len(given) else "" for k, name in enumerate(formal)}


def _placed(
    node: onnx.NodeProto, ends: Mapping[str, str], attributes: Mapping[str, onnx.AttributeProto], whole: onnx.NodeProto
) -> onnx.NodeProto:
    """Return a node of a body with names of the model, and with the attributes of the whole operator in it."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    prefix = next(filter(None, whole.output))
    made.input[:] = [ends.get(i, i and f"{prefix}/{i}") for i in node.input]
    made.output[:] = [ends.get(o) or (o and f"{prefix}/{o}") for o in node.output]
    made.name = whole.name
    del made.attribute[:]
    for a in node.attribute:
        if a.ref_attr_name and a.ref_attr_name not in attributes:
            continue
        made.attribute.add().CopyFrom(attributes[a.ref_attr_name] if a.ref_attr_name else a)
        made.attribute[-1].name = a.name
    return made
