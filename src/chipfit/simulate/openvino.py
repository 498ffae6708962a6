"""OpenVINO's integer kernels on x86 CPUs: product sums in integers, then float32 in the order of its fused operators.

A quantizer is a FakeQuantize whose float32 interval [low, high] = [(q_low - z) s, (q_high - z) s] gives a multiplier m
and a shift. Low-precision transformations move the scales of operands behind the operators that they pass, and divide
the interval by them; the multiplier and the shift follow from the divided interval. The integers are the same with
AVX2, AVX2-VNNI, AVX-512 and AVX-512-VNNI.

Source: OpenVINO, src/plugins/intel_cpu/src/{dnnl_postops_composer,graph_optimizer,nodes/fake_quantize}.cpp and
src/common/low_precision_transformations/src/{add,eltwise_base_transformation,fake_quantize}.cpp.
"""

from __future__ import annotations

import torch

from chipfit.graph.ir import Node
from chipfit.operators.table import OPS
from chipfit.quantizers.stored import Stored
from chipfit.registry import register
from chipfit.simulate.integer import KernelCall, Profile, Simulation, accumulate, kernel_of, pool_windows
from chipfit.simulate.libm import fma

Tensor = torch.Tensor

#: products of quantized data and quantized weights
_PRODUCTS = [op for op, row in OPS.items() if row.kind in ("conv", "linear")]
_MEANS = ("AvgPool", "GlobalAvgPool", "Mean")


# ---------------------------------------------------------------- quantizers


class Quantizer:
    """A FakeQuantize of floats in units of `by`.

    Args:
        by: the scale that the floats still are to be multiplied by, [] or one that broadcasts; None: 1.
    """

    def __init__(self, t: Stored, by: Tensor | None = None) -> None:
        least, most = t.grid.file_ends
        low, high = ((end - t.zero_point.float()) * t.scale for end in (least, most))
        if by is not None:
            low, high = low / by, high / by
        self.stored, self.least, self.steps, self.low = t, least, torch.tensor(float(most - least)), low
        self.multiplier = self.steps / (high - low)
        self.shift = -low * self.steps / (high - low) + least

    def _rounded(self, y: Tensor) -> Tensor:
        grid = self.stored.grid
        return torch.round(y).clamp(grid.qmin, grid.qmax).to(grid.dtype)

    def alone(self, x: Tensor) -> Tensor:
        """Quantize as a kernel of its own, or behind an element-wise one: rne(fma(x, m, shift))."""
        return self._rounded(fma(x, self.multiplier, self.shift))

    def in_subgraph(self, x: Tensor) -> Tensor:
        """Quantize as element-wise kernels of tensors with a fixed batch size do: rne(x m - low m), each rounded."""
        return self._rounded(x * self.multiplier + (self.least - self.low * self.multiplier))

    def behind_product(self, y: Tensor) -> Tensor:
        """Quantize as a product that ends with it does.

        With one multiplier for all channels, y (1 / (1 / m)), or fma(y, m, shift) with a zero point; with one for each
        channel, which is multiplied with the sums first, y m + shift.
        """
        m, shift = self.multiplier, self.shift
        if bool((m == m.flatten()[0]).all()) and bool((shift == shift.flatten()[0]).all()):
            m, shift = m.flatten()[0], shift.flatten()[0]
            return self._rounded(y * (1 / (1 / m)) if bool(shift.abs() < self.steps * 1e-5) else fma(y, m, shift))
        if bool(((shift - shift.flatten()[0]).abs() < 5e-5).all()):
            shift = shift.flatten()[0]
        return self._rounded(y * m + shift)


def _quantized(run: Simulation, x: Tensor, t: Stored, by: Tensor | None = None) -> Tensor:
    """Quantize the result of an element-wise kernel, or of a float one."""
    quantizer = Quantizer(t, by)
    return quantizer.in_subgraph(x) if _is_static(run) else quantizer.alone(x)


def _is_static(run: Simulation) -> bool:
    """Return whether the file has fixed sizes, for which OpenVINO compiles element-wise operators itself."""
    return all(None not in run.graph.values[i].shape for i in run.graph.inputs)


def _clipped(nodes: list[Node], y: Tensor, by: Tensor | None) -> Tensor:
    """Return what activations clip, in units of `by`."""
    for n in nodes:
        low, high = n.clip_range or (None, None)
        unit = torch.tensor(1.0) if by is None else by
        y = y if low is None else torch.maximum(y, low / unit)
        y = y if high is None else torch.minimum(y, high / unit)
    return y


