"""A trained network without its quantizers, and what they learned of each tensor."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from chipfit.decide.assignment import TensorSpec
from chipfit.errors import UnsupportedError
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.mqbench.quantizers import AlgorithmQuantizer, QuantizeBase
from chipfit.quantizers.algorithm import Algorithm
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.quantizers.stored import Stored

#: relative tolerance (of the greatest magnitude) at which two tensors count as equal
TOLERANCE = 1e-5
_HINT = "`platforms_of(model, example_inputs)` lists the platforms that store everything as it was trained"


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The quantization of one tensor as it was trained; scale and zero point are [] or [C]."""

    grid: Grid
    scale: torch.Tensor
    zero_point: torch.Tensor
    axis: int | None
    is_weight: bool
    algorithm: Algorithm | None = None

    @classmethod
    def of(cls, q: QuantizeBase, is_weight: bool) -> "Learned":
        """Return what a quantizer learned."""
        scale, zero = (v.cpu() for v in q.numbers())
        algorithm = q.rounds.algorithm if isinstance(q, AlgorithmQuantizer) else None
        axis = q.ch_axis if q.ch_axis >= 0 else None
        grid = q.grid if algorithm is None else algorithm.grid(q.grid)
        return cls(grid=grid, scale=scale, zero_point=zero, axis=axis, is_weight=is_weight, algorithm=algorithm)

    def shift(self, at: Grid, strict: bool = True) -> int | str:
        """Return the number to add to quantized values to store them on a chip's grid, or why it cannot store them.

        An activation needs a grid with equal ends, where it saturates, but for the lowest value if not `strict`. A
        weight is constant: a wider grid holds it.
        """
        own = self.grid
        if own.table is not None:
            return 0 if set(own.table) <= set(at.table or ()) else "has not the levels of its table"
        wider = at.levels - own.levels
        if at.kind != "int" or at.levels < own.levels or (wider > (0 if strict else 1) and not self.is_weight):
            return f"has {at.levels} values of kind {at.kind}, not {own.levels}"
        zeros = at.zero if isinstance(at.zero, tuple) else (at.zero,)
        if own.zero == "any" and "any" not in zeros:
            return "has no free zero point"
        shifts = [at.qmin - own.qmin if z == "any" else int(z) - int(own.zero) for z in zeros]  # type: ignore[arg-type]
        found = [k for k in shifts if at.qmin <= own.qmin + k and own.qmax + k <= at.qmax]
        if not found:
            return f"has the zero point {at.zero} in {at.qmin}..{at.qmax}, not {own.zero} in {own.qmin}..{own.qmax}"
        if at.pair_limit is not None:
            return "bounds its numbers in pairs"
        if at.pot and not torch.equal(self.scale.log2(), self.scale.log2().round()):
            return "requires powers of two"
        if at.scale_min is not None and float(self.scale.min()) < at.scale_min:
            return f"has no scale below {at.scale_min:g}"
        return "has one scale per tensor" if self.axis is not None and at.per == "tensor" else found[0]

    def stored(self, spec: TensorSpec, shape: torch.Size, platform: str, strict: bool = True) -> Stored:
        """Return the tensor, of this shape, as a platform stores it, with the same numbers.

        Raises:
            UnsupportedError: its format cannot hold them.
        """
        at = spec.grid(self.grid.signed) if spec.format.signed == "auto" else spec.grid()
        shift: int | str = f"has {spec.format.gap}" if spec.format.gap else self.shift(at, strict)
        if at.per not in ("tensor", "channel") or (self.axis is not None and self.axis != spec.axis):
            shift = f"has one scale per {at.per}, along axis {spec.axis}"
        if isinstance(shift, str):
            what = f"'{platform}' cannot store '{spec.name}' as it was trained: its format {spec.format_name} {shift}"
            raise UnsupportedError(what, got=f"{self.grid.bits} bits, one scale per {self.grid.per}", hint=_HINT)
        dims = () if spec.axis is None else (shape[spec.axis],)
        scale, zero = self.scale.float().expand(dims), (self.zero_point + shift).to(torch.int32).expand(dims)
        numbers = {"scale": scale.contiguous(), "zero_point": zero.contiguous()}
        return Stored(format=spec.format_name, grid=at, axis=spec.axis, **numbers)

    def times(self, k: torch.Tensor, w: torch.Tensor, axis: int) -> "Learned":
        """Return the quantization of a weight whose channel c is multiplied by k[c], k of any sign.

        w is the product. A negative factor mirrors the quantized values: a wider grid may be needed.
        """
        scale = self.scale.expand(k.shape) * torch.where(k == 0, 1.0, k.abs())
        zero = self.zero_point.expand(k.shape)
        by = [1] * w.dim()
        by[axis] = -1
        codes = (w / scale.view(by)).round() + zero.view(by)
        low, high = min(self.grid.qmin, int(codes.min())), max(self.grid.qmax, int(codes.max()))
        grid = replace(self.grid, qmin=low, qmax=high, per="channel", pot=False)
        wide = grid.levels > 1 << grid.bits or low < -(1 << grid.bits - 1)
        grid = replace(grid, bits=grid.bits + int(wide))
        return replace(self, grid=grid, scale=scale, zero_point=zero, axis=axis)


