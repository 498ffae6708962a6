"""Builder of a `.tflite` file for one graph: its values as tensors of the file, its weights as constants."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from chipfit.export.tflite.file import INT4, TYPES, File, Quantization
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.stored import Stored


class Refused(Exception):
    """(what, why): an operator cannot be written. All are gathered into one error."""


class TfliteBuilder(File):
    """A file under construction, and the operator that is being written."""

    def __init__(self, graph: Graph, plan: Plan, sizes: Mapping[str, tuple[int, ...]], batch: int | None) -> None:
        super().__init__()
        self.graph, self.plan, self.sizes, self.batch = graph, plan, sizes, batch
        self.node = Node("io", "", (), ())
        self.kind = ""  #: its name in the schema, if it has one name
        self.integer = False  #: it is written with integer operands
        self.fused = 0  #: number of the activation that is fused into it
        self.joined: dict[str, list[str]] = {}  #: weight -> the tensors that hold it one after another
        self.kept: dict[str, str] = {}  #: state -> its next value, which takes its place in one tensor
        self.dynamic: set[str] = set()  #: float values that their readers quantize dynamically
        #: 64-bit integers of the model, such as indices, have 32 bits in the file: microcontrollers compute with these
        self.short = bool(plan.provenance.get("integer_only"))

    def _free(self, name: str) -> str:
        """Return a name that neither another tensor of the file nor one of the graph has."""
        taken: ChainMap[str, Any] = ChainMap(self.index, self.graph.weights, self.graph.values)
        return unique_name(name, taken) if name in self.index else name

    def begin(self, node: Node, kind: str = "", integer: bool = False, fused: int = 0) -> None:
        """Start to write an operator."""
        self.node, self.kind, self.integer, self.fused = node, kind, integer, fused
        self.scope = node.name

    def refuse(self, node: Node, why: str) -> NoReturn:
        """Raise that a node cannot be written."""
        raise Refused(f"{node.called} '{node.display_name}'", why)

    def require(self, node: Node, condition: object, why: str) -> None:
        """Raise that a node cannot be written if a condition of its form is false."""
        if not condition:
            self.refuse(node, why)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return concrete sizes of a value (1 for an open batch) or weight, in the file's layout."""
        return tuple(self.graph.weights[name].shape) if name in self.graph.weights else self.sizes[name]

    def open_shape(self, name: str) -> list[int]:
        """Return the sizes of a value with -1 for open ones."""
        known = self.graph.values[name].shape
        return [s if n is not None or self.batch else -1 for s, n in zip(self.sizes[name], known, strict=True)]

    def float_name(self, value: str) -> str:
        """Return the name of the tensor that holds a value in float."""
        return f"{value}/float" if self.plan.quantized(value) else value

    def reads(self, node: Node) -> list[int]:
        """Return the tensors of all operands."""
        return [self.read(i) for i in node.inputs if i is not None]

    def read(self, name: str) -> int:
        """Return the tensor of an operand: integers if the operator is written in integers, else floats."""
        if name in self.graph.weights:
            return self.weight(name)
        if not self.plan.quantized(name) or self.integer:
            return self.index[name]
        if (name, self.node.name) in self.plan.float_edges:
            return self.index[self.float_name(name)]
        key = f"{name}/dequantized"
        if key not in self.index:
            self.tensor(key, self.sizes[name], TYPES["float32"], open_shape=self.open_shape(name))
            self.op("DEQUANTIZE", [self.index[name]], self.index[key])
        return self.index[key]

    def weight(
        self,
        name: str,
        change: Callable[[np.ndarray], np.ndarray] = np.ascontiguousarray,
        axis: int = 0,
        scale: np.ndarray | None = None,
        wide: bool = True,
    ) -> int:
        """Add a weight as a constant tensor, rearranged by `change`, and return its index.

        Args:
            axis: channel axis of per-channel scales behind `change`.
            scale: one number or one per channel, of the same value as the plan's.
            wide: the operator reads 64-bit integers; else they are stored in 32 bits if they fit, as kernels of 8-bit
                operands demand.
        """
        self.require(self.node, name in self.graph.weights, "its weight is computed at run time")
        w, stored = self.graph.weights[name].detach(), self.plan.stored(name)
        if not w.dim() and not self.shape(self.node.outputs[0]):  # else an axis of size 1, which is broadcast
            change = np.asarray
        if stored is None or (name, self.node.name) in self.plan.float_edges:
            w = w.int() if self.short and w.dtype == torch.int64 else w
            return self.constant(change(w.contiguous().numpy()), name if stored is None else f"{name}/float")
        q = stored.quantize(w)
        planned, dynamic = self.plan.nodes.get(self.node.name), self.node.data in self.dynamic
        if stored.grid.per == "block":
            return self._in_blocks(name, stored, q, dynamic)
        weight_only = (planned is None or planned.exec == "float") and not stored.zero_point.any()
        if not (self.integer or dynamic or weight_only):
            return self.constant(change(stored.dequantize(q).numpy()), f"{name}/float")
        scale = stored.scale.reshape(-1).numpy() if scale is None else scale
        zero = stored.zero_point.reshape(-1)[: len(scale)].numpy()
        qparams = Quantization(scale, zero, axis if stored.axis is not None else 0)
        kind = code_type(self.plan.tensors[name])
        if kind == TYPES["int64"] and not wide and q.numel() and int(q.abs().max()) < 1 << 31:
            kind = TYPES["int32"]
        integers = self.constant(change(q.numpy()), name, kind, qparams)
        if self.integer or dynamic:
            return integers
        return self.dequantized(integers, name)

    def dequantized(self, integers: int, name: str) -> int:
        """Return the float side of a constant of integers; a runtime may compute it once."""
        key = f"{name}/dequantized"
        if key not in self.index:
            self.tensor(key, self.tensors[integers].shape, TYPES["float32"])
            self.op("DEQUANTIZE", [integers], self.index[key])
        return self.index[key]

    def _in_blocks(self, name: str, stored: Stored, q: torch.Tensor, dynamic: bool) -> int:
        """Add a matrix whose scales belong to blocks of its rows; kernels keep the scales in 16 bits."""
        why = "only linear layers that quantize their data dynamically take weights in blocks"
        self.require(self.node, dynamic, why)
        why = f"blocks of {stored.grid.bits} bits along axis {stored.axis}"
        why += "; kernels have blocks of 4 bits along a row's inputs, without zero points"
        self.require(self.node, stored.axis == 1 and stored.grid.bits == 4 and not stored.zero_point.any(), why)
        scale = stored.scale  # XNNPACK reads them as bfloat16, the other kernels as the file has them
        exact = all(torch.equal(scale.to(half).float(), scale) for half in (torch.bfloat16, torch.float16))
        self.require(self.node, exact, f"scales of blocks up to {float(scale.max()):g} that do not fit 16 bits")
        return self.constant(q.numpy(), name, INT4, Quantization(scale.numpy(), stored.zero_point.numpy()))


def code_type(t: TensorPlan) -> int:
    """Return the file's type for a tensor's integers."""
    bits = t.grid.bits if t.grid is not None else 32
    if t.role == "bias":
        return TYPES["int64" if bits > 32 else "int32"]
    return INT4 if bits <= 4 else TYPES["int8" if bits <= 8 else "int16" if bits <= 16 else "int32"]