# ---------------------------------------------------------------- products


def _along_channels(node: Node, v: Tensor, like: Tensor) -> Tensor:
    """Return numbers of the output channels in a shape that broadcasts against results of a product."""
    return v.view(-1, *[1] * (like.dim() - 2)) if v.dim() and node.facts.kind != "linear" else v


def _bias(run: Simulation, node: Node) -> Tensor | None:
    """Return the bias in float32; None if there is none, or all of it is 0."""
    if node.bias is None:
        return None
    b: Tensor = run.float_value(node.bias, node).float()
    return b if bool(b.any()) else None


def _sums(c: KernelCall) -> Tensor:
    """Return sums of products in float32, without bias."""
    return accumulate(c.run, c.node.with_(inputs=c.node.inputs[:2])).float()


def _scale_of(c: KernelCall, sums: Tensor) -> Tensor:
    return _along_channels(c.node, c.scale(c.x) * c.scale(c.second), sums)


def _product(c: KernelCall) -> Tensor:
    """Return float32(acc) * float32(s_x s_w) + b, each step rounded."""
    acc, b = _sums(c), _bias(c.run, c.node)
    y = acc * _scale_of(c, acc)
    if b is None:
        c.run.floats[_sums_name(c.node)] = acc  # the quantizer behind a product without bias reads them
        return y
    return y + _along_channels(c.node, b, y)


def _sums_name(node: Node) -> str:
    return f"{node.output}, not scaled"


def _product_sum(c: KernelCall) -> None:
    """Compute a product, what is fused behind it, and the quantizer."""
    t, y, by = c.run.stored(c.out), _product(c), None
    acc = c.run.floats.pop(_sums_name(c.node), None)
    for k, n in enumerate(c.nodes[1:], 1):
        if n.op == "Add":
            y, by = _with_sum(c, n, y, acc if k == 1 else None)
            y = _clipped(list(c.nodes[k + 1 :]), y, by)
            whole = Quantizer(t, by).behind_product if _sums_in_place(c, n) else None
            c.run.codes[c.out] = whole(y) if whole else _quantized(c.run, y, t, by)
            return
        y = _clipped([n], y, None)
    if acc is None:
        c.run.codes[c.out] = Quantizer(t).behind_product(y)
    else:
        scale = _scale_of(c, acc)
        c.run.codes[c.out] = Quantizer(t, scale).behind_product(_clipped(list(c.nodes[1:]), acc, scale))


def _other_operand(c: KernelCall, add: Node) -> str:
    made = {o for n in c.nodes for o in n.outputs}
    return next(i for i in add.inputs if i is not None and i not in made)