@dataclass(frozen=True)
class Trained:
    """A trained network without its quantizers, on the CPU."""

    plain: fx.GraphModule
    results: dict[str, QuantizeBase]  #: quantizers of results, by node of the trace
    weights: dict[str, Learned]  #: by name
    floats: tuple[str, ...] = ()  #: layers that the user left in float

    @classmethod
    def of(cls, model: fx.GraphModule) -> "Trained":
        """Return the network of a trained model; its weights are quantized.

        Raises:
            UnsupportedError: a weight is not on a grid, or a batch norm behind it cannot be folded.
        """
        plain = copy.deepcopy(model).eval().cpu()
        out = cls(plain, {}, {}, tuple(model.meta.get("floats", ())))
        modules = dict(plain.named_modules())
        for n in list(plain.graph.nodes):
            m: Any = modules[n.target] if n.op == "call_module" else None
            if isinstance(m, QuantizeBase):
                out.results[n.args[0].name] = m
                n.replace_all_uses_with(n.args[0])
                plain.graph.erase_node(n)
            elif isinstance(m, FoldedBatchNorm) and f"{n.target}.weight" not in out.weights:
                out._unwrap(n, m)
        plain.delete_all_unused_submodules()
        plain.recompile()
        return out

    def _unwrap(self, n: fx.Node, m: FoldedBatchNorm) -> None:
        """Replace a layer with a quantizer by the layer with the quantized weight, and the batch norm behind it."""
        layer, quantizer, name = m.fold(), m.weight_quantizer, f"{n.target}.weight"
        assert isinstance(quantizer, QuantizeBase)  # `prepare_qat_fx` has made it
        with torch.no_grad():
            raw: Any = layer.weight
            layer.weight = nn.Parameter(quantizer.reals(raw))
            learned = Learned.of(quantizer, is_weight=True)
            check_on_grid(name, learned, layer.weight, quantizer(raw))
            bn = self._batch_norm_behind(n)
            if bn is not None:
                layer.weight = nn.Parameter(quantizer(raw))
                layer, learned = _fold_behind(layer, learned, self.plain.get_submodule(str(bn.target)), name)
                bn.replace_all_uses_with(n)
                self.plain.graph.erase_node(bn)
        self.plain.add_submodule(str(n.target), layer)
        self.weights[name] = learned

    def _batch_norm_behind(self, n: fx.Node) -> fx.Node | None:
        """Return the batch norm that alone reads the result of a layer, if each is called once."""
        user = next(iter(n.users), n)
        once = all(sum(m.target == c.target for m in self.plain.graph.nodes) == 1 for c in (n, user))
        reads = len(n.users) == 1 and user.op == "call_module" and once
        return user if reads and isinstance(self.plain.get_submodule(str(user.target)), _BatchNorm) else None


def _fold_behind(layer: nn.Module, learned: Learned, bn: nn.Module, name: str) -> tuple[nn.Module, Learned]:
    """Fold a batch norm into a quantized weight: its channels keep their quantized values, with other scales.

    Raises:
        UnsupportedError: groups of a transposed convolution share a channel of the weight.
    """
    assert isinstance(bn, _BatchNorm)  # see `_batch_norm_behind`
    host = FoldedBatchNorm(layer, bn, 1)
    folded: Any = host.fold()
    k, axis = host.factors(), host.channel_axis
    if len(k) != folded.weight.shape[axis]:
        what = f"The batch norm behind '{name}' was not folded in training, and its groups share scales"
        raise UnsupportedError(what, hint="train with another folding strategy: get_foldbn_config(1)")
    return folded, learned.times(k, folded.weight.detach(), axis)


def check_on_grid(name: str, q: Learned, x: torch.Tensor, y: torch.Tensor) -> None:
    """Check that y is x, fake-quantized with the learned scale and zero point.

    Raises:
        UnsupportedError: it is not; the message names the tensor.
    """
    off = (fake_quantize(x, q.scale, q.zero_point, q.grid, q.axis) - y).abs().max()
    if float(off) > TOLERANCE * float(y.abs().max()):
        what = f"'{name}' was not rounded to equal steps of its scale, the only levels that formats have"
        got = type(q.algorithm).__name__ if q.algorithm else "a quantizer of your own"
        raise UnsupportedError(what, got=got, hint="train it with another method")
