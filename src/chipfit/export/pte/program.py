"""A module of torch that computes a Graph under a Plan with ExecuTorch's quantize and dequantize operators."""

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
    """A network whose quantized values are integers between operators, for `torch.export`.

    Args:
        note: called with the name of each value where it is quantized, in execution order.
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
        """Add the buffers of a weight: floats under its key, the rounded bias with _b, integers with _q, _s and _z.

        Floats are kept for operators that read the weight before its quantizer. _s and _z hold the scales and zero
        points of channels or blocks.
        """
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
                env[n.output] = _round_rows(self._read(env, codes, n.data, n))
                continue
            operands = [None if i is None else self._read(env, codes, i, n) for i in n.inputs]
            results = _run_on_images(n, operands) if self._is_float_1d(n) else _execute(n, operands)
            env.update(zip(n.outputs, results, strict=False))
        return tuple(self._read(env, codes, o, None) for o in self.graph.outputs)

    def _is_float_1d(self, n: Node) -> bool:
        """Return whether a node has one spatial axis and weights in float, which XNNPACK would read as integers."""
        one_axis = n.op in ("Conv1D", "TransposeConv1D") or (n.op == "BatchNorm" and len(self.graph.shape(n.data)) == 3)
        return one_axis and not self.plan.quantized(n.inputs[1] or "")

    def _read(self, env: dict[str, Any], codes: dict[str, Tensor], name: str, node: Node | None) -> Any:
        """Return the floats that a node (None: an output) reads.

        Each reader of a quantized value has a dequantize operator of its own, as the partitioner expects.
        """
        raw = node is not None and (name, node.name) in self.plan.float_edges
        if name in self.graph.weights:
            return self._weight(name, raw)
        if raw or not self.plan.quantized(name) or name in self.inner:
            return env[name]
        parameters = _quantize_arguments(self.plan[name])
        if name not in codes:
            self.note(name)
            codes[name] = torch.ops.quantized_decomposed.quantize_per_tensor(env[name], *parameters)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(codes[name], *parameters)

    def _weight(self, name: str, raw: bool) -> Tensor:
        """Return the floats of a weight, dequantized; if `raw`, as they are before its quantizer."""
        stored, key = self.plan.stored(name), self.names[name]
        if stored is None or raw:
            return self.get_buffer(key)
        if self.plan.tensors[name].role == "bias":
            return self.get_buffer(f"{key}_b")
        ops, q = torch.ops.quantized_decomposed, self.get_buffer(f"{key}_q")
        if not stored.scale.dim():
            return ops.dequantize_per_tensor(q, *_quantize_arguments(stored))
        ends = (stored.grid.qmin, stored.grid.qmax, torch.int8)
        parameters = self.get_buffer(f"{key}_s"), self.get_buffer(f"{key}_z")
        if stored.scale.dim() > 1:
            block = q.shape[1] // stored.scale.shape[1]
            return ops.dequantize_per_channel_group(q, *parameters, *ends, block, torch.float32)
        return ops.dequantize_per_channel(q, *parameters, stored.axis, *ends)


def _execute(n: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a node with operators that the partitioner knows: a clamp as hardtanh."""
    if n.op == "Clamp" and None not in (n.attrs["min"], n.attrs["max"]):
        return (F.hardtanh(inputs[0], n.attrs["min"], n.attrs["max"]),)
    return execute(n, inputs)


def _round_rows(x: Tensor) -> Tensor:
    """Quantize and dequantize each row to 8 bits at run time; XNNPACK fuses this into its dynamic kernels."""
    ops, ends = torch.ops.quantized_decomposed, (-128, 127, torch.int8)
    parameters = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
    q: Tensor = ops.quantize_per_token(x, *parameters, *ends)
    return ops.dequantize_per_token(q, *parameters, *ends, torch.float32)


def _run_on_images(n: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a convolution or batch norm of one spatial axis on images of height 1."""
    x, w, *bias = inputs
    if n.op == "BatchNorm":
        return (execute(n, [x.unsqueeze(2), w, *bias])[0].squeeze(2),)
    front = {"stride": 1, "dilation": 1, "padding": (0, 0), "output_padding": 0}
    attrs = {k: (front[k], *v) if k in front else v for k, v in n.attrs.items()}
    (y,) = execute(n.with_(op=n.op.replace("1D", "2D"), attrs=attrs), [x.unsqueeze(2), w.unsqueeze(2), *bias])
    return (y.squeeze(2),)


def _quantize_arguments(stored: Stored) -> tuple[float, int, int, int, torch.dtype]:
    """Return the arguments of a quantize operator: scale, zero point, least and greatest integer, and their type."""
    grid = stored.grid
    return float(stored.scale), int(stored.zero_point), grid.qmin, grid.qmax, torch.int8
