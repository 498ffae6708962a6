"""The float network of a quantized ONNX file: without quantizers, with the floats that its integers stand for."""

import numpy as np
import onnx
from onnx import numpy_helper

import chipfit.frameworks.onnx.fused_integers  # noqa: F401 -- registers readers
from chipfit.frameworks.onnx.integers import Expansion, plain
from chipfit.frameworks.onnx.model import OnnxModel

_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")


def float_network(model: OnnxModel) -> OnnxModel:
    """Return the float network of a quantized model; weights keep the losses of their integers.

    Raises:
        CaptureError: Its scales are malformed, or an operator of integers is not known.
    """
    form = Expansion(model.proto(), model.where).run()
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
    for n in proto.graph.node:
        n.input[:] = [names.get(i, i) for i in n.input]
        if n.op_type in _QUANTIZERS:
            n.op_type, n.domain = "Identity", ""
    for v in (v for v in proto.graph.output if v.name in form.taken):  # floats in place of integers
        v.type.CopyFrom(onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=onnx.TensorProto.FLOAT)))
    return OnnxModel.of_proto(proto, model.where)
