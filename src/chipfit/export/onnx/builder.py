"""What one ONNX file consists of while it is written: nodes, constants, and under which name each value is known.

Names: graph value `v` is `v` before its quantizer, its codes are `v_q`; inputs keep the names of the model's arguments.
Everything else is called after the node of the graph that is being written, with a running number.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from chipfit.errors import UnsupportedError
from chipfit.export.io_spec import QuantizedIO
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan
from chipfit.quantizers.stored import Stored

#: what hands on dequantized codes, to runtimes at least: they move it behind the DequantizeLinear that is before it
_MOVING = frozenset(
    "DequantizeLinear Cast Concat Expand Flatten Gather Identity Pad Reshape Slice Split Squeeze Tile Transpose "
    "Unsqueeze MaxPool Relu Clip".split()
)


class OnnxBuilder:
    """Nodes and initialisers so far, and the names of the graph's values among them."""

    def __init__(self, graph: Graph, plan: Plan, opset: int) -> None:
        self.graph, self.plan, self.opset = graph, plan, opset
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: dict[str, onnx.TensorProto] = {}
        self.floats: dict[str, str] = {}  #: value -> ONNX name before its quantizer
        self.ready: dict[str, str] = {}  #: value -> ONNX name after its quantizer
        self.examples: dict[str, torch.Tensor] = {}  #: value -> what it is on example inputs, where that was needed
        by_name = {n.name: n for n in graph.nodes}
        #: values between the members of a fused group, which have no quantizer
        self.inner = {by_name[name].output for group in plan.groups for name in group[:-1]}
        #: value that is rounded each time -> names of its codes, scale and zero point
        self.dynamic: dict[str, tuple[str, str, str]] = {}
        self._finishes: dict[str, Callable[[str], str]] = {}  #: value -> what follows its quantizer
        self._reshaped: dict[str, str] = {}  #: ONNX value -> what it is another shape of
        self._written: dict[tuple[str, str], str] = {}
        self._scope, self._start, self._count = "io", len(self.nodes), 0

    # ---- pieces that operators are written with

    def fresh(self, hint: str) -> str:
        self._count += 1
        return f"{self._scope}/{hint}_{self._count}"

    def op(self, kind: str, inputs: Sequence[str | None], **attrs: Any) -> str:
        """Add a node with one output, "kind@domain" for one of another domain; returns its name."""
        return self.op_many(kind, inputs, 1, **attrs)[0]

    def op_many(self, kind: str, inputs: Sequence[str | None], outputs: int, **attrs: Any) -> list[str]:
        ins = [i or "" for i in inputs]
        if "axes" in attrs and (kind == "ReduceSum" or self.opset >= 18):  # from then on an input of every reduction
            ins.append(self.const(np.array(attrs.pop("axes"), np.int64)))
        while ins and not ins[-1]:
            ins.pop()
        names = [self.fresh(kind) for _ in range(outputs)]
        if kind == "Reshape":
            target = self.initialisers.get(ins[1])
            if target is not None and 0 not in numpy_helper.to_array(
                target
            ):  # of a reshaped value the last shape counts
                ins[0] = self._reshaped.get(ins[0], ins[0])
            self._reshaped[names[0]] = ins[0]
        kind, _, domain = kind.partition("@")
        self.nodes.append(helper.make_node(kind, ins, names, name=names[0], domain=domain or None, **attrs))
        return names

    def once(self, what: tuple[str, str], write: Callable[[], str]) -> str:
        """What several nodes need of one ONNX value, written for the first of them."""
        if what not in self._written:
            self._written[what] = write()
        return self._written[what]

    def const(self, value: Any) -> str:
        """A constant initialiser."""
        name = self.fresh("const")
        self.initialisers[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def shape(self, node: Node, slot: str = "in0") -> tuple[int | None, ...]:
        """Of what stands in a slot of a node; () where nothing does."""
        name = node.operand(slot)
        return () if name is None else self.graph.shape(name)

    def moved(self, kind: str, inputs: Sequence[str], node: Node) -> str:
        """An operator that moves the codes of a node's operand.

        It stands between quantizers of that operand, so that runtimes keep it in integers.
        """
        y = self.op(kind, inputs)
        if self.plan.quantized(node.data) and (node.data, node.name) not in self.plan.float_edges:
            y = self._quantizer(y, node.data, self.fresh("q"))
        return y

    def defer(self, value: str, finish: Callable[[str], str]) -> None:
        """Apply `finish` to `value` once its quantizer is written; to the group's result where it has none."""
        self._finishes[value] = finish

    # ---- names of values

    def begin(self, node: Node) -> None:
        """What follows belongs to `node`."""
        self._scope, self._start = node.name, len(self.nodes)
        for value in node.inputs:
            if value in self._finishes and node.output not in self._finishes:  # it was inside a group
                self._finishes[node.output] = self._finishes.pop(value)

    def read(self, value: str | None, node: Node) -> str | None:
        """The ONNX name under which `node` reads a value or weight."""
        if value is None:
            return None
        raw = (value, node.name) in self.plan.float_edges or value in self.inner
        if value in self.graph.weights:
            return self.weight(value, raw)
        return self.floats[value] if raw else self.ready[value]

    def computed_in_float(self, name: str | None) -> bool:
        """Whether an ONNX value is what an operator has computed: no codes as floats, nor such that were only moved."""
        made = next((n for n in reversed(self.nodes) if name in n.output), None)
        return made is not None and made.op_type not in _MOVING

    def weight(self, name: str, raw: bool) -> str:
        """A weight as floats; dequantized from its codes unless `raw` or stored in float."""
        stored, w = self.plan.stored(name), self.graph.weights[name].detach().cpu()
        if raw or stored is None:
            if name not in self.initialisers:
                self.initialisers[name] = numpy_helper.from_array(w.contiguous().numpy(), name)
            return name
        if name not in self.ready:
            codes = f"{name}_q"
            self.initialisers[codes] = self._codes(codes, stored.quantize(w), name)
            scale, zero = self._numbers(name, stored)
            attrs = {"axis": stored.axis} if stored.scale.dim() else {}
            if stored.scale.dim() > 1 and stored.axis is not None:
                attrs["block_size"] = w.shape[stored.axis] // stored.scale.shape[stored.axis]
            self.ready[name] = self.op("DequantizeLinear", [codes, scale, zero], **attrs)
        return self.ready[name]

    def publish(self, value: str, name: str) -> None:
        """Make a value of the graph known: it gives its name to the ONNX tensor `name`, and its quantizer follows."""
        if name and any(name in n.output for n in self.nodes[self._start :]):
            self._rename(name, value)
            name = value
        finish = None if value in self.inner else self._finishes.pop(value, None)
        quantized = self.plan.quantized(value) and value not in self.inner
        self.floats[value] = name if finish is None else finish(name)
        self.ready[value] = self.floats[value]
        if quantized:
            x = name if finish is None else finish(self._quantizer(name, value, self.fresh("q")))
            self.ready[value] = self._quantizer(x, value, f"{value}_q")

    def take(self, value: str, codes: QuantizedIO) -> None:
        """Make an input of the file known that holds codes; those of the plan pass as they are."""
        grid, own = self.plan[value].grid, f"{value}_q"
        if codes.own and (grid.qmin, grid.qmax) == grid.file_ends:
            self.nodes.append(helper.make_node("Identity", [value], [own], name=own))
            scale, zero = self._numbers(value, self.plan[value])
            self.ready[value] = self.op("DequantizeLinear", [own, scale, zero])
        else:
            self.ready[value] = self._quantizer(self._handed("DequantizeLinear", value, codes), value, own)
        self.floats[value] = self.ready[value]

    def give(self, value: str, codes: QuantizedIO) -> str:
        """The codes of an output."""
        return f"{value}_q" if codes.own else self._handed("QuantizeLinear", self.ready[value], codes)

    def _handed(self, kind: str, x: str, codes: QuantizedIO) -> str:
        return self.op(
            kind, [x, self.const(np.float32(codes.scale)), self.const(np.array(codes.zero_point, codes.type))]
        )

    def _rename(self, old: str, new: str) -> None:
        """Another name for a tensor that the node at hand has made."""
        if old in self._reshaped:
            self._reshaped[new] = self._reshaped[old]
        for n in self.nodes[self._start :]:
            n.input[:] = [new if i == old else i for i in n.input]
            n.output[:] = [new if o == old else o for o in n.output]

    # ---- quantizers

    def _quantizer(self, x: str, value: str, codes: str) -> str:
        """QuantizeLinear saturates at the ends of its type: a narrower grid is clipped to, in codes where ONNX can."""
        stored = self.plan[value]
        scale, zero, ends = *self._numbers(value, stored), (stored.grid.qmin, stored.grid.qmax)
        narrow, bytewide, out = ends != stored.grid.file_ends, stored.grid.file_bits == 8, codes
        if narrow and not bytewide:
            shape = [-1 if k == stored.axis else 1 for k in range(len(self.graph.shape(value)))]
            for kind, end in zip(("Max", "Min"), ends, strict=True):
                x = self.op(kind, [x, self.const(((end - stored.zero_point) * stored.scale).reshape(shape).numpy())])
        elif narrow:
            out = self.fresh("saturated")
        self.nodes.append(helper.make_node("QuantizeLinear", [x, scale, zero], [out], name=out))
        if out != codes:
            low, high = (self.const(np.array(end, "int8" if stored.grid.signed else "uint8")) for end in ends)
            self.nodes.append(helper.make_node("Clip", [out, low, high], [codes], name=codes))
        return self.op("DequantizeLinear", [codes, scale, zero])

    def _numbers(self, name: str, stored: Stored) -> tuple[str, str]:
        """Initialisers of scale and zero point, one pair for a tensor; a single scale has rank 0, as kernels demand."""
        scale, zero = f"{name}_scale", f"{name}_zero_point"
        if scale not in self.initialisers:
            self.initialisers[scale] = numpy_helper.from_array(stored.scale.numpy().astype(np.float32), scale)
            self.initialisers[zero] = self._codes(zero, stored.zero_point, name)
        return scale, zero

    def _codes(self, name: str, codes: torch.Tensor, tensor: str) -> onnx.TensorProto:
        """QuantizedIO of a tensor in the least integer type that ONNX has for them; of biases in int32."""
        grid = self.plan[tensor].grid
        bits = 32 if self.plan.tensors[tensor].role == "bias" else grid.file_bits
        kind = tensor_type(f"int{bits}" if grid.signed or bits == 32 else f"uint{bits}")
        if bits == 4:
            return helper.make_tensor(name, kind, codes.shape, codes.ravel().tolist())
        return numpy_helper.from_array(codes.numpy().astype(helper.tensor_dtype_to_np_dtype(kind)), name)


def refuse(node: Node, why: str) -> NoReturn:
    raise UnsupportedError(f"{node.op} '{node.who}' cannot be written to ONNX: {why}", where=node.source)


def tensor_type(dtype: str) -> int:
    """ONNX's number for a type by torch's name; a Python integer ("int") is an int64."""
    names = {"float32": "FLOAT", "float64": "DOUBLE", "int": "INT64"}
    number: int = TensorProto.DataType.Value(names.get(dtype, dtype.upper()))
    return number
