"""Builder of an ONNX file whose quantizers are operators of the domain mct_quantizers."""

from typing import Any

import numpy as np
from onnx import numpy_helper

from chipfit.errors import UnsupportedError
from chipfit.export.onnx.builder import OnnxBuilder
from chipfit.graph.ir import DYNAMIC, Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import share_quantizers
from chipfit.quantizers.mctq import VERSION, activation_quantizer, weights_quantizer

_DOMAIN = "mct_quantizers"


class MctqBuilder(OnnxBuilder):
    """Nodes in float, with a quantizer behind each quantized result and weight; biases are rounded in the file."""

    gathers = False  # its quantizers hold tables
    lowest_opset = 15  #: that of files of the Model Compression Toolkit

    def __init__(self, graph: Graph, plan: Plan, opset: int) -> None:
        super().__init__(graph, plan, opset)
        self._rounded = share_quantizers(graph, plan).rounded

    @classmethod
    def check(cls, graph: Graph, plan: Plan) -> None:
        if DYNAMIC in {n.op for n in graph.nodes}:
            what, hint = "mct_quantizers has no ranges that are found at each call", "export without `format`"
            raise UnsupportedError(what, hint=hint)

    @classmethod
    def opset_of_formats(cls, plan: Plan) -> int:
        return cls.lowest_opset

    def weight(self, name: str, raw: bool, few: bool = False) -> str:
        stored, w = self.plan.stored(name), self.graph.weights[name].detach()
        if raw or stored is None:
            return super().weight(name, raw)
        if name not in self.after_quantizer:
            kept = name if all(name != value for value, _ in self.plan.float_edges) else f"{name}_rounded"
            codes = self.const(stored.round(w).numpy(), kept)
            if self.plan.tensors[name].role != "bias":
                kind, numbers, settings = weights_quantizer(name, stored, w.dim())
                given = [codes, *(self._constant(v) for v in numbers.values())]
                codes = self.op(f"Weights{kind}Quantizer@{_DOMAIN}", given, **settings, signed=1, mctq_version=VERSION)
            self.after_quantizer[name] = codes
        return self.after_quantizer[name]

    def _constant(self, values: np.ndarray) -> str:
        """Add numbers as a node, where the package's own files have them."""
        return self.op("Constant", [], value=numpy_helper.from_array(values.astype(np.float32)))

    def _is_quantized(self, value: str) -> bool:
        return value in self._rounded

    def _again(self, x: str, value: str) -> str:
        return x

    def _shielded(self, x: str) -> str:
        return x

    def _quantizer(self, x: str, value: str, integers: str) -> str:
        kind, numbers, settings = activation_quantizer(value, self.plan[value])
        ends: dict[str, Any] = {k: float(v[0]) for k, v in numbers.items()}
        return self.op(f"Activation{kind}Quantizer@{_DOMAIN}", [x], **ends, **settings, mctq_version=VERSION)