def _with_sum(c: KernelCall, add: Node, y: Tensor, acc: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a product plus another operand, in units of the operand's scale if that is quantized, and the scale.

    Args:
        acc: the sums of a product without bias, whose scale is divided by the operand's.
    """
    other = _other_operand(c, add)
    if other not in c.run.codes or (other, add.name) in c.run.plan.float_edges:
        return y + c.run.float_value(other, add), None
    s, z = c.scale(other), c.zero(other).float()
    if acc is None:
        y = (y - z * s if bool(z) else y) * (1 / s)
    else:
        scale = _scale_of(c, acc)
        y = (acc - z * s / scale if bool(z) else acc) * (scale / s)
    return y + c.code(other).float(), s


def _sums_in_place(c: KernelCall, add: Node) -> bool:
    """Return whether a convolution adds into the memory of the other operand.

    It does where all other readers of that operand have run before; the convolution itself does not read it.
    """
    if _is_static(c.run) or c.node.facts.kind == "linear":
        return False
    other, graph = _other_operand(c, add), c.run.graph
    behind = {other}
    users = graph.users()
    before, todo = {add.name}, [add]
    makers = graph.producers()
    while todo:
        for i in todo.pop().inputs:
            if i in makers and makers[i].name not in before:
                before.add(makers[i].name)
                todo.append(makers[i])
    return c.x not in behind and all(n.name in before for n in users[other])


# ---------------------------------------------------------------- sums


def _add(c: KernelCall) -> None:
    """Add two quantized tensors, or one and a constant, in units of the scale of one of them.

    The other operand is rescaled by its own quantizer: fma(q, (high - low) / 255, low), or by (q - z') m.
    """
    a, b, t = c.x, c.second, c.run.stored(c.out)
    constants = [i for i in (a, b) if i in c.run.graph.weights]
    if constants:
        x = a if constants[0] == b else b
        s, z, p = c.scale(x), c.zero(x).float(), c.run.float_value(constants[0], c.node)
        y = c.code(x).float() - (z - p / s) if bool(z) else c.code(x).float() + p / s
    else:
        full, x = (b, a) if _second_is_rescaled(c) else (a, b)
        s = c.scale(x)
        y = _rescaled(c, full, x) + c.code(x).float()
    c.run.codes[c.out] = _quantized(c.run, _clipped(list(c.nodes[1:]), y, s), t, s)


def _second_is_rescaled(c: KernelCall) -> bool:
    """Return whether the second of two quantized operands is rescaled: the first has more readers."""
    users = c.run.graph.users()
    first, second = (len({n.name for n in users[i]}) for i in (c.x, c.second))
    return first > 1 and second == 1


def _rescaled(c: KernelCall, name: str, other: str) -> Tensor:
    """Return an operand in units of the other one's scale, with the other one's zero point subtracted."""
    z, m = c.zero(name).float(), c.scale(name) / c.scale(other)
    if bool(c.zero(other)):
        z = z + c.zero(other).float() * c.scale(other) / c.scale(name)
    q = c.code(name).float()
    if len({n.name for n in c.run.graph.users()[name]}) > 1:
        return (q - z) * m
    least, most = c.run.stored(name).grid.file_ends
    low, high = (least - z) * m, (most - z) * m
    return fma(q - least, (high - low) / torch.tensor(float(most - least)), low)


# ---------------------------------------------------------------- means


def _mean(c: KernelCall) -> Tensor:
    """Return means of integers, less the zero point, each step rounded to float32."""
    q, a, z = c.code().double(), c.attrs, c.zero(c.x).float()
    if c.node.op == "AvgPool":
        parts, n = pool_windows(q, c.node, border=float(z))
        return (parts.sum(-1) / n).float() - z
    axes = a["axes"] if c.node.op == "Mean" else tuple(range(2, q.dim()))
    return q.mean(axes, keepdim=c.node.op != "Mean" or a["keepdims"]).float() - z


def _mean_in_float(c: KernelCall) -> Tensor:
    return _mean(c) * c.scale(c.x)


def _quantized_mean(c: KernelCall) -> None:
    """Quantize means in units of the operand's scale: rne(fma(mean - z, m, shift))."""
    c.run.codes[c.out] = Quantizer(c.run.stored(c.out), c.scale(c.x)).alone(_mean(c))


# ---------------------------------------------------------------- the profile


def _clip(act: Node, t: Stored) -> tuple[int, int] | None:
    """Return the whole grid for what a kernel itself computes behind its sums; None for other operators."""
    return (t.grid.qmin, t.grid.qmax) if act.clip_range is not None or act.op == "Add" else None


def _quantize(run: Simulation, name: str, x: Tensor) -> Tensor:
    """Quantize the result of a float operator, as part of a product that it follows, else alone."""
    t, c = run.stored(name), _product_before(run, name)
    if c is None:
        return _quantized(run, x, t)
    acc = run.floats.pop(_sums_name(c.node), None)
    if acc is None:
        return Quantizer(t).behind_product(x)
    scale = _scale_of(c, acc)
    return Quantizer(t, scale).behind_product(_clipped(list(c.nodes[1:]), acc, scale))


def _product_before(run: Simulation, name: str) -> KernelCall | None:
    """Return the product, and operators behind it, that compute a value in one kernel; None if there is none."""
    makers, users = run.graph.producers(), run.graph.users()
    nodes: list[Node] = []
    value = name
    while (n := makers.get(value)) is not None:
        nodes.insert(0, n)
        if n.op in _PRODUCTS:
            reads = [i for i in n.inputs[:2] if i is not None]
            whole = all(run.plan.quantized(i) and (i, n.name) not in run.plan.float_edges for i in reads)
            return KernelCall(run, nodes) if whole else None
        value = n.data
        alone = len(users.get(value, ())) == 1 and value not in run.graph.outputs and not run.plan.quantized(value)
        if n.clip_range is None or not alone:
            return None
    return None


register("kernels", "openvino")(
    Profile(
        kernels={op: kernel_of(_product_sum) for op in _PRODUCTS}
        | {op: kernel_of(_quantized_mean) for op in _MEANS}
        | {"Add": kernel_of(_add)},
        float_outputs=dict.fromkeys(_PRODUCTS, _product) | dict.fromkeys(_MEANS, _mean_in_float),
        clip=_clip,
        quantize=_quantize,
        max_bits=8,
        float_biases=True,
    )
)
