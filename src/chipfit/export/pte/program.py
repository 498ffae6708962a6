"""A Graph under a Plan as a torch module with ExecuTorch's quantize and dequantize operators, for `torch.export`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chipfit.engine.kernels import execute
from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.plan.record import Plan
from chipfit.quantizers.stored import Stored


class QuantizedProgram(nn.Module):
    """A network whose quantized values are integers between operators.

    Args:
        note: called with each value that it rounds, in the order of the operators that do so.
    """

    def __init__(self, graph: Graph, plan: Plan, note: Callable[[str], Any]) -> None:
        super().__init__()
        self.graph, self.plan, self.note = graph, plan, note
        nodes = {n.name: n for n in graph.nodes}
        #: values between the members of a fused group, which have no quantizer
        self.inner = {nodes[name].output for group in plan.groups for name in group[:-1]}
        self.names = {name: f"w{k}" for k, name in enumerate(graph.weights)}
        for name, w in graph.weights.items():
            self._add_weight(name, w.detach())

    def _add_weight(self, name: str, w: Tensor) -> None:
        """Add a weight as integers with scales, and in float for those that read it before its quantizer."""
        # a kernel of one position counts as contiguous with the strides of channels last, too, and its results get them
        stored, key, w = self.plan.stored(name), self.names[name], w.clone(memory_format=torch.contiguous_format)
        if stored is None or any(v == name for v, _ in self.plan.float_edges):
            self.register_buffer(key, w)
        if stored is None:
            return
        if self.plan.tensors[name].role == "bias":
            self.register_buffer(f"{key}_b", stored.dequantize(stored.quantize(w)))
            return
        self.register_buffer(f"{key}_q", stored.quantize(w).to(torch.int8))
        if stored.scale.dim():
            self.register_buffer(f"{key}_s", stored.scale.clone())
            self.register_buffer(f"{key}_z", stored.zero_point.long())

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Run the network; return its outputs."""
        env, codes = dict(zip(self.graph.inputs, inputs, strict=True)), dict[str, Tensor]()
        for n in self.graph.nodes:
            if n.op == DYNAMIC:
                self.note(n.data)
                env[n.output] = _rounded_by_row(self._read(env, codes, n.data, n))
                continue
            operands = [None if i is None else self._read(env, codes, i, n) for i in n.inputs]
            results = _on_images(n, operands) if self._float_line(n) else _execute(n, operands)
            env.update(zip(n.outputs, results, strict=False))
        return tuple(self._read(env, codes, o, None) for o in self.graph.outputs)

    def _float_line(self, n: Node) -> bool:
        """Return whether a node has one spatial axis and weights in float, which the delegate takes for integers."""
        lines = n.op in ("Conv1D", "TransposeConv1D") or (n.op == "BatchNorm" and len(self.graph.shape(n.data)) == 3)
        return lines and not self.plan.quantized(n.inputs[1] or "")

    def _read(self, env: dict[str, Any], codes: dict[str, Tensor], name: str, node: Node | None) -> Any:
        """Return what a node reads: a value dequantized for it alone, as the partitioner expects, or in float."""
        raw = node is not None and (name, node.name) in self.plan.float_edges
        if name in self.graph.weights:
            return self._weight(name, raw)
        if raw or not self.plan.quantized(name) or name in self.inner:
            return env[name]
        numbers = _per_tensor(self.plan[name])
        if name not in codes:
            self.note(name)
            codes[name] = torch.ops.quantized_decomposed.quantize_per_tensor(env[name], *numbers)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(codes[name], *numbers)

    def _weight(self, name: str, raw: bool) -> Tensor:
        stored, key = self.plan.stored(name), self.names[name]
        if stored is None or raw:
            return self.get_buffer(key)
        if self.plan.tensors[name].role == "bias":
            return self.get_buffer(f"{key}_b")
        ops, q = torch.ops.quantized_decomposed, self.get_buffer(f"{key}_q")
        if not stored.scale.dim():
            return ops.dequantize_per_tensor(q, *_per_tensor(stored))
        ends = (stored.grid.qmin, stored.grid.qmax, torch.int8)
        numbers = self.get_buffer(f"{key}_s"), self.get_buffer(f"{key}_z")
        if stored.scale.dim() > 1:
            block = q.shape[1] // stored.scale.shape[1]
            return ops.dequantize_per_channel_group(q, *numbers, *ends, block, torch.float32)
        return ops.dequantize_per_channel(q, *numbers, stored.axis, *ends)


def _execute(n: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a node, with the operators that the partitioner knows."""
    if n.op == "Clamp" and None not in (n.attrs["min"], n.attrs["max"]):
        return (F.hardtanh(inputs[0], n.attrs["min"], n.attrs["max"]),)
    return execute(n, inputs)


def _rounded_by_row(x: Tensor) -> Tensor:
    """Round each row to 8 bits when the program runs: the delegate's dynamic kernels do so themselves."""
    ops, ends = torch.ops.quantized_decomposed, (-128, 127, torch.int8)
    numbers = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
    q: Tensor = ops.quantize_per_token(x, *numbers, *ends)
    return ops.dequantize_per_token(q, *numbers, *ends, torch.float32)


def _on_images(n: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a convolution or batch norm of one spatial axis as one of images of height 1."""
    x, w, *bias = inputs
    if n.op == "BatchNorm":
        return (execute(n, [x.unsqueeze(2), w, *bias])[0].squeeze(2),)
    before = {"stride": 1, "dilation": 1, "padding": (0, 0), "output_padding": 0}
    attrs = {k: (before[k], *v) if k in before else v for k, v in n.attrs.items()}
    (y,) = execute(n.with_(op=n.op.replace("1D", "2D"), attrs=attrs), [x.unsqueeze(2), w.unsqueeze(2), *bias])
    return (y.squeeze(2),)


def _per_tensor(stored: Stored) -> tuple[float, int, int, int, torch.dtype]:
    """Return scale, zero point, range and type of a quantized value."""
    grid = stored.grid
    return float(stored.scale), int(stored.zero_point), grid.qmin, grid.qmax, torch.int8
