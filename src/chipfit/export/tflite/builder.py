"""What operators are written with: the graph's values as tensors of the file, its weights as constants."""

from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np
import torch

from chipfit.export.tflite.file import INT4, TYPES, File, Numbers
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.stored import Stored


class Refused(Exception):
    """(what, why): one operator cannot be written. All are gathered into one error."""


class TfliteBuilder(File):
    """A file, and the operator that is written to it."""

    def __init__(self, graph: Graph, plan: Plan, sizes: Mapping[str, tuple[int, ...]], batch: int | None) -> None:
        super().__init__()
        self.graph, self.plan, self.sizes, self.batch = graph, plan, sizes, batch
        self.node = Node("io", "", (), ())
        self.kind = ""  #: what the schema calls it, where it has one name
        self.integer = False  #: it is written in integers
        self.fused = 0  #: code of the activation that it applies itself
        self.dynamic: set[str] = set()  #: values in float that their readers round each time

    def begin(self, node: Node, kind: str = "", integer: bool = False, fused: int = 0) -> None:
        """The operator at hand is another one."""
        self.node, self.kind, self.integer, self.fused = node, kind, integer, fused
        self.stem = node.name

    def refuse(self, node: Node, why: str) -> NoReturn:
        raise Refused(f"{node.op if node.op != OPAQUE else node.attrs['target']} '{node.who}'", why)

    def shape(self, name: str) -> tuple[int, ...]:
        """Concrete sizes of a value (batch 1 where it is open) or weight, in the file's layout."""
        return tuple(self.graph.weights[name].shape) if name in self.graph.weights else self.sizes[name]

    def open_shape(self, name: str) -> list[int]:
        """Sizes of a value with -1 where it is open."""
        known = self.graph.values[name].shape
        return [s if n is not None or self.batch else -1 for s, n in zip(self.sizes[name], known, strict=True)]

    def raw_name(self, value: str) -> str:
        """The tensor that holds a value in float."""
        return f"{value}/float" if self.plan.quantized(value) else value

    def reads(self, node: Node) -> list[int]:
        """The tensors of all operands."""
        return [self.read(i) for i in node.inputs if i is not None]

    def read(self, name: str) -> int:
        """The tensor of an operand: codes when the operator runs in integers, else floats."""
        if name in self.graph.weights:
            return self.weight(name)
        if not self.plan.quantized(name) or self.integer:
            return self.known[name]
        if (name, self.node.name) in self.plan.float_edges:
            return self.known[self.raw_name(name)]
        key = f"{name}/dequantized"
        if key not in self.known:
            self.tensor(key, self.sizes[name], TYPES["float32"], open_shape=self.open_shape(name))
            self.op("DEQUANTIZE", [self.known[name]], self.known[key])
        return self.known[key]

    def weight(
        self,
        name: str,
        change: Callable[[np.ndarray], np.ndarray] = np.ascontiguousarray,
        axis: int = 0,
        scale: np.ndarray | None = None,
        wide: bool = True,
    ) -> int:
        """A weight as a constant tensor, rearranged by `change`.

        Args:
            axis: where `change` brings the channel axis of per-channel scales.
            scale: one number or one per channel, in place of the plan's of the same value.
            wide: the operator reads 64 bits; else 32 where the codes fit, as kernels of 8-bit operands demand.
        """
        if name not in self.graph.weights:
            self.refuse(self.node, "its weight is computed at run time")
        w, stored = self.graph.weights[name].detach().cpu(), self.plan.stored(name)
        if stored is None or (name, self.node.name) in self.plan.float_edges:
            return self.constant(change(w.contiguous().numpy()), name)
        q = stored.quantize(w)
        planned, rounds = self.plan.nodes.get(self.node.name), self.node.data in self.dynamic
        if stored.grid.per == "block":
            return self._in_blocks(name, stored, q, rounds)
        alone = planned is not None and planned.exec == "float" and not stored.zero_point.any()
        if not (self.integer or rounds or alone):
            return self.constant(change(stored.dequantize(q).numpy()), f"{name}/float")
        scale = stored.scale.reshape(-1).numpy() if scale is None else scale
        zero = stored.zero_point.reshape(-1)[: len(scale)].numpy()
        numbers = Numbers(scale, zero, axis if stored.axis is not None else 0)
        kind = code_type(self.plan.tensors[name])
        if kind == TYPES["int64"] and not wide and q.numel() and int(q.abs().max()) < 1 << 31:
            kind = TYPES["int32"]
        codes = self.constant(change(q.numpy()), name, kind, numbers)
        if self.integer or rounds:
            return codes
        key = f"{name}/dequantized"
        if key not in self.known:  # a runtime may do it once
            self.tensor(key, self.tensors[codes].shape, TYPES["float32"])
            self.op("DEQUANTIZE", [codes], self.known[key])
        return self.known[key]

    def _in_blocks(self, name: str, stored: Stored, q: torch.Tensor, rounds: bool) -> int:
        """The codes of a matrix whose scales belong to blocks of its rows; kernels keep these in 16 bits."""
        if not rounds:
            self.refuse(self.node, "only linear layers that round their data each time take weights in blocks")
        if stored.axis != 1 or stored.grid.bits != 4 or stored.zero_point.any():
            got = f"blocks of {stored.grid.bits} bits along axis {stored.axis}"
            self.refuse(self.node, f"{got}; kernels have blocks of 4 bits along a row's inputs, without zero points")
        scale = stored.scale  # XNNPACK takes them as bfloat16, the other kernels as the file has them
        if not (torch.equal(scale.bfloat16().float(), scale) and torch.equal(scale.half().float(), scale)):
            self.refuse(self.node, f"scales of blocks up to {float(scale.max()):g} that do not fit 16 bits")
        return self.constant(q.numpy(), name, INT4, Numbers(scale.numpy(), stored.zero_point.numpy()))


def code_type(t: TensorPlan) -> int:
    """The file's type of a tensor's codes."""
    bits = t.grid.bits if t.grid is not None else 32
    if t.role == "bias":
        return TYPES["int64" if bits > 32 else "int32"]
    return INT4 if bits <= 4 else TYPES["int8" if bits <= 8 else "int16" if bits <= 16 else "int32"]
