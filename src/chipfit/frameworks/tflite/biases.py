"""Biases of quantized layers with the scale that kernels take for granted: that of the input times the weight's."""

import copy
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

_CODE, _WIDE = schema.BuiltinOperator, (schema.TensorType.INT32, schema.TensorType.INT64)
#: operator -> places of its input, weight and bias
_LAYERS = {
    **dict.fromkeys((_CODE.CONV_2D, _CODE.DEPTHWISE_CONV_2D, _CODE.FULLY_CONNECTED), (0, 1, 2)),
    _CODE.TRANSPOSE_CONV: (2, 1, 3),
}
_NEAR = 1e-3  #: relative difference of scales that are rounded otherwise


def scale_biases(table: Any) -> bool:
    """Give biases of a `ModelT` whose own scale says something else a copy with the kernel's; return whether any did.

    Kernels add the integers of a bias as they are. Converters let layers share one whose integers suit one of them.
    """
    graph, codes = table.subgraphs[0], [max(c.builtinCode, c.deprecatedBuiltinCode) for c in table.operatorCodes]
    found = False
    for op in graph.operators:
        places = _LAYERS.get(codes[op.opcodeIndex])
        if places is None or len(op.inputs) <= places[2] or min(int(op.inputs[k]) for k in places) < 0:
            continue
        x, weight, bias = (graph.tensors[int(op.inputs[k])] for k in places)
        of_x, of_weight, own = (_scales(t) for t in (x, weight, bias))
        wanted = (of_x * of_weight).astype(np.float32) if of_x.size == 1 else np.zeros(0)
        known = own.size in (1, wanted.size) and np.allclose(own, wanted, _NEAR, 0)
        if bias.type not in _WIDE or not wanted.size or known:
            continue
        new = copy.copy(bias)
        new.name = (bias.name or b"bias") + b"_%d" % int(op.outputs[0])
        new.quantization = schema.QuantizationParametersT()
        new.quantization.scale, new.quantization.zeroPoint = wanted, np.zeros(wanted.size, np.int64)
        op.inputs, found = np.array(op.inputs), True
        op.inputs[places[2]] = len(graph.tensors)
        graph.tensors.append(new)
    return found


def _scales(t: Any) -> np.ndarray:
    return np.zeros(0) if t.quantization is None or t.quantization.scale is None else np.ravel(t.quantization.scale)
