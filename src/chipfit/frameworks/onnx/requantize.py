"""The float network of a quantized ONNX file: without quantizers, with the floats that its integers stand for."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

import chipfit.frameworks.onnx.fused_integers  # noqa: F401 -- registers readers
from chipfit.frameworks.onnx.integers import ENDS, Expansion, QParams, plain
from chipfit.frameworks.onnx.model import OnnxModel, name_apart
from chipfit.frameworks.onnx.training_tools import with_standard_quantizers
from chipfit.graph.edit import replace_values
from chipfit.graph.ir import Graph

_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_LARGEST = np.finfo(np.float32).max


def float_network(model: OnnxModel) -> OnnxModel:
    """Return the float network of a quantized model; weights keep the losses of their integers.

    Tools drop a ReLU before a quantizer that has no integers for negative values; there it becomes a Clip, see
    `without_idle_clips`.

    Raises:
        CaptureError: Its scales are malformed, or an operator of integers is not known.
    """
    expansion = Expansion(with_standard_quantizers(model.proto(), model.where), model.where)
    form = expansion.run()
    proto, names = form.model, dict[str, str]()
    taken = {o for n in proto.graph.node for o in n.output} | {v.name for v in proto.graph.input}
    read = {i for n in proto.graph.node for i in n.input} | {v.name for v in proto.graph.output}
    constants = {k: c for k, c in form.constants.items() if k in read}
    for name, codes in constants.items():
        wanted = plain(codes.name)
        names[name] = wanted if wanted not in taken else name
        taken.add(names[name])
    floats = {names[k]: c.dequantize().astype(np.float32) for k, c in constants.items()}
    others = [t for t in proto.graph.initializer if t.name not in form.constants]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend([*others, *(numpy_helper.from_array(x, k) for k, x in floats.items())])
    given = {v.name for v in proto.graph.input}
    for n in proto.graph.node:
        n.input[:] = [names.get(i, i) for i in n.input]
        if n.op_type in _QUANTIZERS:
            n.op_type, n.domain = "Identity", ""
            top = None if n.input[0] in given or n.output[0] not in form.made else _bound(form.made[n.output[0]])
            if top is not None:
                _become_clip(proto, n, {"min": 0.0, "max": top}, expansion.opset)
    for v in (v for v in proto.graph.output if v.name in form.taken):  # floats in place of integers
        v.type.CopyFrom(onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=onnx.TensorProto.FLOAT)))
    name_apart(proto)
    return OnnxModel.of_proto(_in_float32(proto), model.where)


def _in_float32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model of float16, with constants that became float32, in float32 throughout."""
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    attributes = [a for n in proto.graph.node for a in n.attribute]
    for t in (*proto.graph.initializer, *(a.t for a in attributes if a.HasField("t"))):
        if t.data_type == half:
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float32), t.name))
    for a in attributes:
        if a.name in ("to", "dtype") and a.i == half:
            a.i = single
    for v in (*proto.graph.input, *proto.graph.output):
        if v.type.tensor_type.elem_type == half:
            v.type.tensor_type.elem_type = single
    return proto


def _become_clip(proto: onnx.ModelProto, n: onnx.NodeProto, ends: dict[str, float], opset: int) -> None:
    n.op_type = "Clip"
    if opset < 11:
        n.attribute.extend(helper.make_attribute(k, end) for k, end in ends.items())
        return
    held = [numpy_helper.from_array(np.array(end, "f4"), f"{n.output[0]}/{k}") for k, end in ends.items()]
    n.input.extend(t.name for t in held)
    proto.graph.initializer.extend(held)


def _bound(numbers: QParams) -> float | None:
    """Return the greatest value of a quantizer whose lowest integer stands for 0; None for another quantizer.

    A bound beside 6, that of ReLU6, comes from calibration data and is none.
    """
    low, high = numbers.ends or ENDS[numbers.kind]
    top = float(((high - numbers.zero) * numbers.scale).max())
    if not (numbers.zero == low).all():
        return None
    return 6.0 if abs(top - 6) < 1e-5 else float(_LARGEST)


def without_idle_clips(graph: Graph) -> Graph:
    """Return a graph without clips at 0 from below of values that are never negative."""
    positive, idle = {k for k, w in graph.weights.items() if (w >= 0).all()}, dict[str, str]()
    for n in graph.nodes:
        ends, of_operands = n.clip_range or n.facts.bounded, n.facts.moves or n.facts.sums or n.facts.identity
        kept = of_operands and all(i in positive for i in n.inputs if i is not None)
        if n.clip_range == (0, None) and n.data in positive:
            idle[n.output] = idle.get(n.data, n.data)
        if kept or n.output in idle or (ends and ends[0] is not None and ends[0] >= 0):
            positive |= {*n.outputs}
    return replace_values(graph, idle)
